"""Incremental readers of JSON text: where a value ends, and the parts of a ``{"name": ..., "arguments": ...}``."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_PRIMITIVE_END = frozenset(_SPACE + ",]}")
_INTERESTING = re.compile(r'["\\{}\[\]]')


class ValueEnd:
    """Finds the end of one JSON value that is fed in pieces, without building it.

    Brackets are counted, not matched by kind: broken JSON inside a value is the reader's of the value to notice.
    """

    __slots__ = ("_depth", "_escaped", "_kind", "_string")

    def __init__(self) -> None:
        self._kind = ""
        self._depth = 0
        self._string = False
        self._escaped = False

    @property
    def is_container(self) -> bool:
        return self._kind in ("{", "[")

    def feed(self, text: str, start: int) -> int | None:
        """Index just after the value's last character in ``text``; None when it goes on. Begins at its first one."""
        if not self._kind:
            self._kind = text[start]
        if self._kind not in '{["':
            return next((i for i in range(start, len(text)) if text[i] in _PRIMITIVE_END), None)
        index = start
        while index < len(text):
            if self._escaped:
                self._escaped = False
                index += 1
                continue
            match = _INTERESTING.search(text, index)
            if match is None:
                return None
            index = match.end()
            char = match.group()
            if char == '"':
                self._string = not self._string
                if not self._string and self._depth == 0:
                    return index
            elif self._string:
                self._escaped = char == "\\"
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index
        return None


class _State(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()
    DONE = auto()
    FAILED = auto()


class CallReader:
    """Reads one call object: ``name`` once known, arguments as they come.

    ``strict``: an object with other keys, or without both name and arguments, is no call (it is a model's JSON answer).
    A call counts as one (``started``) when its name is known and its arguments begin; ``failed`` is set only before.
    """

    KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._state = _State.OPEN
        self._raw = ""
        self._key = ""
        self._end = ValueEnd()
        self._early = ""
        """Arguments that came before the name."""
        self._saw_arguments = False
        self.name: str | None = None
        self.started = False

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def failed(self) -> bool:
        return self._state is _State.FAILED

    def feed(self, text: str) -> tuple[str, int]:
        """(arguments text that is now certain, characters of ``text`` used). Stops where the object ends."""
        out: list[str] = []
        index = 0
        while index < len(text) and self._state not in (_State.DONE, _State.FAILED):
            if self._state in (_State.IN_KEY, _State.VALUE):
                index = self._span(text, index, out)
            else:
                index = self._between(text, index)
        if self.done and self.started and not self._saw_arguments:
            out.append("{}")
        return "".join(out), index

    def _between(self, text: str, index: int) -> int:
        """One character of structure: braces, colons, commas, spaces. Returns where to go on."""
        char = text[index]
        if char in _SPACE or (char == "," and self._state is _State.KEY):
            return index + 1
        if self._state is _State.BEFORE_VALUE:
            self._state, self._end, self._raw = _State.VALUE, ValueEnd(), ""
            return index
        if self._state is _State.OPEN and char == "{":
            self._state = _State.KEY
        elif self._state is _State.COLON and char == ":":
            self._state = _State.BEFORE_VALUE
        elif self._state is _State.KEY and char == '"':
            self._state, self._end, self._raw = _State.IN_KEY, ValueEnd(), ""
            return index
        elif self._state is _State.KEY and char == "}":
            self._close()
        else:
            self._break()
        return index + 1

    def _span(self, text: str, index: int, out: list[str]) -> int:
        """A key or value, or as much of it as is there."""
        end = self._end.feed(text, index)
        part = text[index : len(text) if end is None else end]
        if self._state is _State.VALUE and self._is_arguments and self._end.is_container:
            self._arguments(part, out)
        else:
            self._raw += part
        if end is None:
            return len(text)
        if self._state is _State.IN_KEY:
            self._end_key()
        else:
            self._end_value(out)
        return end

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _arguments(self, part: str, out: list[str]) -> None:
        self._saw_arguments = True
        if self.name is None:
            self._early += part
        else:
            self.started = True
            out.append(part)

    def _end_key(self) -> None:
        key = _string(self._raw)
        self._key = key or ""
        self._state = _State.COLON
        if key is None or (self._strict and key not in self.KEYS):
            self._break()

    def _end_value(self, out: list[str]) -> None:
        self._state = _State.KEY
        if self._key == "name" and self.name is None:
            self.name = _string(self._raw)
            if not self.name:
                self._break()
            elif self._early:
                self.started = True
                out.append(self._early)
        elif self._is_arguments and not self._end.is_container:
            # Some models write the arguments as a string that holds the object.
            inner = _string(self._raw)
            self._arguments((inner or "").strip() or "{}", out)

    def _close(self) -> None:
        self._state = _State.DONE
        if self.name is None or (self._strict and not self._saw_arguments):
            self._state = _State.FAILED
        else:
            self.started = True

    def _break(self) -> None:
        # A call that was announced can't be taken back; what follows its broken part is not read.
        self._state = _State.DONE if self.started else _State.FAILED


def _string(raw: str) -> str | None:
    try:
        value = json.loads(raw)
        return value if isinstance(value, str) else None
    except ValueError:
        return None
