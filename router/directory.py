"""The global prefix directory: which replica holds which page, whole, in every router.

The engine guarantees *prefix-closed residency* (a page leaves only when no resident child remains), so the holder
sets along a hash chain are nested and the longest match is a binary search: O(k log L) probes for k distinct depths.
Memory is bounded by resident pages; there is no tree, no expiry and no guess.

A *slot* is one incarnation of a replica's cache (one engine epoch, or what a snapshot rebuilt) and owns one bit.
A dead slot costs one mask bit at once; :meth:`Directory.sweep` takes its bits out of the map later, in small shares,
and only then is its bit given to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from router.pages import Digest, pack_keys, unpack_keys
from router.pending import Pending
from router.wire import Tier

_SHARDS = 1024
_SHARD_MASK = _SHARDS - 1
Steps = list[tuple[int, int]]
"""(depth in pages, slots that hold at least so many), depth rising, sets shrinking."""


@dataclass(eq=False)
class Slot:
    """One incarnation of a replica's cache. ``digests``: per tier, of what the map lists for it."""

    index: int
    replica: str
    epoch: int
    synced: bool = False
    digests: list[Digest] = field(default_factory=lambda: [Digest() for _ in Tier])
    bit: int = field(init=False)

    def __post_init__(self) -> None:
        self.bit = 1 << self.index


def depth_of(steps: Steps, bit: int) -> int:
    """Pages of the chain that the slot with this bit covers."""
    for depth, mask in reversed(steps):
        if mask & bit:
            return depth
    return 0


class Directory:
    """key64 -> bitset of slots, one map per tier, plus the pending overlay. Not thread-safe; no I/O.

    The maps are split into shards so that a sweep can rebuild one at a time without a long pause.
    """

    def __init__(self) -> None:
        self._tiers: list[list[dict[int, int]]] = [[{} for _ in range(_SHARDS)] for _ in Tier]
        self.pending = Pending()
        self._slots: dict[int, Slot] = {}
        self._retired: int = 0
        """Bits of slots whose entries are still in the maps."""
        self._sweep: tuple[int, int] | None = None
        """(bits being swept, next shard)."""
        self._synced: int = 0
        self.host_pages: int = 0
        """Pages listed on the host tier, over all slots."""

    # --- slots

    def open(self, replica: str, epoch: int) -> Slot:
        """A new, empty slot that no match sees until :meth:`set_synced`."""
        used = self._retired
        for index in self._slots:
            used |= 1 << index
        index = ((used + 1) & ~used).bit_length() - 1
        slot = Slot(index, replica, epoch)
        self._slots[index] = slot
        return slot

    def set_synced(self, slot: Slot, synced: bool) -> None:
        """Only slots proven in sync are matched; the others are known by load and pending pages alone."""
        slot.synced = synced
        self._synced = self._synced | slot.bit if synced else self._synced & ~slot.bit

    def retire(self, slot: Slot) -> dict[str, list[int]]:
        """Forget a slot; returns the reservations it still had."""
        del self._slots[slot.index]
        self._synced &= ~slot.bit
        slot.synced = False
        self._retired |= slot.bit
        self.host_pages -= slot.digests[Tier.HOST].count
        return self.pending.drop(slot.bit)

    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    # --- pages

    def store(self, slot: Slot, tier: int, packed: bytes) -> None:
        """The slot now holds these keys (packed u64). Storing a key twice changes nothing."""
        bit, shards = slot.bit, self._tiers[tier]
        repeated: list[int] = []
        for key in unpack_keys(packed):
            shard = shards[key & _SHARD_MASK]
            mask = shard.get(key, 0)
            if mask & bit:
                repeated.append(key)
            else:
                shard[key] = mask | bit
        before = slot.digests[tier].count
        slot.digests[tier].add_packed(packed)
        if repeated:
            slot.digests[tier].remove_packed(pack_keys(repeated))
        if tier == Tier.HOST:
            self.host_pages += slot.digests[tier].count - before

    def remove(self, slot: Slot, tier: int, packed: bytes) -> None:
        """The slot no longer holds these keys. Removing an absent key changes nothing."""
        bit, shards = slot.bit, self._tiers[tier]
        absent: list[int] = []
        for key in unpack_keys(packed):
            shard = shards[key & _SHARD_MASK]
            mask = shard.get(key, 0)
            if not mask & bit:
                absent.append(key)
            elif left := mask & ~bit:
                shard[key] = left
            else:
                del shard[key]
        before = slot.digests[tier].count
        slot.digests[tier].remove_packed(packed)
        if absent:
            slot.digests[tier].add_packed(pack_keys(absent))
        if tier == Tier.HOST:
            self.host_pages += slot.digests[tier].count - before

    def digests(self, slot: Slot) -> list[tuple[int, int]]:
        return [digest.as_pair() for digest in slot.digests]

    # --- look-up

    def device(self, keys: Sequence[int], mask: int = -1) -> Steps:
        """Longest matches of a chain of keys (root first) by the slots in ``mask``, on the device."""
        return self._steps(keys, self._synced & mask, 0, False)

    def resident(self, keys: Sequence[int], mask: int = -1) -> Steps:
        """The same on any tier."""
        return self._steps(keys, self._synced & mask, 0, self.host_pages > 0)

    def warm(self, keys: Sequence[int], mask: int = -1) -> Steps:
        """The same on any tier or pending; slots out of sync count with their pending pages alone."""
        return self._steps(keys, self._synced & mask, mask if self.pending.bits else 0, self.host_pages > 0)

    def _steps(self, keys: Sequence[int], synced: int, pending_mask: int, host: bool) -> Steps:
        device_shards, host_shards = self._tiers
        pending = self.pending.bits

        def holders(index: int) -> int:
            key = keys[index]
            shard = key & _SHARD_MASK
            mask = device_shards[shard].get(key, 0)
            if host:
                mask |= host_shards[shard].get(key, 0)
            mask &= synced
            if pending_mask:
                mask |= pending.get(key, 0) & pending_mask
            return mask

        steps: Steps = []
        n = len(keys)
        start, current = 0, holders(0) if n else 0
        while current:
            # known equal up to ``good``; ``bad`` differs or is the end; sets are nested, so equality has no holes
            good, bad, beyond, stride = start, n, 0, 1
            while good + stride < n:
                probe = holders(good + stride)
                if probe != current:
                    bad, beyond = good + stride, probe
                    break
                good += stride
                stride *= 2
            while bad - good > 1:
                middle = (good + bad) // 2
                probe = holders(middle)
                if probe == current:
                    good = middle
                else:
                    bad, beyond = middle, probe
            steps.append((bad, current))
            if bad == n:
                break
            # a set that is not a subset would break the nesting; intersecting keeps the steps sound regardless
            start, current = bad, beyond & current
        return steps

    def holders(self, key: int) -> list[str]:
        """Replicas in sync that hold this page on some tier."""
        shard = key & _SHARD_MASK
        mask = (self._tiers[0][shard].get(key, 0) | self._tiers[1][shard].get(key, 0)) & self._synced
        return sorted(slot.replica for slot in self._slots.values() if mask & slot.bit)

    def num_pages(self) -> int:
        """Distinct keys in the maps, swept or not."""
        return sum(len(shard) for tier in self._tiers for shard in tier)

    # --- background

    def sweep(self, budget_s: float = 0.001) -> bool:
        """Take retired slots' bits out of the maps for about ``budget_s``; True when nothing is left to do."""
        until = perf_counter() + budget_s
        while self._retired:
            bits, shard = self._sweep or (self._retired, 0)
            keep = ~bits
            while shard < _SHARDS:
                for tier in self._tiers:
                    if tier[shard]:
                        tier[shard] = {key: left for key, mask in tier[shard].items() if (left := mask & keep)}
                shard += 1
                if perf_counter() >= until:
                    break
            if shard < _SHARDS:
                self._sweep = (bits, shard)
                return False
            self._retired &= keep
            self._sweep = None
        return True

    def check_invariants(self) -> None:
        """Maps, digests, masks and overlay agree. Slow: for tests."""
        known = self._retired
        for index, slot in self._slots.items():
            assert index == slot.index and not self._retired & slot.bit, f"slot {index} is both open and retired"
            assert bool(self._synced & slot.bit) == slot.synced
            known |= slot.bit
        assert not self._synced & ~known and not self._synced & self._retired
        listed = {(index, tier): Digest() for index in self._slots for tier in Tier}
        for tier in Tier:
            for number, shard in enumerate(self._tiers[tier]):
                for key, mask in shard.items():
                    assert mask and not mask & ~known, f"key {key:#x} lists unknown slots {mask & ~known:#x}"
                    assert key & _SHARD_MASK == number
                    for index in self._slots:
                        if mask >> index & 1:
                            listed[index, tier].add(key)
        for (index, tier), digest in listed.items():
            assert digest == self._slots[index].digests[tier], f"digest of slot {index}, tier {tier} drifted"
        assert self.host_pages == sum(slot.digests[Tier.HOST].count for slot in self._slots.values())
        assert not self.pending.bits or max(self.pending.bits.values()) <= known
        self.pending.check_invariants()
