"""State machine of one replica's event stream: epoch, seq and digest decide what may enter the directory.

No I/O and no clock; it is fed batches, snapshot chunks and ticks and says what to ask the replica for:

    DETACHED --attach--> SNAPSHOT --last chunk, digest equal--> SYNCED
    SYNCED  --seq gap--> REPLAY --missing batches came--> SYNCED
    REPLAY  --not answered, or the ring is too short--> SNAPSHOT
    any     --digest differs | epoch differs | buffer full | no progress--> SNAPSHOT

What must hold: nothing is applied past a gap; a slot is matched only while every batch up to ``seq`` was applied and
the digest after the last one was equal; a snapshot is built in a slot of its own and swapped in whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from router.directory import Directory, Slot
from router.wire import EventBatch, Kind, Load, Snapshot, encode


class Phase(StrEnum):
    DETACHED = "detached"
    SNAPSHOT = "snapshot"
    REPLAY = "replay"
    SYNCED = "synced"


@dataclass(frozen=True)
class Ask:
    """What to send to the replica: REPLAY from a seq, or SNAPSHOT_REQUEST."""

    kind: Kind
    from_seq: int = 0

    def to_frame(self) -> bytes:
        return encode(self.kind, self.from_seq) if self.kind == Kind.REPLAY else encode(self.kind)


@dataclass(frozen=True)
class StreamOptions:
    """Seconds and batches. ``stall_s``: only repeated batches for so long means that ``seq`` itself is wrong."""

    replay_timeout_s: float = 0.25
    snapshot_timeout_s: float = 1.0
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    stall_s: float = 0.25
    max_buffered: int = 1024


@dataclass
class StreamCounters:
    """What was seen and repaired since the start."""

    batches: int = 0
    gaps: int = 0
    duplicates: int = 0
    digest_mismatches: int = 0
    restarts: int = 0
    replays: int = 0
    snapshots: int = 0
    bad_snapshots: int = 0
    stalls: int = 0


class Sink(Protocol):
    """Who follows the stream beside the directory; see :class:`router.placement.ReplicaState`."""

    def on_slot(self, slot: Slot | None, held: dict[str, list[int]]) -> None: ...

    def on_snapshot(self, last: Snapshot, now: float) -> None: ...

    def on_batch(self, batch: EventBatch, now: float) -> None: ...

    def on_load(self, load: Load) -> None: ...


@dataclass
class _Staging:
    """A snapshot under construction, in its own unmatched slot."""

    slot: Slot
    seq: int
    total: int
    next_index: int = 0


class StreamState:
    def __init__(self, replica: str, directory: Directory, sink: Sink, options: StreamOptions | None = None) -> None:
        self.replica = replica
        self.phase = Phase.DETACHED
        self.epoch = 0
        self.seq = 0
        self.slot: Slot | None = None
        self.counters = StreamCounters()
        self._directory = directory
        self._sink = sink
        self._options = options or StreamOptions()
        self._buffer: dict[int, EventBatch] = {}
        """Batches past a gap, by seq."""
        self._staging: _Staging | None = None
        self._sound = False
        """The slot is what the replica held at ``seq``, as far as any digest has told."""
        self._asked_at = 0.0
        self._retry_s = self._options.retry_min_s
        self._retry_at: float | None = None
        self._applied_at = 0.0
        self._repeats = 0
        self._load_seq = -1

    # --- connection

    def attach(self, epoch: int, now: float) -> Ask:
        """Connected. The same epoch as before is caught up by replay, another starts anew."""
        if self.slot is None or epoch != self.epoch:
            return self._restart(epoch, now)
        return self._start_replay(now) if self._sound else self._start_snapshot(now)

    def detach(self) -> None:
        """Disconnected: what we know may be stale, so it is not matched until caught up."""
        self._unsync(Phase.DETACHED)
        self._drop_staging()
        self._buffer.clear()
        self._retry_at = None

    def close(self) -> None:
        """The replica is gone for good."""
        self.detach()
        self._release_slot()

    # --- input

    def on_batch(self, batch: EventBatch, now: float) -> Ask | None:
        if self.phase == Phase.DETACHED:
            return None
        ask = self._restart(batch.epoch, now) if batch.epoch != self.epoch else None
        if batch.seq > self._load_seq:
            self._load_seq = batch.seq
            self._sink.on_load(batch.load)
        if self.phase == Phase.SNAPSHOT:
            return self._hold(batch, now) or ask
        if batch.seq <= self.seq:
            self.counters.duplicates += 1
            self._repeats += 1
            return None
        if batch.seq > self.seq + 1:
            held = self._hold(batch, now)
            if held is None and self.phase == Phase.SYNCED:
                self.counters.gaps += 1
                return self._start_replay(now)
            return held
        self._buffer[batch.seq] = batch
        return self._advance(now)

    def on_snapshot(self, chunk: Snapshot, now: float) -> Ask | None:
        if self.phase in (Phase.DETACHED, Phase.SYNCED):
            return None  # an answer that came too late to be needed
        if chunk.epoch != self.epoch:
            if chunk.index:
                return None
            self._restart(chunk.epoch, now)
        elif self.phase == Phase.REPLAY:
            self._unsync(Phase.SNAPSHOT)  # the ring was too short; the replica answers with everything
        if chunk.index == 0:
            self._drop_staging()
            self._staging = _Staging(self._directory.open(self.replica, chunk.epoch), chunk.seq, chunk.total)
        staging = self._staging
        if staging is None:
            return None
        if (staging.seq, staging.total, staging.next_index) != (chunk.seq, chunk.total, chunk.index):
            self._bad_snapshot(now)
            return None
        staging.next_index += 1
        self._asked_at = now
        self._directory.store(staging.slot, chunk.tier, chunk.keys)
        if staging.next_index < staging.total:
            return None
        if self._directory.digests(staging.slot) != chunk.digests[: len(staging.slot.digests)]:
            self._bad_snapshot(now)
            return None
        return self._install(staging, chunk, now)

    def on_heartbeat(self, epoch: int, seq: int, now: float) -> Ask | None:
        """The replica says which batch it sent last; the connection is ordered, so we must be exactly there."""
        if self.phase != Phase.SYNCED or epoch != self.epoch or seq == self.seq:
            return None
        if seq > self.seq:
            self.counters.gaps += 1
            return self._start_replay(now)
        self.counters.stalls += 1
        return self._start_snapshot(now)

    def tick(self, now: float) -> Ask | None:
        """Call every few tens of milliseconds; repeats what was not answered."""
        options = self._options
        if self.phase == Phase.SYNCED:
            if self._repeats >= 3 and now - self._applied_at > options.stall_s:
                self.counters.stalls += 1
                return self._start_snapshot(now)
        elif self.phase == Phase.REPLAY:
            if now - self._asked_at > options.replay_timeout_s:
                return self._start_snapshot(now)
        elif self.phase == Phase.SNAPSHOT:
            if self._retry_at is not None:
                if now >= self._retry_at:
                    return self._start_snapshot(now)
            elif now - self._asked_at > options.snapshot_timeout_s:
                self._bad_snapshot(now)
                return None
        return None

    # --- transitions

    def _advance(self, now: float) -> Ask | None:
        """Apply the buffered batches that follow without a gap."""
        slot = self.slot
        assert slot is not None
        while (batch := self._buffer.pop(self.seq + 1, None)) is not None:
            for tier in {tier for _, tier, _ in batch.stored}:
                self._directory.store(slot, tier, b"".join(keys for _, at, keys in batch.stored if at == tier))
            for tier, keys in batch.removed:
                self._directory.remove(slot, tier, keys)
            self.seq = batch.seq
            self.counters.batches += 1
            self._applied_at, self._asked_at, self._repeats = now, now, 0
            self._sink.on_batch(batch, now)
            if self._directory.digests(slot) != batch.digests[: len(slot.digests)]:
                self.counters.digest_mismatches += 1
                return self._start_snapshot(now)
        if not self._buffer:
            self._enter_synced()
        elif self.phase == Phase.SYNCED:
            self.counters.gaps += 1
            return self._start_replay(now)
        return None

    def _hold(self, batch: EventBatch, now: float) -> Ask | None:
        """Keep a batch that can't be applied yet; a full buffer is dropped whole and a snapshot asked for."""
        if batch.epoch == self.epoch:
            self._buffer.setdefault(batch.seq, batch)
        if len(self._buffer) <= self._options.max_buffered:
            return None
        self._buffer.clear()
        return self._start_snapshot(now) if self.phase != Phase.SNAPSHOT else None

    def _install(self, staging: _Staging, last: Snapshot, now: float) -> Ask | None:
        self._staging = None
        self._swap(staging.slot)
        self.seq = self._load_seq = last.seq
        self._sound = True
        self._applied_at, self._repeats, self._retry_at = now, 0, None
        self._retry_s = self._options.retry_min_s
        self._sink.on_snapshot(last, now)
        # a batch that doesn't follow on now is either behind us, or will show as a gap when the next one comes
        following: dict[int, EventBatch] = {}
        seq = last.seq + 1
        while seq in self._buffer:
            following[seq] = self._buffer[seq]
            seq += 1
        self._buffer = following
        self._enter_synced()
        return self._advance(now)

    def _enter_synced(self) -> None:
        assert self.slot is not None
        if self.phase != Phase.SYNCED:
            self.phase = Phase.SYNCED
            self._directory.set_synced(self.slot, True)

    def _start_replay(self, now: float) -> Ask:
        self._unsync(Phase.REPLAY)
        self._asked_at = now
        self.counters.replays += 1
        return Ask(Kind.REPLAY, self.seq + 1)

    def _start_snapshot(self, now: float) -> Ask:
        self._unsync(Phase.SNAPSHOT)
        self._drop_staging()
        self._sound = False
        self._asked_at, self._retry_at = now, None
        self.counters.snapshots += 1
        return Ask(Kind.SNAPSHOT_REQUEST)

    def _bad_snapshot(self, now: float) -> None:
        """Torn, wrong or missing: ask again after a pause that doubles."""
        self.counters.bad_snapshots += 1
        self._drop_staging()
        self._retry_at = now + self._retry_s
        self._retry_s = min(self._options.retry_max_s, 2 * self._retry_s)

    def _restart(self, epoch: int, now: float) -> Ask:
        """Another engine process: nothing that the last one held is there any more."""
        if self.slot is not None:
            self.counters.restarts += 1
        self._buffer.clear()
        self._release_slot()
        self.epoch, self.seq, self._load_seq = epoch, 0, -1
        self._retry_s = self._options.retry_min_s
        self._swap(self._directory.open(self.replica, epoch))
        return self._start_snapshot(now)

    def _swap(self, slot: Slot) -> None:
        old, self.slot = self.slot, slot
        held = self._directory.retire(old) if old is not None else {}
        self._sink.on_slot(slot, held)

    def _release_slot(self) -> None:
        self._drop_staging()
        if self.slot is not None:
            self._directory.retire(self.slot)
            self.slot = None
            self._sink.on_slot(None, {})

    def _unsync(self, phase: Phase) -> None:
        self.phase = phase
        if self.slot is not None and self.slot.synced:
            self._directory.set_synced(self.slot, False)

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._directory.retire(self._staging.slot)
            self._staging = None

    def check_invariants(self) -> None:
        assert (self.phase == Phase.SYNCED) == (self.slot is not None and self.slot.synced)
        assert self.phase == Phase.SNAPSHOT or self._staging is None
        assert len(self._buffer) <= self._options.max_buffered
        if self.phase == Phase.SYNCED:
            assert not self._buffer
        if self.slot is not None:
            assert self.slot.epoch == self.epoch
