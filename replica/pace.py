"""How well the next tokens of one request can be guessed, and so how many guesses are worth verifying."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

FADE = 0.85
"""Weight of a guess after the next one: a memory of about seven."""
LEAST_CHANCE = 0.3
"""Below, nothing is drafted: a second token in a step costs more than each later one."""


@dataclass(slots=True)
class Pace:
    """Fading counts of guesses that came right and wrong, from one of each."""

    right: float = 0.0
    wrong: float = 0.0
    guess: int = -1
    """Guessed id of the next token, not drafted: it teaches as much and costs nothing. -1: none."""
    rest: int = 0
    """Tokens until the next look."""
    pause: int = 0
    """Length of the last rest."""

    @property
    def chance(self) -> float:
        """That a guess comes right when those before it did."""
        return (self.right + 1) / (self.right + self.wrong + 2)

    def learn(self, num_right: int, num_guesses: int) -> None:
        """The first ``num_right`` of the guesses were right; those after the first wrong one teach nothing."""
        missed = num_right < num_guesses
        fade = FADE ** (num_right + missed)
        self.right = self.right * fade + num_right
        self.wrong = self.wrong * fade + missed

    def length(self, price: float, most: int) -> int:
        """How many guesses to verify when one more token in a step costs as much time as ``price`` tokens take: the
        k-th is right with chance**k, which must be worth it."""
        chance = self.chance
        return 0 if chance < max(LEAST_CHANCE, price) else min(most, int(log(price) / log(chance)))

    def is_resting(self) -> bool:
        """Asked once per token."""
        self.rest = max(0, self.rest - 1)
        return self.rest > 0

    def looked(self, in_vain: bool, longest_rest: int) -> None:
        """Rests double while looking is in vain."""
        self.pause = min(longest_rest, 2 * self.pause or 1) if in_vain else 0
        self.rest = self.pause
