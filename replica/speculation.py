"""Speculation: several guessed tokens of a request are verified in one step, and the output does not change.

Verification samples after the last token and after each guess, with the noise of that position, just as without
speculation. Samples count up to the first that differs from its guess: until there, every sample followed the very
tokens that it would have followed. So a guess is accepted with the probability that the model gives it, what replaces
a rejected one has the model's distribution without it, and more than that, the ids are those of an engine that does not
speculate: the noise is a function of (seed, position).

How far to guess is decided per request and step, by how often its guesses came right (:class:`replica.pace.Pace`) and
what a token more in a step costs (:class:`replica.token_cost.TokenCost`). Guesses follow a request's last token,
which must be on the host: while any request drafts, the loop reads a step back before it launches the next. Requests
without guesses worth verifying run ahead as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from replica.batch import FROM_DRAFT, Row
from replica.config import ResolvedConfig
from replica.ngram import NgramDrafter
from replica.pace import Pace
from replica.page_pool import PagePool
from replica.step_time import StepTimeModel
from replica.token_cost import TokenCost

if TYPE_CHECKING:
    from replica.request import Request
    from replica.turn import Turn


class Drafter(Protocol):
    """Guesses on the engine thread."""

    foresees: bool
    """A guess costs next to nothing, so one is made for every token, whether it is verified or not; else what is known
    of a request comes from its verified guesses alone."""
    longest_rest: int
    """Tokens until the next look, at most, where looking is in vain."""

    def guess(self, ids: np.ndarray, count: int) -> np.ndarray:
        """int32, up to ``count`` ids that may follow ``ids`` int32 [num_tokens]."""
        ...


class RunnerDrafts:
    """Leaves guessing to the runner's draft model."""

    foresees = False
    longest_rest = 64

    def guess(self, ids: np.ndarray, count: int) -> np.ndarray:
        return np.full(count, FROM_DRAFT, np.int32)


class Speculation:
    """Of one engine; used on its thread."""

    def __init__(self, drafter: Drafter, most: int, step_time: StepTimeModel) -> None:
        self.drafter, self.most = drafter, most
        self.drafted, self.accepted = [0] * most, [0] * most
        """Guesses verified, and found right, by position after the last token."""
        self.num_verifications = 0
        self._wishes: dict[Request, np.ndarray] = {}
        """Guesses after the last known token. What can't be granted is dropped at the next step."""
        self._cost = TokenCost()
        self._price = self._cost.price(1)
        step_time.on_decode = self._cost.learn

    @classmethod
    def of(cls, config: ResolvedConfig, step_time: StepTimeModel) -> Speculation | None:
        """None when it is off."""
        if config.speculative == "off":
            return None
        drafter: Drafter = RunnerDrafts()
        if config.speculative == "ngram":
            drafter = NgramDrafter(config.speculative_ngram_min, config.speculative_ngram_max)
        return cls(drafter, config.speculative_tokens, step_time)

    @property
    def waits(self) -> bool:
        """The next step needs ids that steps under way make."""
        return bool(self._wishes)

    def extend(self, turn: Turn, pool: PagePool, page_size: int) -> None:
        """Lengthens decoding rows by guesses, from what budget and pages are left: they hold nobody up."""
        self._price = self._cost.price(len(turn.grants))
        for request, guesses in list(self._wishes.items()):
            if request not in turn.grants or not request.is_decoding:  # ended, preempted, or without budget
                del self._wishes[request]
                continue
            assert turn.grants[request] == 1 and not request.num_pending, "guesses follow the last token"
            count = min(len(guesses), turn.budget)
            end = request.num_computed + 1 + count
            if end > request.num_pages * page_size and pool.num_available:
                request.add_pages(pool.allocate(1))
            count = min(count, request.num_pages * page_size - request.num_computed - 1)
            if count <= 0:
                del self._wishes[request]
                continue
            turn.drafts[request] = guesses[:count]
            turn.grants[request] += count
            turn.budget -= count

    def observe(self, request: Request, row: Row, num_sampled: int) -> None:
        """The row was read back, its ``num_sampled`` new tokens are appended: learns from them and looks ahead."""
        pace = request.pace
        if pace is None:
            pace = request.pace = Pace()
        if num_guesses := row.num_samples - 1:
            self._count(num_sampled - 1, num_guesses)
            pace.learn(num_sampled - 1, num_guesses)
        elif pace.guess >= 0:
            pace.learn(int(request.ids[request.num_tokens - 1] == pace.guess), 1)
        self._wishes.pop(request, None)
        pace.guess = -1
        room = request.max_total - request.num_tokens - 1
        if room <= 0 or request.slot < 0 or pace.is_resting():
            return
        length = pace.length(self._price, self.most)
        guesses = self.drafter.guess(request.ids[: request.num_tokens], min(max(1, length), room))
        if self.drafter.foresees:
            pace.looked(not len(guesses), self.drafter.longest_rest)
            pace.guess = int(guesses[0]) if len(guesses) else -1
            if not length:
                return
        else:
            pace.looked(not length, self.drafter.longest_rest)
        if len(guesses):
            self._wishes[request] = guesses

    def _count(self, num_right: int, num_guesses: int) -> None:
        self.num_verifications += 1
        for position in range(num_guesses):
            self.drafted[position] += 1
            self.accepted[position] += position < num_right

    def counters(self) -> dict[str, int]:
        return {
            "verifications": self.num_verifications,
            "drafted_tokens": sum(self.drafted),
            "accepted_tokens": sum(self.accepted),
        }

    def describe(self) -> dict[str, Any]:
        """JSON-able. ``price``: of a token more in a step, in tokens."""
        return {"drafted": list(self.drafted), "accepted": list(self.accepted), "price": round(self._price, 4)}
