"""What one step is made of: how it is being handed out, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from replica.batch import Batch
from replica.request import Request
from replica.step_time import StepShape

Kind = Literal["", "short", "long"]


@dataclass(slots=True)
class Plan:
    """A step: its batch, the request of each row, and its regressors for the step-time fit."""

    batch: Batch
    requests: list[Request]
    shape: StepShape


@dataclass(slots=True)
class Turn:
    """What is left to hand out in one step."""

    budget: int
    cap: int
    """A prefill of more tokens is a long one."""
    long_budget: int
    """Of the budget, what long prefills may take while shorter ones wait."""
    grants: dict[Request, int] = field(default_factory=dict)
    drafts: dict[Request, np.ndarray] = field(default_factory=dict)
    """int32 guesses of the ids after a decoding request's last one, to be verified in this step."""
    capped: list[Request] = field(default_factory=list)
    num_prefills: int = 0
    preempted: bool = False
    shorts_wait: bool | None = None
    only: Kind = ""
    """In a step that may be long, which prompts are in it, short ones or one long one."""
    passed_over: bool = False
    """A long prompt was next in line and had to let short ones pass."""

    def leaves_out(self, remaining: int) -> bool:
        """Whether a prefill of so many tokens is not for this step."""
        is_long = remaining > self.cap
        if not self.only or is_long == (self.only == "long"):
            return False
        self.passed_over |= is_long
        return True
