"""Placement in milliseconds, with a price on recomputing what some replica holds.

For a request of ``n`` tokens and a replica that has ``c`` of them cached or pending, with ``u = n - c``:

    P(u)  = a u + b u (c + u / 2) + ceil(u / chunk) (t0 + k1 context + k2 running)
    Q     = sum of P over dispatched requests without a first token, minus the progress of the oldest
    X     = time to fetch pages from elsewhere, overlapped with Q (0 if none)
    cost  = max(Q, X) + price P(u)
    price = min(8, 1 + waiting on the lower-quartile replica + [must evict to admit])

The least cost wins; among those within 5 ms of it, less any that another one matches in cost and beats in held pages,
the rendezvous hash of the first page that they don't all share, so that independent routers send the same new prefix
to the same replica. On an idle cluster this is plain expected
TTFT; under load, work added to a queue delays everyone behind it, and the price makes a router not recompute what
someone holds. The cap bounds hot-spotting: Q_chosen - Q_min <= 8 P(whole prompt) + 5 ms. Pure: no clock, no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from math import ceil, inf

from router.pages import mix64


@dataclass(frozen=True)
class Coefficients:
    """Step-time fit, milliseconds: per prefilled token, per (query, key) pair, per step, per context token, per row."""

    a: float
    b: float
    t0: float
    k1: float
    k2: float

    @property
    def fitted(self) -> bool:
        return self.a > 0 or self.t0 > 0

    def prefill_ms(self, uncached: int, cached: int, chunk: int, context: int, running: int) -> float:
        """P(u): time to prefill ``uncached`` tokens behind ``cached`` ones, in chunks, beside the running decodes."""
        steps = ceil(uncached / chunk)
        tokens = self.a * uncached + self.b * uncached * (cached + uncached / 2)
        return tokens + steps * (self.t0 + self.k1 * context + self.k2 * running)


UNFITTED = Coefficients(a=1 / 30, b=1.4e-6, t0=5.0, k1=3.5e-5, k2=0.02)
"""Stands in until the first fit arrives, when no peer has one either: an 8B-class model on one large GPU."""


@dataclass(frozen=True)
class PolicyOptions:
    max_price: float = 8.0
    tie_ms: float = 5.0
    slack_ratio: float = 3.0
    slack_ms: float = 5000.0
    """Safety net: a replica whose queue exceeds slack_ratio times the mean + slack_ms is left out."""


@dataclass(slots=True)
class ReplicaView:
    """One replica as one decision sees it. Lengths in tokens."""

    replica: str
    identity: int
    """64-bit hash of the replica's name: its side of the rendezvous hash."""
    cached: int
    """Tokens of this request that are cached or pending there."""
    queue_ms: float
    waiting: int
    running: int
    context_tokens: int
    free_pages: int
    coefficients: Coefficients
    chunk: int
    transfer_ms: float = 0.0
    suspicious: bool = False
    """Silent or slow for a moment: used only when nothing better is there."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``ttft_ms`` is the predicted time to the first token; ``prefill_ms`` is P(u), what the request adds to Q.
    ``cached`` of its tokens are cached or pending on the chosen replica, ``best_cached`` on whichever has most."""

    replica: str
    cached: int
    best_cached: int
    cost_ms: float
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    price: float
    tied: int


def identity(replica: str) -> int:
    """64-bit hash of a replica's name, the same in every router."""
    return int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), "little")


def rendezvous(views: Iterable[ReplicaView], key: int) -> ReplicaView:
    """Highest random weight (Thaler and Ravishankar, 1998) of (key, replica)."""
    return max(views, key=lambda view: (mix64(key ^ view.identity), view.replica))


def congestion(views: Sequence[ReplicaView]) -> int:
    """Requests without a first token on the lower-quartile replica: if some idle, recomputing there delays nobody."""
    return sorted(view.waiting for view in views)[len(views) // 4]


Priced = tuple[float, float, float, float, ReplicaView]
"""(cost, P(u), max(Q, X), price, replica); milliseconds."""


def _undominated(tied: Sequence[Priced]) -> list[Priced]:
    """Without replicas that another holds more pages than, for no more cost or no longer a wait.

    The wait counts by itself since costs also differ by the noise of two fits, which must not lose a held page.
    """
    least_cost = least_wait = inf
    kept: list[Priced] = []
    for _, group in groupby(sorted(tied, key=lambda entry: -entry[4].cached), key=lambda entry: entry[4].cached):
        level = list(group)
        kept += [entry for entry in level if entry[0] < least_cost and entry[2] < least_wait]
        least_cost = min(least_cost, *(entry[0] for entry in level))
        least_wait = min(least_wait, *(entry[2] for entry in level))
    return kept


def choose(
    views: Sequence[ReplicaView],
    num_tokens: int,
    keys: Sequence[int],
    page_size: int,
    *,
    fallback_key: int,
    slo_ms: float | None = None,
    options: PolicyOptions | None = None,
) -> Decision | None:
    """The replica with the least cost, or None when there is none (that meets ``slo_ms``, if given).

    ``keys``: directory keys of the prompt's full pages. ``fallback_key`` breaks ties where no page can.
    """
    options = options or PolicyOptions()
    if not views:
        return None
    price = 1.0 + congestion(views)
    limit_ms = options.slack_ratio * sum(view.queue_ms for view in views) / len(views) + options.slack_ms
    priced: list[Priced] = []
    for view in views:
        cached = min(view.cached, num_tokens - 1)
        uncached = num_tokens - cached
        own_ms = view.coefficients.prefill_ms(uncached, cached, view.chunk, view.context_tokens, view.running)
        wait_ms = max(view.queue_ms, view.transfer_ms)
        if view.queue_ms > limit_ms or (slo_ms is not None and wait_ms + own_ms > slo_ms):
            continue
        evicts = ceil(uncached / page_size) > view.free_pages
        own_price = min(options.max_price, price + evicts)
        priced.append((wait_ms + own_price * own_ms, own_ms, wait_ms, own_price, view))
    trusted = [entry for entry in priced if not entry[4].suspicious] or priced
    if not trusted:
        return None
    best = min(entry[0] for entry in trusted)
    tied = _undominated([entry for entry in trusted if entry[0] <= best + options.tie_ms])
    chosen = tied[0]
    if len(tied) > 1:
        shared_pages = min(entry[4].cached for entry in tied) // page_size
        key = keys[shared_pages] if shared_pages < len(keys) else fallback_key
        winner = rendezvous((entry[4] for entry in tied), key)
        chosen = next(entry for entry in tied if entry[4] is winner)
    cost_ms, own_ms, wait_ms, own_price, view = chosen
    cached = min(view.cached, num_tokens - 1)
    return Decision(
        view.replica,
        cached,
        max(other.cached for other in views),
        cost_ms,
        view.queue_ms,
        own_ms,
        wait_ms + own_ms,
        own_price,
        len(tied),
    )
