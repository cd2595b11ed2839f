"""Stop strings matched over a stream of text, independent of how the stream is cut (Aho & Corasick 1975)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Automaton over a request's stop strings; immutable, shared by its choices.

    State = longest suffix of the text that begins some stop string; its length is exactly what must be held back.
    """

    __slots__ = ("_fail", "_next", "_output", "depth", "first", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises ValueError for an empty string."""
        if any(not string for string in strings):
            raise ValueError("a stop string must not be empty")
        self.strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self._output: list[int | None] = [None]
        for index, string in enumerate(strings):
            self._insert(string, index)
        self._fail = self._failure_links()
        self.first = re.compile("[" + re.escape("".join(sorted({s[0] for s in strings}))) + "]")

    def _insert(self, string: str, index: int) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._output.append(None)
            state = following
        if self._output[state] is None:
            self._output[state] = index

    def _failure_links(self) -> list[int]:
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                queue.append(following)
                back = fail[state]
                while back and char not in self._next[back]:
                    back = fail[back]
                fail[following] = self._next[back].get(char, 0)
                if self._output[following] is None:
                    self._output[following] = self._output[fail[following]]
        return fail

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def output(self, state: int) -> int | None:
        """Index of the longest stop string that ends here."""
        return self._output[state]


class StopMatcher:
    """One choice's position in the automaton: text in, text that may be shown out.

    The first stop string to *end* wins, and of those that end together the longest; so the result doesn't depend on
    how the text was cut. Everything before the match has been returned, nothing of it ever is.
    """

    __slots__ = ("_held", "_state", "_stops", "matched", "rest")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        self.rest = ""
        """Once ``matched`` is set: what followed the match in the last ``feed``."""

    def feed(self, text: str) -> str:
        """Text now certain to precede any match; nothing more after ``matched`` is set."""
        stops, state = self._stops, self._state
        start = 0
        if state == 0:
            found = stops.first.search(text)
            if found is None:
                return text
            start = found.start()
        for index in range(start, len(text)):
            state = stops.step(state, text[index])
            output = stops.output(state)
            if output is not None:
                self.matched = stops.strings[output]
                self.rest = text[index + 1 :]
                seen = self._held + text[: index + 1]
                self._held, self._state = "", 0
                return seen[: len(seen) - len(self.matched)]
        self._state = state
        seen = self._held + text
        shown = len(seen) - stops.depth[state]
        self._held = seen[shown:]
        return seen[:shown]

    def finish(self) -> str:
        """Text held back for a match that never came."""
        held, self._held, self._state = self._held, "", 0
        return held

    def check_invariants(self) -> None:
        assert len(self._held) == self._stops.depth[self._state]
        assert any(s.startswith(self._held) for s in self._stops.strings)
