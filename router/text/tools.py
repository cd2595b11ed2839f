"""Tool-call parsers: a model's text, in any pieces, to content and calls.

Every parser's events, concatenated per channel, are the same for any split of the text. What can't be a call after all
comes out as content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, Protocol

from router.text.events import CallArguments, CallStart, Content, Event
from router.text.json_scan import CallReader, ValueEnd
from router.text.stops import StopMatcher, StopStrings

Format = Literal["hermes", "llama3_json", "mistral"]
_SPACE = " \t\r\n"
_MAX_HEAD = 512
"""Characters between Mistral's marker and a call's arguments."""


class ToolParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Whatever was held back, at the end of the answer."""
        ...


class _Prose:
    """Content, with spaces before a call dropped; they are held until it is known what follows."""

    def __init__(self) -> None:
        self._held = ""
        self._fresh = True
        """Nothing shown since the start or the last call: spaces lead nowhere yet."""
        self._after_call = False

    def add(self, text: str) -> list[Event]:
        text = self._held + text
        shown = text.rstrip(_SPACE)
        self._held = text[len(shown) :]
        if not shown:
            return []
        if self._fresh and self._after_call:
            shown = shown.lstrip(_SPACE)
        self._fresh = False
        return [Content(shown)]

    def call(self) -> None:
        self._held, self._fresh, self._after_call = "", True, True

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [Content(held)] if held and not (self._fresh and self._after_call) else []


class _Calls:
    """Reads call objects, numbers them, and keeps the raw text of one that may turn out to be none."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._reader: CallReader | None = None
        self._raw = ""
        self._announced = False
        self.index = -1

    @property
    def open(self) -> bool:
        return self._reader is not None

    def begin(self, marker: str) -> None:
        """``marker``: text before the object that belongs to the call, given back if it is none."""
        self._reader, self._raw, self._announced = CallReader(strict=self._strict), marker, False

    def feed(self, text: str) -> tuple[list[Event], str, str | None]:
        """(events, rest of the text, raw text when this was no call after all)."""
        reader = self._reader
        assert reader is not None, "begin comes first"
        arguments, used = reader.feed(text)
        events: list[Event] = []
        if not self._announced:
            self._raw += text[:used]
            if reader.started and reader.name is not None:
                self._announced = True
                self.index += 1
                events.append(CallStart(self.index, reader.name))
        if self._announced and arguments:
            events.append(CallArguments(self.index, arguments))
        if reader.failed:
            self._reader = None
            return events, text[used:], self._raw
        if reader.done:
            self._reader = None
        return events, text[used:], None

    def finish(self) -> str:
        """Raw text of a call that the answer's end cut before it was announced."""
        raw = "" if self._announced or self._reader is None else self._raw
        self._reader = None
        return raw


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen, and models without a format of
    their own."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"
    _markers = StopStrings([_BEGIN, _END])

    def __init__(self) -> None:
        self._scan = StopMatcher(self._markers)
        self._calls = _Calls(strict=False)
        self._prose = _Prose()
        self._closing = False
        """A call's object has ended, its end marker has not come yet."""

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._calls.open:
                got, text, raw = self._calls.feed(text)
                events += got
                if raw is not None:
                    events += self._prose.add(raw)
                elif not self._calls.open:
                    self._prose.call()
                    self._closing = True
                continue
            before = self._scan.feed(text)
            marker, text = self._scan.matched, self._scan.rest
            events += self._outside(before)
            if marker is None:
                break
            self._scan = StopMatcher(self._markers)
            if marker == self._BEGIN:
                self._calls.begin(marker)
            elif not self._closing:
                events += self._prose.add(marker)
            self._closing = False
        return events

    def _outside(self, text: str) -> list[Event]:
        # Between an object's end and its end marker there is nothing to show, whatever a model puts there.
        return [] if self._closing or not text else self._prose.add(text)

    def finish(self) -> list[Event]:
        events = self._outside(self._scan.finish())
        raw = self._calls.finish()
        events += self._prose.add(raw) if raw else []
        return events + self._prose.finish()


class Llama3Parser:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, several with semicolons between; else content."""

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._calls = _Calls(strict=True)
        self._lead = ""
        """Spaces, separators and the tag before an object."""
        self._content = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text and not self._content:
            if self._calls.open:
                got, text, raw = self._calls.feed(text)
                events += got
                if raw is not None:
                    self._content, text = True, raw + text
                continue
            self._lead, text = self._lead + text, ""
            bare = self._lead.lstrip(_SPACE + ";") if self._calls.index >= 0 else self._lead.lstrip(_SPACE)
            if bare.startswith(self._TAG):
                bare = bare.removeprefix(self._TAG).lstrip(_SPACE)
            if bare.startswith("{"):
                marker = self._lead[: len(self._lead) - len(bare)]
                self._calls.begin("" if self._calls.index >= 0 else marker)
                self._lead, text = "", bare
            elif bare and not self._TAG.startswith(bare):
                self._content = True
                text, self._lead = self._lead if self._calls.index < 0 else bare, ""
        return [*events, Content(text)] if text else events

    def finish(self) -> list[Event]:
        held = self._calls.finish() or ("" if self._calls.index >= 0 else self._lead)
        self._lead = ""
        return [Content(held)] if held else []


class MistralParser:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of newer models."""

    _BEGIN = "[TOOL_CALLS]"
    _markers = StopStrings([_BEGIN])
    _NAME = re.compile(r"\s*([A-Za-z0-9_.\-]{1,128})(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*")

    def __init__(self) -> None:
        self._scan = StopMatcher(self._markers)
        self._calls = _Calls(strict=False)
        self._prose = _Prose()
        self._mode: Literal["prose", "head", "list", "arguments"] = "prose"
        self._head = ""
        self._opening = ""
        """Marker and bracket of a list that holds no call yet."""
        self._end = ValueEnd()

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            step = {
                "prose": self._in_prose,
                "head": self._in_head,
                "list": self._in_list,
                "arguments": self._in_arguments,
            }[self._mode]
            got, text = step(text)
            events += got
        return events

    def _in_prose(self, text: str) -> tuple[list[Event], str]:
        events = self._prose.add(self._scan.feed(text))
        if self._scan.matched is None:
            return events, ""
        rest, self._scan = self._scan.rest, StopMatcher(self._markers)
        self._mode, self._head = "head", ""
        return events, rest

    def _in_head(self, text: str) -> tuple[list[Event], str]:
        """Right after the marker: a list, or a function's name up to its arguments."""
        self._head += text
        bare = self._head.lstrip(_SPACE)
        if bare.startswith("["):
            self._mode, self._opening = "list", self._BEGIN + self._head[: len(self._head) - len(bare) + 1]
            return [], bare[1:]
        name, brace, _ = self._head.partition("{")
        match = self._NAME.fullmatch(name)
        if brace and match and len(name) <= _MAX_HEAD:
            self._prose.call()
            self._mode, self._end = "arguments", ValueEnd()
            self._calls.index += 1
            return [CallStart(self._calls.index, match[1])], self._head[len(name) :]
        if brace or len(name) > _MAX_HEAD:
            self._mode = "prose"
            return self._prose.add(self._BEGIN), self._head
        return [], ""

    def _in_list(self, text: str) -> tuple[list[Event], str]:
        if self._calls.open:
            events, rest, raw = self._calls.feed(text)
            if raw is not None:
                self._mode = "prose"
                events += self._prose.add(raw)
            elif not self._calls.open:
                self._prose.call()
            return events, rest
        bare = text.lstrip(_SPACE + ",")
        if self._opening:  # still a part of what may be no call
            self._opening += text[: len(text) - len(bare)]
        if bare.startswith("]"):
            self._mode, self._opening = "prose", ""
            return [], bare[1:]
        if bare:
            self._calls.begin(self._opening)
            self._opening = ""
        return [], bare

    def _in_arguments(self, text: str) -> tuple[list[Event], str]:
        end = self._end.feed(text, 0)
        if end is not None:
            self._mode = "prose"
        part = text[:end]
        return [CallArguments(self._calls.index, part)], text[len(part) :]

    def finish(self) -> list[Event]:
        held = {"prose": self._scan.finish(), "head": self._BEGIN + self._head, "list": self._opening}.get(
            self._mode, ""
        )
        held += self._calls.finish()
        return (self._prose.add(held) if held else []) + self._prose.finish()


PARSERS: dict[Format, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}
MARKERS: dict[Format, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
"""Texts that a parser must see even when they are special tokens."""


def format_of(template: str) -> Format | None:
    """The tool-call format that a chat template teaches; None when it teaches none known here."""
    if "<function=" in template or "<arg_key>" in template:
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary of argument' in template:
        return "llama3_json"
    return None
