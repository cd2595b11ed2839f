"""What one step is made of: how it is being handed out, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from replica.batch import FROM_DEVICE, Batch, Row
from replica.request import Request
from replica.step_time import StepShape

_NEWEST = np.array([FROM_DEVICE], dtype=np.int32)
_NEWEST.flags.writeable = False
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

    def takes(self, remaining: int) -> bool:
        """Whether a prefill that was admitted upon an estimate is for this step; the first decides what it holds."""
        if self.only and not self.num_prefills:
            self.only = "long" if remaining > self.cap else "short"
        return not self.leaves_out(remaining)

    def plan(self, step: int, page_size: int) -> Plan:
        """The step that was handed out; its requests count as computed up to there from now on."""
        plan = Plan(Batch(step, []), [], StepShape())
        rows, requests, shape = plan.batch.rows, plan.requests, plan.shape
        for request, count in self.grants.items():
            start, num_tokens = request.num_computed, request.num_tokens
            end = start + count
            total = num_tokens + request.num_pending
            if (drafts := self.drafts.get(request)) is not None:
                token_ids = np.append(request.ids[start:num_tokens], drafts)
                num_samples = 1 + len(drafts)
            else:
                token_ids = _NEWEST if end > num_tokens else request.ids[start:end]
                num_samples = 1 if end == total else 0
            mask = None
            if num_samples and request.masking is not None:
                mask = request.masking.mask_call(total - request.num_prompt, token_ids[count - num_samples + 1 :])
            in_use = (end + page_size - 1) // page_size
            pages = request.view if end > (request.num_pages - 1) * page_size else request.view[:in_use]
            rows.append(
                Row(
                    request.slot,
                    start,
                    token_ids,
                    pages,
                    num_samples,
                    request.sampling,
                    request.fresh,
                    request.ids[:num_tokens] if request.fresh else None,
                    request.num_prompt,
                    end - num_samples + 1,
                    mask,
                )
            )
            requests.append(request)
            if total > request.admitted_total:
                shape.context += end
                shape.running += count
            else:
                shape.prefill_tokens += count
                shape.prefill_quad += count * (start + count / 2)
            request.fresh = False
            request.num_computed = end
            request.num_pending += num_samples
        return plan
