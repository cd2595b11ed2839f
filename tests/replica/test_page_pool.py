"""The page pool against a model, with an exact audit after every operation: 10,000 operations in all."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from replica.batch import NULL_PAGE
from replica.page_pool import PagePool
from router.pages import extend, key64

ROOT = bytes(16)
NUM_PAGES = 18


class Sink:
    def __init__(self) -> None:
        self.keys: dict[int, int] = {}

    def stored(self, key: int, parent_key: int) -> None:
        assert key not in self.keys
        assert parent_key == 0 or parent_key in self.keys, "stored before its parent"
        self.keys[key] = parent_key

    def removed(self, key: int) -> None:
        assert key not in self.keys.values(), "removed before its children"
        del self.keys[key]


def chain_of(symbols: list[int]) -> list[bytes]:
    """Hashes of a chain whose pages are named by small numbers, so that chains share prefixes often."""
    out, parent = [], ROOT
    for symbol in symbols:
        parent = extend(parent, bytes([symbol]) * 64)
        out.append(parent)
    return out


class Holder:
    """What a request keeps about its pages."""

    def __init__(self, hashes: list[bytes], hits: list[int], fresh: list[int]) -> None:
        self.hashes, self.table, self.pins = hashes, [*hits, *fresh], []
        self.num_published = len(hits)
        self.tail = hits[-1] if hits else NULL_PAGE
        self.broken = False

    def pages(self) -> list[int]:
        pages = list(self.table)
        for index, page in reversed(self.pins):
            pages.insert(index, page)
        return pages[::-1]


class PagePoolMachine(RuleBasedStateMachine):
    holders = Bundle("holders")

    @initialize(max_cached=st.sampled_from([None, 0, 1, 5]))
    def start(self, max_cached: int | None) -> None:
        self.sink = Sink()
        self.pool = PagePool(NUM_PAGES, self.sink, max_cached=max_cached)
        self.live: list[Holder] = []

    @rule(target=holders, symbols=st.lists(st.integers(0, 1), max_size=6), extra=st.integers(0, 2))
    def admit(self, symbols: list[int], extra: int):
        hashes = chain_of(symbols)
        hits = [self.pool.lookup(h) for h in hashes[: self.pool.match(hashes, len(hashes))]]
        brute = 0
        while brute < len(hashes) and key64(hashes[brute]) in self.sink.keys:
            brute += 1
        assert len(hits) == brute and all(hits), "binary search and a walk disagree"
        need = len(hashes) - len(hits) + extra
        before = self.pool.num_available
        if need > before - self.pool.num_idle(hits):
            return multiple()
        self.pool.acquire(hits)
        fresh = self.pool.allocate(need)
        assert not set(fresh) & {page for holder in self.live for page in holder.pages()}
        assert self.pool.num_available <= before - need
        holder = Holder(hashes, hits, fresh)
        self.live.append(holder)
        return holder

    @rule(holder=holders)
    def publish(self, holder: Holder) -> None:
        index = holder.num_published
        if holder.broken or index >= len(holder.hashes):
            return
        page = holder.table[index]
        known = self.pool.lookup(holder.hashes[index])
        answer = self.pool.publish(page, holder.hashes[index], holder.tail)
        if answer == NULL_PAGE:
            assert holder.tail and not self.pool.is_indexed(holder.tail)
            holder.broken = True
            return
        assert answer == (known or page) == self.pool.lookup(holder.hashes[index])
        if answer != page:
            holder.pins.append((index, answer))
        holder.tail, holder.num_published = answer, index + 1

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        self.live.remove(holder)
        self.pool.release(holder.pages())

    @rule(count=st.integers(1, NUM_PAGES))
    def churn(self, count: int) -> None:
        """Allocates and gives back: evicts what is oldest."""
        if count <= self.pool.num_available:
            self.pool.release(self.pool.allocate(count))

    @rule(holder=holders, skip=st.integers(0, 2), often=st.integers(0, 2))
    def unpublish(self, holder: Holder, skip: int, often: int) -> None:
        chain = [self.pool.lookup(page_hash) for page_hash in holder.hashes[skip:]]
        chain = chain[: chain.index(NULL_PAGE)] if NULL_PAGE in chain else chain
        if not chain or often:
            return
        page, before = chain[0], set(self.sink.keys)
        children: dict[int, list[int]] = {}
        for key, parent in self.sink.keys.items():
            children.setdefault(parent, []).append(key)
        doomed, stack = set(), [key64(self.pool._hash[page])]
        while stack:
            key = stack.pop()
            doomed.add(key)
            stack += children.get(key, [])
        assert self.pool.unpublish(chain) == len(doomed)
        assert set(self.sink.keys) == before - doomed, "exactly the subtree must leave"

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        counts = self.pool.counts()
        assert counts["free"] + counts["cached"] + counts["held"] == counts["all"] == NUM_PAGES - 1
        assert set(self.sink.keys) == set(self.pool.keys()) and counts["indexed"] == len(self.sink.keys)
        held = {page for holder in self.live for page in holder.pages()}
        assert counts["held"] == len(held)


def test_ten_thousand_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    audits = 0
    audit = PagePool.check_invariants

    def counted(pool: PagePool) -> None:
        nonlocal audits
        audits += 1
        audit(pool)

    monkeypatch.setattr(PagePool, "check_invariants", counted)
    run_state_machine_as_test(
        PagePoolMachine,
        settings=settings(
            max_examples=290, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert audits >= 10_000


def test_evicts_oldest_chain_from_its_end() -> None:
    sink = Sink()
    pool = PagePool(7, sink)
    for symbols in ([0, 0, 0], [1, 1, 1]):
        hashes, parent = chain_of(symbols), NULL_PAGE
        pages = pool.allocate(3)
        for page, page_hash in zip(pages, hashes, strict=True):
            parent = pool.publish(page, page_hash, parent)
        pool.release(pages[::-1])
    old, new = chain_of([0, 0, 0]), chain_of([1, 1, 1])
    assert (pool.num_free, pool.num_cached) == (0, 6)
    pool.allocate(2)
    assert [pool.match(old, 3), pool.match(new, 3)] == [1, 3], "the oldest chain loses its end first"
    pool.allocate(2)
    assert [pool.match(old, 3), pool.match(new, 3)] == [0, 2]


def test_both_copies_exist_and_one_is_indexed() -> None:
    pool = PagePool(10, Sink())
    first, second = pool.allocate(1)[0], pool.allocate(1)[0]
    page_hash = chain_of([0])[0]
    assert pool.publish(first, page_hash, NULL_PAGE) == first
    assert pool.publish(second, page_hash, NULL_PAGE) == first, "the first answers, referenced for the second too"
    assert pool.num_held == 2
    pool.release([first])
    assert (pool.num_held, pool.num_cached) == (2, 0)
    pool.release([second, first])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (8, 1, 0)


def test_key_collision_is_not_indexed_and_never_matches() -> None:
    pool = PagePool(10, Sink())
    honest = chain_of([0])[0]
    forged = honest[:8] + bytes(8)
    a, b = pool.allocate(2)
    assert pool.publish(a, honest, NULL_PAGE) == a
    assert pool.publish(b, forged, NULL_PAGE) == NULL_PAGE
    assert pool.match([forged], 1) == 0 and pool.match([honest], 1) == 1
    pool.check_invariants()


def test_unpublish_takes_what_was_built_upon_a_page_and_nothing_else() -> None:
    sink = Sink()
    pool = PagePool(20, sink)

    def hold(symbols: list[int]) -> list[int]:
        hashes = chain_of(symbols)
        hits = [pool.lookup(page_hash) for page_hash in hashes[: pool.match(hashes, len(hashes))]]
        pool.acquire(hits)
        pages = [*hits, *pool.allocate(len(hashes) - len(hits))]
        for index in range(len(hits), len(hashes)):
            pool.publish(pages[index], hashes[index], pages[index - 1] if index else NULL_PAGE)
        return pages

    doubted, other = hold([0, 1, 0]), hold([0, 1, 1, 1])
    hold([2, 2])
    pool.release(other[::-1])
    assert pool.unpublish(doubted[1:]) == 4
    pool.check_invariants()
    assert [pool.match(chain_of(s), 4) for s in ([0, 1, 0], [0, 1, 1, 1], [2, 2])] == [1, 1, 2]
    assert pool.publish(doubted[2], chain_of([0, 1, 0])[2], doubted[1]) == NULL_PAGE, "its parent is in doubt"
    pool.release(doubted[::-1])
    assert (pool.num_held, pool.num_cached) == (2, 1)


def test_capacity_bounds_cached_pages() -> None:
    pool = PagePool(20, Sink(), max_cached=2)
    hashes, parent = chain_of([0, 1, 0, 1, 0]), NULL_PAGE
    pages = pool.allocate(5)
    for page, page_hash in zip(pages, hashes, strict=True):
        parent = pool.publish(page, page_hash, parent)
    pool.release(pages[::-1])
    assert pool.num_cached == 2 and pool.match(hashes, 5) == 2, "the front of the chain stays"


def test_equal_runs_stay_contiguous() -> None:
    """The promise that kv_cache_paging=false rests on."""
    pool = PagePool(4 * 5 + 3, Sink())
    runs = [pool.allocate(5) for _ in range(4)]
    for order in ([2, 0, 3, 1], [1, 3, 0, 2], [0, 1, 2, 3]):
        for i in order:
            pool.release(runs[i][::-1])
        runs = [pool.allocate(5) for _ in range(4)]
        assert all(run == list(range(run[0], run[0] + 5)) for run in runs)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_pages(count: int) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(count, Sink())
