"""A limit on reasoning: when it is used up, the router closes the block and lets the model answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningBudget:
    tokens: int
    begin_id: int | None
    """``<think>``, where it is a token of its own."""
    end_id: int
    """``</think>``."""
    closing: tuple[int, ...]
    """What is put in the model's mouth to end the reasoning."""
    opened: bool
    """The prompt opened the block."""


class BudgetWatch:
    """One answer's spending. Reasoning is open from the prompt's or the answer's own first tag to the end tag."""

    _LEAD = 2
    """An answer's own opening tag stands among so many first tokens, if at all."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._open = budget.opened
        self._over = False
        self._seen = 0
        self._spent = 0

    def cut(self, ids: Sequence[int]) -> int | None:
        """How many of these next ids still fit; None while the limit isn't reached."""
        if self._over:
            return None
        for index, token_id in enumerate(ids):
            self._seen += 1
            if not self._open:
                self._open = token_id == self._budget.begin_id
                self._over = not self._open and self._seen >= self._LEAD
            elif token_id == self._budget.end_id:
                self._over = True
            else:
                self._spent += 1
            if self._over:
                return None
            if self._open and self._spent >= self._budget.tokens:
                self._over = True
                return index + 1
        return None
