"""Prompt lookup: the request's newest tokens have occurred before, so what followed then is a guess at what follows."""

from __future__ import annotations

import numpy as np

_NONE = np.empty(0, np.int32)


def lookup(ids: np.ndarray, count: int, shortest: int, longest: int) -> np.ndarray:
    """Up to ``count`` guesses after ``ids``, both int32; none unless the last ``shortest`` ids occurred before.

    Of several places the one that agrees with most ids, counted up to ``longest``, and of those the newest. Guesses
    that reach the end go on from their own beginning, as a loop would. One pass over ``ids``.
    """
    last = len(ids) - 1
    ends = np.flatnonzero(ids[:last] == ids[last])
    best = -1
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[ids[ends - (length - 1)] == ids[last - (length - 1)]]
        if not len(ends):
            break
        if length >= shortest:
            best = int(ends[-1])
    if best < 0:
        return _NONE
    guesses = ids[best + 1 : best + 1 + count]
    return guesses if len(guesses) == count else np.resize(guesses, count)


class NgramDrafter:
    """Drafts by :func:`lookup`."""

    foresees = True
    longest_rest = 16

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def guess(self, ids: np.ndarray, count: int) -> np.ndarray:
        return lookup(ids, count, self._shortest, self._longest)
