"""Splits ``<think>...</think>`` from the answer, for any split of the tags."""

from __future__ import annotations

from router.text.events import Content, Event, Reasoning
from router.text.stops import StopMatcher, StopStrings

BEGIN, END = "<think>", "</think>"
_SPACE = " \t\r\n"
_end_marker = StopStrings([END])


class ReasoningParser:
    """Reasoning is what stands before the first ``</think>``, when the prompt or the answer itself opened it.

    A ``<think>`` anywhere but at the start is content. Line breaks around the tags belong to neither side.
    """

    def __init__(self, *, opened: bool) -> None:
        """``opened``: the prompt ends inside the reasoning (the template wrote the tag)."""
        self._inside = opened
        self._deciding = not opened
        self._head = ""
        self._scan = StopMatcher(_end_marker)
        self._held = ""
        """Spaces at the end of the reasoning so far; dropped if the tag follows."""
        self._started = False
        self._after = False
        """Right after the tag, before the answer's first character."""

    @property
    def inside(self) -> bool:
        return self._inside

    def feed(self, text: str) -> list[Event]:
        if self._deciding:
            text = self._decide(text)
        events: list[Event] = []
        if self._inside and text:
            events += self._reason(self._scan.feed(text))
            if self._scan.matched is None:
                return events
            text, self._inside, self._after, self._held = self._scan.rest, False, True, ""
        if self._after:
            text = text.lstrip(_SPACE)
            self._after = not text
        return [*events, Content(text)] if text else events

    def _decide(self, text: str) -> str:
        self._head += text
        bare = self._head.lstrip(_SPACE)
        if bare.startswith(BEGIN):
            self._inside, self._deciding = True, False
            return bare.removeprefix(BEGIN)
        if BEGIN.startswith(bare):
            return ""
        self._deciding = False
        return self._head

    def _reason(self, text: str) -> list[Event]:
        text = self._held + text
        if not self._started:
            text = text.lstrip(_SPACE)
        shown = text.rstrip(_SPACE)
        self._held = text[len(shown) :]
        self._started |= bool(shown)
        return [Reasoning(shown)] if shown else []

    def finish(self) -> list[Event]:
        if self._deciding:
            self._deciding = False
            return [Content(self._head)] if self._head else []
        return self._reason(self._scan.finish()) if self._inside else []


def opened_by(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a reasoning block."""
    tail = prompt[-200:].rstrip(_SPACE)
    return tail.endswith(BEGIN)
