"""How many replicas there should be, out of how busy each says it is.

Serve's own signal, requests in flight through its handles, is always zero here: tokens don't cross Serve. So each
replica reports a load (see :func:`load`), Serve gathers the averages over its look-back time, and its controller calls
:func:`decide`. Serve's delays then damp it. Standard library only: Serve pickles this module into its controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

METRIC = "load"
QUEUE_S = 1.0
"""Prefill work waiting for so long counts as a full replica, seconds."""
SHRINK_BELOW = 0.8
"""One replica fewer only if those that stay would be below this load: what it had cached has to be computed again."""


def load(info: Mapping[str, Any], target: float) -> float:
    """Of one replica, out of ``Engine.info()``: 1.0 is as busy as ``target`` (0 to 1) asks for.

    Busy is the largest of: share of the pages that requests hold; requests, waiting ones included, per row of the
    batch; seconds of prefill that wait, per QUEUE_S.
    """
    work, pages = info["load"], info["pages"]
    prefill_ms_per_token = work["coefficients"][0]
    busy = (
        pages["held"] / max(1, pages["all"]),
        info["requests"] / info["config"]["max_batch_size"],
        work["queued_uncached_tokens"] * prefill_ms_per_token / 1e3 / QUEUE_S,
    )
    return max(busy) / target


def wanted(loads: Sequence[float], current: int) -> int:
    """Replicas that bring the mean of ``loads`` to at most 1; fewer than ``current`` only one at a time."""
    total = sum(loads) / len(loads) * current
    if total > current:
        return math.ceil(total)
    if current > 1 and total / (current - 1) < SHRINK_BELOW:
        return current - 1
    return current


def decide(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy function; ``context`` is its AutoscalingContext. Stays put while nobody has reported."""
    reported = (context.aggregated_metrics or {}).get(METRIC, {})
    loads = [float(value) for value in reported.values()]
    if not loads or context.current_num_replicas < 1:
        return context.target_num_replicas, {}
    return wanted(loads, context.current_num_replicas), {}
