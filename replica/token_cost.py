"""What one token more costs in a step that only decodes, in tokens: by that, speculation decides how far to guess."""

from __future__ import annotations

FADE = 0.97
"""Weight of a step after the next one: a memory of about thirty, so that a smaller batch soon has its own figures."""
PRIOR = 0.08
"""Assumed share of a step's time that one token more takes, until steps of several sizes have been measured: it counts
as much as PRIOR_WEIGHT of squared deviation in tokens."""
PRIOR_WEIGHT = 4.0
OUTLIER = 3.0
"""A step that took so many times the mean counts as that: a compile, a busy machine."""
LEAST = 0.02


class TokenCost:
    """ms = a + b * tokens by least squares with fading, which means and deviations are enough for.

    ``running`` tokens of a step: its decoding rows and the guesses that they verify.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._ms = 0.0
        """Fading means."""
        self._spread = self._joint = 0.0
        """Fading sums of (tokens - mean)^2 and (tokens - mean) * (ms - mean)."""

    def learn(self, tokens: int, ms: float) -> None:
        if self._weight:
            ms = min(ms, OUTLIER * self._ms)
        self._weight = FADE * self._weight + 1
        off = tokens - self._tokens
        self._tokens += off / self._weight
        before = ms - self._ms
        self._ms += before / self._weight
        self._spread = FADE * self._spread + off * (tokens - self._tokens)
        self._joint = FADE * self._joint + before * (tokens - self._tokens)

    def price(self, rows: int) -> float:
        """Of a token more, in tokens, at the rate at which ``rows`` rows make one token each."""
        if not self._ms:
            return min(1.0, PRIOR * rows)
        slope = (self._joint + PRIOR_WEIGHT * PRIOR * self._ms) / (self._spread + PRIOR_WEIGHT)
        step = self._ms + slope * (rows - self._tokens)
        return min(1.0, max(LEAST, slope * rows / max(step, slope, 1e-6)))
