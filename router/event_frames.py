"""A replica's ordered event stream on the wire: batches and snapshots. Imported through :mod:`router.wire`.

Everything is type-checked on decoding, so that applying a decoded batch can't fail half-way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import isfinite
from typing import Any

from router.framing import VERSION, Kind, ProtocolError, encode


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1


_TIERS = tuple(int(tier) for tier in Tier)


@dataclass
class Load:
    """A replica's load at one moment, as the placement policy uses it."""

    queued_uncached_tokens: int = 0
    """Tokens still to be prefilled, of waiting and running requests."""
    running: int = 0
    waiting: int = 0
    """Requests without a first token."""
    context_tokens: int = 0
    """Sum of context lengths of decoding requests."""
    free_pages: int = 0
    evictable_pages: int = 0
    coefficients: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """a, b, t0, k1, k2 of the step-time fit, milliseconds (docs/router.md)."""

    def to_wire(self) -> list[Any]:
        return [
            self.queued_uncached_tokens,
            self.running,
            self.waiting,
            self.context_tokens,
            self.free_pages,
            self.evictable_pages,
            self.coefficients,
        ]

    @classmethod
    def from_wire(cls, raw: list[Any]) -> Load:
        """Raises ProtocolError."""
        if not isinstance(raw, list) or len(raw) < 7 or not isinstance(raw[6], list) or len(raw[6]) != 5:
            raise ProtocolError("load must be six counts and five coefficients")
        counts, coefficients = raw[:6], raw[6]
        if not all(type(n) is int and n >= 0 for n in counts) or not all(_is_number(c) for c in coefficients):
            raise ProtocolError(f"load out of range: {raw[:7]!r:.120}")
        queued, running, waiting, context, free, evictable = counts
        return cls(queued, running, waiting, context, free, evictable, tuple(coefficients))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _is_u64(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _is_tier(value: Any) -> bool:
    return type(value) is int and value in _TIERS


def _is_keys(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) % 8 == 0


def _digests(raw: Any) -> list[tuple[int, int]]:
    pairs = [(count, xor) for count, xor in raw]
    if len(pairs) < len(Tier) or not all(_is_u64(count) and _is_u64(xor) for count, xor in pairs):
        raise ProtocolError("digests must be one (count, xor) pair of u64 per tier")
    return pairs


def _reservations(raw: Any) -> list[tuple[str, bytes]]:
    pairs = [(rid, keys) for rid, keys in raw]
    if not all(isinstance(rid, str) and _is_keys(keys) for rid, keys in pairs):
        raise ProtocolError("reservations must be (id, packed u64 keys) pairs")
    return pairs


@dataclass
class EventBatch:
    """One element of a replica's ordered stream: what its cache and load became since the last one.

    ``seq`` is contiguous within an ``epoch`` (random per engine start). ``digests`` summarise all resident pages
    *after* this batch, one (count, xor) per tier, and let a consumer prove that it is in sync.
    """

    replica: str
    epoch: int
    seq: int
    t_ns: int
    stored: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Runs of (parent key64 or 0, tier, packed u64 keys, parent first)."""
    removed: list[tuple[int, bytes]] = field(default_factory=list)
    """(tier, packed u64 keys), applied after ``stored``."""
    accepted: list[tuple[str, bytes]] = field(default_factory=list)
    """(reservation id, packed u64 keys of the pages the request will compute)."""
    ended: list[str] = field(default_factory=list)
    """Reservation ids: first token sent, cancelled or failed."""
    load: Load = field(default_factory=Load)
    digests: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])

    def to_frame(self) -> bytes:
        return encode(
            Kind.EVENTS,
            VERSION,
            self.replica,
            self.epoch,
            self.seq,
            self.t_ns,
            self.stored,
            self.removed,
            self.accepted,
            self.ended,
            self.load.to_wire(),
            self.digests,
        )

    @classmethod
    def from_frame(cls, frame: list[Any]) -> EventBatch:
        """Raises ProtocolError."""
        try:
            _, version, replica, epoch, seq, t_ns, stored, removed, accepted, ended, load, digests = frame[:12]
            if version != VERSION:
                raise ProtocolError(f"event version {version}; this router speaks {VERSION}")
            batch = cls(
                replica,
                epoch,
                seq,
                t_ns,
                [(p, t, k) for p, t, k in stored],
                [(t, k) for t, k in removed],
                _reservations(accepted),
                list(ended),
                Load.from_wire(load),
                _digests(digests),
            )
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"bad EVENTS frame: {error}") from None
        typed = (
            isinstance(replica, str)
            and _is_u64(epoch)
            and _is_u64(seq)
            and type(t_ns) is int
            and all(_is_u64(p) and _is_tier(t) and _is_keys(k) for p, t, k in batch.stored)
            and all(_is_tier(t) and _is_keys(k) for t, k in batch.removed)
            and all(isinstance(rid, str) for rid in batch.ended)
        )
        if not typed:
            raise ProtocolError("bad EVENTS frame: wrong types")
        return batch


@dataclass
class Snapshot:
    """A replica's whole residency at (epoch, seq), in chunks; the consumer goes on with seq + 1.

    The last chunk (index == total - 1) carries the live reservations.
    """

    replica: str
    epoch: int
    seq: int
    index: int
    total: int
    tier: int
    keys: bytes
    digests: list[tuple[int, int]]
    reservations: list[tuple[str, bytes]] = field(default_factory=list)
    load: Load = field(default_factory=Load)

    def to_frame(self) -> bytes:
        return encode(
            Kind.SNAPSHOT,
            self.replica,
            self.epoch,
            self.seq,
            self.index,
            self.total,
            self.tier,
            self.keys,
            self.digests,
            self.reservations,
            self.load.to_wire(),
        )

    @classmethod
    def from_frame(cls, frame: list[Any]) -> Snapshot:
        """Raises ProtocolError."""
        try:
            _, replica, epoch, seq, index, total, tier, keys, digests, reservations, load = frame[:11]
            chunk = cls(
                replica,
                epoch,
                seq,
                index,
                total,
                tier,
                keys,
                _digests(digests),
                _reservations(reservations),
                Load.from_wire(load),
            )
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"bad SNAPSHOT frame: {error}") from None
        typed = isinstance(replica, str) and _is_u64(epoch) and _is_u64(seq) and _is_tier(tier) and _is_keys(keys)
        if not typed or not (_is_u64(index) and _is_u64(total) and index < total):
            raise ProtocolError("bad SNAPSHOT frame: wrong types")
        return chunk


def rechunk(snapshot: Sequence[Snapshot], max_keys: int) -> list[Snapshot]:
    """The same snapshot in chunks of at most ``max_keys`` keys."""
    stride = 8 * max_keys
    cut = [
        replace(part, keys=part.keys[start : start + stride], reservations=[])
        for part in snapshot
        for start in range(0, max(1, len(part.keys)), stride)
    ]
    cut[-1].reservations = list(snapshot[-1].reservations)
    return [replace(part, index=index, total=len(cut)) for index, part in enumerate(cut)]
