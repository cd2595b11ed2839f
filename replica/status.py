"""What an engine says about itself: health for the controller, a description for ``/v1/engine`` and the metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from replica.scheduler import Scheduler
from router.wire import Load

if TYPE_CHECKING:
    from replica.loop import Engine

HEALTH_FLOOR_S = {"cuda": 1.0, "cpu": 5.0}
"""No step and no answer of the loop counts as late before this; a CPU's cores may be shared with anybody."""
FIRST_STEP_S = 120.0
"""Grace of the first step, which may compile."""


@dataclass(frozen=True)
class Health:
    """``ok`` turns false once nothing moved for twice the longest recent step, or twice what the step-time fit expects
    of the step under way, whichever is longer (and at least HEALTH_FLOOR_S)."""

    ok: bool
    reason: str
    round_trip_ms: float
    longest_step_ms: float


def probe(
    ask: Callable[..., Any],
    progress: Callable[[], tuple[float, float]],
    step_ms: Collection[float],
    device: str,
    ended: str | None,
) -> Health:
    """``ask(function, timeout)`` runs a function on the loop; ``progress`` gives the age of the step that it waits for
    and what is expected of that step, in seconds."""
    longest = max(list(step_ms), default=0.0) / 1e3
    limit = max(HEALTH_FLOOR_S[device], 2 * longest) if step_ms else FIRST_STEP_S
    began = time.monotonic()
    reason = ended
    if reason is None:
        try:
            age, expected = ask(progress, limit)
            limit = max(limit, 2 * expected)
            if age > limit:
                reason = f"a step has run for {age:.1f} s; the limit is {limit:.1f} s"
        except TimeoutError:
            reason = f"the loop did not answer within {limit:.1f} s"
    return Health(reason is None, reason or "ok", (time.monotonic() - began) * 1e3, longest * 1e3)


def load_of(scheduler: Scheduler, coefficients: tuple[float, float, float, float, float]) -> Load:
    """The scheduler's load at this moment."""
    queued, waiting, context = scheduler.queued_tokens, len(scheduler.waiting), 0
    for request in scheduler.running:
        total = request.num_tokens + request.num_pending
        if total > request.admitted_total:
            context += request.num_computed
        else:
            queued += total - request.num_computed
        if not request.announced:
            waiting += 1
    pool = scheduler.pool
    return Load(queued, len(scheduler.running), waiting, context, pool.num_free, pool.num_cached, coefficients)


def describe(engine: Engine) -> dict[str, Any]:
    """JSON-able. Runs on the engine thread."""
    scheduler, steps = engine.scheduler, np.array(engine.step_ms or [0.0])
    return {
        "replica": engine.events.replica_id,
        "pid": os.getpid(),
        "epoch": engine.events.epoch,
        "next_seq": engine.events.next_seq,
        "root": asdict(engine.root),
        "config": asdict(engine.config),
        "pages": {
            **engine.pool.counts(),
            "held_tokens": sum(request.num_computed for request in scheduler.running),
            "host": engine.host.counts() if engine.host else None,
        },
        "requests": len(engine._live),
        "waiting": engine.num_waiting,
        "load": asdict(load_of(scheduler, engine.step_time.coefficients)),
        "steps": {
            "count": engine.num_steps,
            "p50_ms": float(np.quantile(steps, 0.5)),
            "p99_ms": float(np.quantile(steps, 0.99)),
            "longest_ms": float(steps.max()),
            "lead_ms": engine.lead.seconds * 1e3,
            "late": engine.lead.num_late,
        },
        "counters": {
            **dict.fromkeys(COUNTERS, 0),
            **engine.counters,
            "preemptions": scheduler.num_preemptions,
            "prefix_queries": scheduler.prefix_queries,
            "prefix_hits": scheduler.prefix_hits,
            **(engine.speculation.counters() if engine.speculation else {}),
        },
        "speculation": engine.speculation.describe() if engine.speculation else None,
        "watch": engine.watch.describe(),
        "draining": engine.draining,
        "runner": engine.runner.describe(),
    }


COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "wasted_tokens",
    "failed_steps",
    "finished_stop",
    "finished_length",
    "finished_abort",
    "finished_deadline",
    "finished_error",
    "finished_refused",
    "verifications",
    "drafted_tokens",
    "accepted_tokens",
)
"""Always present: tokens prefilled, sampled, sampled past an end; failed steps; requests by why they ended; rows that
verified guesses, guesses, and those that became output."""
