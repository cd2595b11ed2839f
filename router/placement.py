"""What one router knows of the replicas, and where it puts a request.

Joins the directory (who holds what, who is about to), each replica's queue and its latest load into
:func:`router.policy.choose`. No I/O and no clock: the dispatcher and a simulator drive the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from router.backlog import Backlog
from router.directory import Directory, Slot, depth_of
from router.pages import unpack_keys
from router.policy import UNFITTED, Coefficients, Decision, PolicyOptions, ReplicaView, choose, identity
from router.wire import EventBatch, Load, Snapshot


@dataclass
class PredictionError:
    """Predicted against measured time to first token, of this router's own requests."""

    count: int = 0
    within_15_percent: int = 0
    sum_abs_ratio: float = 0.0

    def observe(self, predicted_ms: float, actual_ms: float) -> None:
        error = abs(predicted_ms - actual_ms) / max(actual_ms, 1e-3)
        self.count += 1
        self.within_15_percent += error <= 0.15
        self.sum_abs_ratio += error

    def describe(self) -> dict[str, float]:
        n = max(1, self.count)
        return {
            "count": self.count,
            "within_15_percent": round(self.within_15_percent / n, 4),
            "mean_relative_error": round(self.sum_abs_ratio / n, 4),
        }


@dataclass(eq=False)
class ReplicaState:
    """A replica's slot in the directory, its queue, and what it last said about itself.

    ``accepting``: may be given new work; ``retiring``: only while no replica accepts. ``own``: this router's live
    requests there (id -> dispatch time in s and predicted TTFT in ms, or None after the first token). The directory's
    stream drives the ``on_`` methods.
    """

    name: str
    directory: Directory
    page_size: int
    chunk: int = 512
    host_page_ms: float = 0.05
    """Time that it takes to bring one page from its host memory to its device."""
    caches: bool = True
    """It keeps pages for later requests, so those under way there are worth waiting for."""
    accepting: bool = False
    retiring: bool = False
    suspicious: bool = False
    slot: Slot | None = None
    backlog: Backlog = field(default_factory=Backlog)
    load: Load = field(default_factory=Load)
    coefficients: Coefficients | None = None
    own: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    identity: int = 0

    def __post_init__(self) -> None:
        self.identity = identity(self.name)

    def on_slot(self, slot: Slot | None, held: dict[str, list[int]]) -> None:
        """The stream moved to another slot; ``held`` are the old slot's reservations. Our own go along."""
        self.slot = slot
        for request, keys in held.items():
            if slot is not None and request in self.own:
                self.directory.pending.reserve(slot.bit, request, keys)

    def on_snapshot(self, last: Snapshot, now: float) -> None:
        """Others' requests are exactly those that the snapshot lists; ours end with their own streams."""
        assert self.slot is not None
        listed = dict(last.reservations)
        for request in self.backlog.requests():
            if request not in listed and request not in self.own:
                self.backlog.pop(request, now, served=False)
        for request, packed in listed.items():
            self._echo(request, packed, now)
        self.on_load(last.load)

    def on_batch(self, batch: EventBatch, now: float) -> None:
        """Reservations of a batch whose pages were just applied."""
        assert self.slot is not None
        for request, packed in batch.accepted:
            self._echo(request, packed, now)
        for request in batch.ended:
            self.directory.pending.release(self.slot.bit, request)
            self.backlog.pop(request, now, served=True)

    def on_load(self, load: Load) -> None:
        self.load = load
        fit = Coefficients(*load.coefficients)
        if fit.fitted:
            self.coefficients = fit

    def on_lost(self, now: float) -> None:
        """Our connection is gone, and our requests with it. Others' may live on there; the stream will tell."""
        for request in self.own:
            self.backlog.pop(request, now, served=False)
            if self.slot is not None:
                self.directory.pending.release(self.slot.bit, request)
        self.own.clear()
        self.accepting = self.retiring = False

    def _echo(self, request: str, packed: bytes, now: float) -> None:
        assert self.slot is not None
        if self.own.get(request, 0) is None:
            return  # ours, and past its first token already
        self.directory.pending.reserve(self.slot.bit, request, unpack_keys(packed))
        if request not in self.own:
            tokens = len(packed) // 8 * self.page_size + self.page_size // 2
            self.backlog.push(request, self.prefill_ms(tokens), now)

    def prefill_ms(self, uncached: int) -> float:
        fit = self.coefficients or UNFITTED
        return fit.prefill_ms(uncached, 0, self.chunk, self.load.context_tokens, self.load.running)


class Placement:
    """The router's picture of all replicas. ``now`` is seconds on any one monotonic clock."""

    def __init__(self, page_size: int, options: PolicyOptions | None = None) -> None:
        self.page_size = page_size
        self.options = options or PolicyOptions()
        self.directory = Directory()
        self.replicas: dict[str, ReplicaState] = {}
        self.prediction = PredictionError()

    def add(self, name: str) -> ReplicaState:
        assert name not in self.replicas
        state = self.replicas[name] = ReplicaState(name, self.directory, self.page_size)
        return state

    def remove(self, name: str) -> None:
        state = self.replicas.pop(name)
        assert state.slot is None, "its stream must have let go of the slot"

    def decide(
        self,
        keys: Sequence[int],
        num_tokens: int,
        now: float,
        *,
        fallback_key: int,
        exclude: Collection[str] = (),
        slo_ms: float | None = None,
    ) -> Decision | None:
        """Where a request with these page keys should go; None when no replica may take it (within ``slo_ms``)."""
        open_to = [state for state in self.takers() if state.name not in exclude]
        mask = 0
        for state in open_to:
            if state.slot is not None:
                mask |= state.slot.bit
        directory = self.directory
        warm_steps = directory.warm(keys, mask)
        tiers = (directory.device(keys, mask), directory.resident(keys, mask)) if directory.host_pages else None
        known = [state.coefficients for state in open_to if state.coefficients is not None]
        stand_in = known[0] if known else UNFITTED
        views = []
        for state in open_to:
            bit = state.slot.bit if state.slot is not None else 0
            load = state.load
            warm = depth_of(warm_steps, bit)
            fetched = depth_of(tiers[1], bit) - depth_of(tiers[0], bit) if tiers else 0
            views.append(
                ReplicaView(
                    state.name,
                    state.identity,
                    warm * self.page_size,
                    state.backlog.queue_ms(now),
                    len(state.backlog),
                    load.running,
                    load.context_tokens,
                    load.free_pages,
                    state.coefficients or stand_in,
                    state.chunk,
                    transfer_ms=fetched * state.host_page_ms,
                    suspicious=state.suspicious,
                )
            )
        return choose(
            views,
            num_tokens,
            keys,
            self.page_size,
            fallback_key=fallback_key,
            slo_ms=slo_ms,
            options=self.options,
        )

    def takers(self) -> list[ReplicaState]:
        """Those that new work may go to."""
        return [state for state in self.replicas.values() if state.accepting] or self.retiring()

    def retiring(self) -> list[ReplicaState]:
        """Those that leave, but serve on for a router that knows no other."""
        return [state for state in self.replicas.values() if state.retiring]

    def shortest_queue_ms(self, now: float) -> float:
        """Least predicted wait over the replicas that take work; 0 when there is none."""
        return min((s.backlog.queue_ms(now) for s in self.replicas.values() if s.accepting), default=0.0)

    def commit(self, decision: Decision, request: str, keys: Sequence[int], now: float) -> None:
        """Reserve at once: the next decision, even in the same moment, sees this one."""
        state = self.replicas[decision.replica]
        state.own[request] = (now, decision.ttft_ms)
        state.backlog.push(request, decision.prefill_ms, now)
        if (slot := state.slot) is not None and state.caches:
            # from what is really there, not from what others have pending: they may be cancelled, and this one not
            held = depth_of(self.directory.resident(keys, slot.bit), slot.bit)
            self.directory.pending.reserve(slot.bit, request, keys[held:])

    def first_token(self, name: str, request: str, now: float) -> None:
        """Out of the queue. Its pages stay pending until the stream's own event says that they are stored."""
        state = self.replicas.get(name)
        if state is None or not (dispatched := state.own.get(request)):
            return
        state.own[request] = None
        state.backlog.pop(request, now, served=True)
        self.prediction.observe(dispatched[1], (now - dispatched[0]) * 1e3)

    def end(self, name: str, request: str, now: float) -> None:
        """Finished, cancelled, rejected or lost. Idempotent."""
        state = self.replicas.get(name)
        if state is None:
            return
        state.own.pop(request, None)
        state.backlog.pop(request, now, served=False)
        if state.slot is not None:
            self.directory.pending.release(state.slot.bit, request)

    def check_invariants(self) -> None:
        self.directory.check_invariants()
        for state in self.replicas.values():
            state.backlog.check_invariants()
            assert not any(entry is None and request in state.backlog for request, entry in state.own.items())
