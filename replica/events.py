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


class EventLog:
    """Sequence, digest, replay ring and snapshot of one engine's stream. ``epoch`` is random per engine start."""

    def __init__(self, replica_id: str, *, ring: int = RING_BATCHES, epoch: int | None = None) -> None:
        self.replica_id = replica_id
        self.epoch = secrets.randbits(64) if epoch is None else epoch
        self.next_seq = 0
        self.reservations: dict[str, bytes] = {}
        self._digest = Digest()
        self._added: dict[int, int] = {}
        self._gone: dict[int, None] = {}
        self._accepted: list[tuple[str, bytes]] = []
        self._ended: list[str] = []
        self._ring: deque[EventBatch] = deque(maxlen=ring)
        self._ring_lock = threading.Lock()

    @property
    def has_changes(self) -> bool:
        return bool(self._added or self._gone or self._accepted or self._ended)

    def stored(self, key: int, parent_key: int) -> None:
        if key in self._gone:
            del self._gone[key]
        else:
            self._added[key] = parent_key

    def removed(self, key: int) -> None:
        if key in self._added:
            del self._added[key]
        else:
            self._gone[key] = None

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
        runs = self._runs()
        gone = pack_keys(list(self._gone))
        for _, _, keys in runs:
            self._digest.add_packed(keys)
        self._digest.remove_packed(gone)
        batch = EventBatch(
            self.replica_id,
            self.epoch,
            self.next_seq,
            time.time_ns(),
            stored=runs,
            removed=[(int(Tier.DEVICE), gone)] if gone else [],
            accepted=self._accepted,
            ended=self._ended,
            load=load,
            digests=[self._digest.as_pair(), (0, 0)],
        )
        self._added, self._gone, self._accepted, self._ended = {}, {}, [], []
        with self._ring_lock:
            self._ring.append(batch)
            self.next_seq += 1
        return batch

    def _runs(self) -> list[tuple[int, int, bytes]]:
        runs: list[tuple[int, list[int]]] = []
        last = None
        for key, parent in self._added.items():
            if last is not None and parent == last:
                runs[-1][1].append(key)
            else:
                runs.append((parent, [key]))
            last = key
        return [(parent, int(Tier.DEVICE), pack_keys(keys)) for parent, keys in runs]

    def replay(self, from_seq: int) -> list[EventBatch] | None:
        """Batches from ``from_seq`` on (none if it is the next one); None when they are gone or not of this epoch."""
        with self._ring_lock:
            if not 0 <= from_seq <= self.next_seq:
                return None
            missing = self.next_seq - from_seq
            if missing > len(self._ring):
                return None
            return [self._ring[i] for i in range(len(self._ring) - missing, len(self._ring))]

    def snapshot(self, keys: Sequence[int], load: Load) -> list[Snapshot]:
        """Whole residency at the last emitted batch. Call it with no change outstanding, i.e. right after ``emit``."""
        assert not self.has_changes and self.next_seq > 0, "a snapshot must describe an emitted batch"
        total = max(1, -(-len(keys) // SNAPSHOT_KEYS))
        digests = [self._digest.as_pair(), (0, 0)]
        chunks = [
            Snapshot(
                self.replica_id,
                self.epoch,
                self.next_seq - 1,
                index,
                total,
                int(Tier.DEVICE),
                pack_keys(keys[index * SNAPSHOT_KEYS : (index + 1) * SNAPSHOT_KEYS]),
                digests,
                load=load,
            )
            for index in range(total)
        ]
        chunks[-1].reservations = list(self.reservations.items())
        return chunks

    def check_invariants(self, keys: Sequence[int]) -> None:
        """Digest plus outstanding changes must describe ``keys``, the pool's residency."""
        expected = Digest()
        for key in (set(keys) - self._added.keys()) | self._gone.keys():
            expected.add(key)
        assert expected.as_pair() == self._digest.as_pair(), "digest and residency differ"
        assert not self._added.keys() & self._gone.keys(), "a page is both stored and removed in one batch"
        assert self._added.keys() <= set(keys) and not self._gone.keys() & set(keys), "changes and residency differ"
        assert {r for r, _ in self._accepted} - set(self._ended) <= self.reservations.keys()
