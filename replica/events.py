"""The replica's ordered event stream: residency, reservations and load, one batch per step with changes.

The engine thread writes; any thread may ask for a replay. A batch carries the *net* change since the last one, so
"stored, then removed" applied in that order is always right, also for a page that left and came back in between.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

from router.pages import Digest, pack_keys
from router.wire import EventBatch, Load, Snapshot, Tier

RING_BATCHES = 1024
"""Batches kept for replay."""
SNAPSHOT_KEYS = 65536
"""Keys per snapshot chunk: 512 KiB on the wire."""


class _TierChanges:
    """Net change of one tier since the last batch, and the digest as of that batch."""

    def __init__(self, tier: Tier) -> None:
        self._order = reversed if tier == Tier.HOST else iter  # the host gets children before parents
        self.digest = Digest()
        self.added: dict[int, int] = {}
        """key -> key of the parent"""
        self.gone: dict[int, None] = {}

    def close(self) -> tuple[list[tuple[int, list[int]]], bytes]:
        """Runs of (parent, keys) that were stored, parents first; packed keys that left. Starts the next batch."""
        runs: list[tuple[int, list[int]]] = []
        last = None
        for key, parent in self._order(self.added.items()):
            if last is not None and parent == last:
                runs[-1][1].append(key)
            else:
                runs.append((parent, [key]))
            last = key
        gone = pack_keys(list(self.gone))
        self.digest.add_packed(pack_keys(list(self.added)))
        self.digest.remove_packed(gone)
        self.added, self.gone = {}, {}
        return runs, gone

    def check_invariants(self, keys: Sequence[int]) -> None:
        expected = Digest()
        expected.add_packed(pack_keys(list((set(keys) - self.added.keys()) | self.gone.keys())))
        assert expected.as_pair() == self.digest.as_pair(), "digest and residency differ"
        assert not self.added.keys() & self.gone.keys(), "a page is both stored and removed in one batch"
        assert self.added.keys() <= set(keys) and not self.gone.keys() & set(keys), "changes and residency differ"


class EventLog:
    """Sequence, digest, replay ring and snapshot of one engine's stream. ``epoch`` is random per engine start."""

    def __init__(self, replica_id: str, *, ring: int = RING_BATCHES, epoch: int | None = None) -> None:
        self.replica_id = replica_id
        self.epoch = secrets.randbits(64) if epoch is None else epoch
        self.next_seq = 0
        self.reservations: dict[str, bytes] = {}
        self._tiers = [_TierChanges(tier) for tier in Tier]
        self._accepted: list[tuple[str, bytes]] = []
        self._ended: list[str] = []
        self._ring: deque[EventBatch] = deque(maxlen=ring)
        self._ring_lock = threading.Lock()

    @property
    def has_changes(self) -> bool:
        return bool(self._accepted or self._ended) or any(tier.added or tier.gone for tier in self._tiers)

    def stored(self, key: int, parent_key: int, tier: Tier = Tier.DEVICE) -> None:
        changes = self._tiers[tier]
        if key in changes.gone:
            del changes.gone[key]
        else:
            changes.added[key] = parent_key

    def removed(self, key: int, tier: Tier = Tier.DEVICE) -> None:
        changes = self._tiers[tier]
        if key in changes.added:
            del changes.added[key]
        else:
            changes.gone[key] = None

    def accept(self, reservation: str, keys: Sequence[int]) -> None:
        """A request was taken; ``keys`` are the pages it will compute."""
        packed = pack_keys(keys)
        self.reservations[reservation] = packed
        self._accepted.append((reservation, packed))

    def end(self, reservation: str) -> None:
        """First token, cancelled or failed. Ending twice is harmless."""
        if self.reservations.pop(reservation, None) is not None:
            self._ended.append(reservation)

    def emit(self, load: Load) -> EventBatch:
        """Closes the current batch, empty or not, and makes it replayable."""
        stored: list[tuple[int, int, bytes]] = []
        removed: list[tuple[int, bytes]] = []
        for tier, changes in enumerate(self._tiers):
            runs, gone = changes.close()
            stored += [(parent, tier, pack_keys(keys)) for parent, keys in runs]
            removed += [(tier, gone)] if gone else []
        batch = EventBatch(
            self.replica_id,
            self.epoch,
            self.next_seq,
            time.time_ns(),
            stored=stored,
            removed=removed,
            accepted=self._accepted,
            ended=self._ended,
            load=load,
            digests=self._digests(),
        )
        self._accepted, self._ended = [], []
        with self._ring_lock:
            self._ring.append(batch)
            self.next_seq += 1
        return batch

    def _digests(self) -> list[tuple[int, int]]:
        return [tier.digest.as_pair() for tier in self._tiers]

    def replay(self, from_seq: int) -> list[EventBatch] | None:
        """Batches from ``from_seq`` on (none if it is the next one); None when they are gone or not of this epoch."""
        with self._ring_lock:
            if not 0 <= from_seq <= self.next_seq:
                return None
            missing = self.next_seq - from_seq
            if missing > len(self._ring):
                return None
            return [self._ring[i] for i in range(len(self._ring) - missing, len(self._ring))]

    def snapshot(self, residency: Sequence[Sequence[int]], load: Load) -> list[Snapshot]:
        """Whole residency, keys per tier, at the last emitted batch. Call it with no change outstanding: right after
        ``emit``."""
        assert not self.has_changes and self.next_seq > 0, "a snapshot must describe an emitted batch"
        parts = [
            (tier, keys[start : start + SNAPSHOT_KEYS])
            for tier, keys in enumerate(residency)
            for start in range(0, len(keys), SNAPSHOT_KEYS)
        ] or [(int(Tier.DEVICE), [])]
        digests, seq, total = self._digests(), self.next_seq - 1, len(parts)
        chunks = [
            Snapshot(self.replica_id, self.epoch, seq, index, total, tier, pack_keys(keys), digests, load=load)
            for index, (tier, keys) in enumerate(parts)
        ]
        chunks[-1].reservations = list(self.reservations.items())
        return chunks

    def check_invariants(self, residency: Sequence[Sequence[int]]) -> None:
        """Digests plus outstanding changes must describe the residency, keys per tier."""
        for changes, keys in zip(self._tiers, residency, strict=True):
            changes.check_invariants(keys)
        assert {r for r, _ in self._accepted} - set(self._ended) <= self.reservations.keys()
