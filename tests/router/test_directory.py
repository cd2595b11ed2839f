"""The directory against a plain model: random stores, removals, deaths, reservations, sweeps and matches."""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.directory import Directory, Slot, depth_of
from router.hot_prefixes import HotPrefixes
from router.pages import HASH_BYTES, ids_below, key64, keys64, mix64, mixed_xor, pack_keys, unpack_keys

CHAINS = [[mix64(chain * 1000 + depth) for depth in range(24)] for chain in range(3)]
for shorter, longer in ((0, 1), (1, 2)):  # chains that share their beginnings, as prompts do
    CHAINS[longer][: 8 * longer] = CHAINS[shorter][: 8 * longer]


class DirectoryMachine(RuleBasedStateMachine):
    """Prefix-closed residency per slot, as engines guarantee it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.held: dict[Slot, tuple[set[int], set[int]]] = {}
        self.reserved: dict[Slot, dict[str, list[int]]] = defaultdict(dict)

    slots = st.integers(0, 5)
    chains = st.integers(0, 2)
    depths = st.integers(0, 24)

    def pick(self, index: int) -> Slot:
        return list(self.held)[index % len(self.held)]

    @rule()
    def open(self) -> None:
        if len(self.held) < 6:
            self.held[self.directory.open(f"r{len(self.held)}", 1)] = (set(), set())

    @precondition(lambda self: self.held)
    @rule(slot=slots, synced=st.booleans())
    def sync(self, slot: int, synced: bool) -> None:
        self.directory.set_synced(self.pick(slot), synced)

    @precondition(lambda self: self.held)
    @rule(slot=slots, chain=chains, depth=depths, tier=st.sampled_from([0, 0, 1]))
    def store(self, slot: int, chain: int, depth: int, tier: int) -> None:
        keys = CHAINS[chain][:depth]
        self.held[self.pick(slot)][tier].update(keys)
        self.directory.store(self.pick(slot), tier, pack_keys(keys))

    @precondition(lambda self: self.held)
    @rule(slot=slots, chain=chains, depth=depths)
    def evict(self, slot: int, chain: int, depth: int) -> None:
        """A page goes only together with everything below it, in every chain."""
        chosen = self.pick(slot)
        gone = set(CHAINS[chain][depth:])
        for other in CHAINS:
            for position, key in enumerate(other):
                if key in gone:
                    gone.update(other[position:])
        for tier in (0, 1):
            self.held[chosen][tier].difference_update(gone)
            self.directory.remove(chosen, tier, pack_keys(sorted(gone)))

    @precondition(lambda self: self.held)
    @rule(slot=slots, chain=chains, depth=depths, name=st.sampled_from("abcd"))
    def reserve(self, slot: int, chain: int, depth: int, name: str) -> None:
        chosen = self.pick(slot)
        self.reserved[chosen][name] = CHAINS[chain][:depth]
        self.directory.pending.reserve(chosen.bit, name, CHAINS[chain][:depth])

    @precondition(lambda self: self.held)
    @rule(slot=slots, name=st.sampled_from("abcd"))
    def release(self, slot: int, name: str) -> None:
        chosen = self.pick(slot)
        known = self.reserved[chosen].pop(name, None)
        assert self.directory.pending.release(chosen.bit, name) == (known is not None)

    @precondition(lambda self: self.held)
    @rule(slot=slots)
    def die(self, slot: int) -> None:
        chosen = self.pick(slot)
        del self.held[chosen]
        assert self.directory.retire(chosen) == self.reserved.pop(chosen, {})

    @rule()
    def sweep(self) -> None:
        assert self.directory.sweep(10.0)
        distinct = sum(len(set().union(*(held[tier] for held in self.held.values()))) for tier in (0, 1))
        assert self.directory.num_pages() == distinct

    @rule(chain=chains, length=depths)
    def match(self, chain: int, length: int) -> None:
        keys = CHAINS[chain][:length]
        for slot, (device, host) in self.held.items():
            pending = set().union(*self.reserved[slot].values()) if self.reserved[slot] else set()
            resident = (device, device | host) if slot.synced else (set(), set())
            assert depth_of(self.directory.device(keys), slot.bit) == reach(keys, resident[0])
            assert depth_of(self.directory.resident(keys), slot.bit) == reach(keys, resident[1])
            warm = resident[1] | pending
            assert depth_of(self.directory.warm(keys), slot.bit) == reach(keys, warm)

    @invariant()
    def consistent(self) -> None:
        self.directory.check_invariants()


def reach(keys: list[int], have: set[int]) -> int:
    depth = 0
    while depth < len(keys) and keys[depth] in have:
        depth += 1
    return depth


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 128, 1000])
def test_match_at_every_depth(length: int) -> None:
    directory = Directory()
    keys = [mix64(i) for i in range(length)]
    for depth in {0, 1, length // 3, length // 2, length - 1, length}:
        slot = directory.open(f"d{depth}", 1)
        directory.store(slot, 0, pack_keys(keys[:depth]))
        directory.set_synced(slot, True)
        assert depth_of(directory.device(keys), slot.bit) == depth
    only = directory.slots()[0]
    assert all(mask == only.bit for _, mask in directory.device(keys, only.bit))


def test_death_is_one_mask_bit_and_the_sweep_comes_later() -> None:
    directory = Directory()
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(50_000)]
    doomed, other = directory.open("a", 1), directory.open("b", 1)
    for slot, part in ((doomed, keys), (other, keys[:100])):
        directory.store(slot, 0, pack_keys(part))
        directory.set_synced(slot, True)
    started = time.perf_counter()
    directory.retire(doomed)
    assert time.perf_counter() - started < 0.005
    assert not directory.warm(keys[200:300]) and directory.num_pages() == 50_000
    assert directory.open("c", 2).index not in (doomed.index, other.index)
    passes = 1
    while not directory.sweep(0.0005):
        passes += 1
        directory.check_invariants()
    assert passes > 1 and directory.num_pages() == 100
    assert directory.open("d", 1).index == doomed.index
    directory.check_invariants()


def test_repeated_and_absent_keys_leave_the_digest_right() -> None:
    directory = Directory()
    slot = directory.open("a", 1)
    keys = [mix64(i) for i in range(40)]
    directory.store(slot, 0, pack_keys(keys + keys[:5]))
    directory.store(slot, 0, pack_keys(keys[10:20]))
    directory.check_invariants()
    directory.remove(slot, 0, pack_keys([mix64(99), *keys[:30], keys[0]]))
    directory.check_invariants()
    assert directory.digests(slot) == [(10, mixed_xor(pack_keys(keys[30:]))), (0, 0)]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 500])
def test_vectorised_digest_equals_the_definition(count: int) -> None:
    packed = random.Random(count).randbytes(8 * count)
    xor = 0
    for key in unpack_keys(packed):
        xor ^= mix64(key)
    assert mixed_xor(packed) == xor


def test_hot_prefixes_are_bounded_and_keep_the_hot_ones() -> None:
    hot = HotPrefixes(capacity=16)
    for round_ in range(400):
        hot.hit(7, b"h" * 16, 64)
        hot.hit(1000 + round_, b"c" * 16, 32)
        hot.check_invariants()
        assert len(hot) < 32
    assert hot.top(1)[0][0] == 7
    with pytest.raises(ValueError, match="capacity 0"):
        HotPrefixes(0)


def test_speed_and_memory() -> None:
    """At least 0.4 M pages/s applied and at most 100 us a match of 128 pages."""
    directory = Directory()
    rng = random.Random(2)
    slots = [directory.open(f"r{i}", 1) for i in range(8)]
    runs = [(slot, pack_keys([rng.getrandbits(64) for _ in range(24)])) for _ in range(1000) for slot in slots]
    best = _timed(lambda: [directory.store(slot, 0, run) for slot, run in runs])
    pages = len(runs) * 24
    assert pages / best > 0.4e6, f"{pages / best / 1e6:.2f} M pages/s stored"
    chain = [rng.getrandbits(64) for _ in range(128)]
    for slot, depth in zip(slots, (0, 5, 40, 40, 40, 100, 128, 128), strict=True):
        directory.store(slot, 0, pack_keys(chain[:depth]))
        directory.set_synced(slot, True)
        directory.pending.reserve(slot.bit, "x", chain[depth:])
    took = min(_timed(lambda: directory.warm(chain)) for _ in range(200))
    assert took < 100e-6, f"match took {took * 1e6:.1f} us"
    small = Directory()
    slot = small.open("m", 1)
    before = sys.getsizeof(small._tiers[0][0])
    for _ in range(50):  # churn through 50 times what is resident at once
        run = pack_keys([rng.getrandbits(64) for _ in range(2000)])
        small.store(slot, 0, run)
        small.remove(slot, 0, run)
    assert small.num_pages() == 0
    assert max(sys.getsizeof(shard) for shard in small._tiers[0]) <= 16 * before + 4096


def _timed(work) -> float:
    started = time.thread_time()  # CPU time: the machine is shared
    work()
    return time.thread_time() - started


@pytest.mark.parametrize("count", [0, 1, 2, 237])
def test_keys_of_many_pages_are_those_of_each(count: int) -> None:
    rng = random.Random(count)
    hashes = [rng.randbytes(HASH_BYTES) for _ in range(count)]
    assert keys64(hashes) == [key64(page_hash) for page_hash in hashes]


@pytest.mark.parametrize(
    "ids, limit, below",
    [
        ([], 1, True),
        ([0], 1, True),
        ([0], 0, False),
        ([3, 9, 4], 10, True),
        ([3, 9, 4], 9, False),
        ([3, -1], 9, False),
        ([(1 << 32) - 1], 1 << 32, True),
        ([1 << 32], 1 << 32, False),
        ([5, 1 << 70], 9, False),
    ],
)
def test_ids_below_a_limit(ids: list[int], limit: int, below: bool) -> None:
    assert ids_below(ids, limit) is below
