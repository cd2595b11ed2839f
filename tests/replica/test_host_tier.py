"""Device and host tier together, against memory that holds what it should: an exact audit after every operation."""

from __future__ import annotations

import random

import pytest
from engine_harness import VOCAB, Harness, host_gb
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
from test_page_pool import Holder, chain_of

from replica.batch import NULL_PAGE
from replica.host_tier import HostTier
from replica.page_pool import PagePool
from replica.stub import expected_ids
from router.pages import key64
from router.wire import Finish, Tier

NUM_PAGES = 14


class Sink:
    def __init__(self) -> None:
        self.tiers: list[set[int]] = [set(), set()]

    def stored(self, key: int, parent_key: int, tier: Tier = Tier.DEVICE) -> None:
        assert key not in self.tiers[tier]
        assert parent_key == 0 or parent_key in self.tiers[0] | self.tiers[1], "stored before its parent"
        self.tiers[tier].add(key)

    def removed(self, key: int, tier: Tier = Tier.DEVICE) -> None:
        self.tiers[tier].remove(key)


class Mute:
    """For host tiers without a device above them."""

    def stored(self, key: int, parent_key: int, tier: Tier = Tier.DEVICE) -> None: ...

    def removed(self, key: int, tier: Tier = Tier.DEVICE) -> None: ...


class TwoTiers(RuleBasedStateMachine):
    """What stands in a page is the hash that it should hold, or None; moves are made late, as a device would."""

    holders = Bundle("holders")

    @initialize(host_pages=st.sampled_from([1, 2, 5, 40]), max_cached=st.sampled_from([None, 0, 2]))
    def start(self, host_pages: int, max_cached: int | None) -> None:
        self.sink = Sink()
        self.host = HostTier(host_pages, self.sink)
        self.pool = PagePool(NUM_PAGES, self.sink, max_cached=max_cached, host=self.host)
        self.live: list[Holder] = []
        self.device: list[bytes | None] = [None] * NUM_PAGES
        self.memory: list[bytes | None] = [None] * host_pages
        self.todo: list[tuple[int, bytes]] = []

    @rule(target=holders, symbols=st.lists(st.integers(0, 1), max_size=6), extra=st.integers(0, 1))
    def admit(self, symbols: list[int], extra: int):
        hashes = chain_of(symbols)
        num_hits = self.pool.match(hashes, len(hashes))
        num_ready = num_hits + self.host.match(hashes, num_hits, len(hashes))
        for index, page_hash in enumerate(hashes):
            assert bool(self.pool.lookup(page_hash)) == (index < num_hits)
            assert self.host.holds(page_hash) == (num_hits <= index < num_ready), "the tiers don't continue each other"
        hits = [self.pool.lookup(page_hash) for page_hash in hashes[:num_hits]]
        need = len(hashes) - num_hits + extra
        if need > self.pool.num_available - self.pool.num_idle(hits):
            return multiple()
        self.pool.acquire(hits)
        restored = self.host.num_restored
        fresh = self.pool.allocate(need, hashes[num_hits:num_ready])
        assert self.host.num_restored == restored + num_ready - num_hits
        # what is not restored is computed by the next step, which runs after all moves so far
        self.todo += zip(fresh[num_ready - num_hits :], hashes[num_ready:], strict=False)
        holder = Holder(hashes, hits, fresh)
        self.live.append(holder)
        return holder

    @rule()
    def step(self) -> None:
        """The device: copies in order, then what the step computes. A page given up since may be computed for nothing,
        as by a launched step, but only before it is moved or computed again."""
        for move in self.host.take_moves():
            assert len(set(move.pages)) == len(move.pages) and len(set(move.slots)) == len(move.slots)
            if move.to_host:
                copied = [self.device[page] for page in move.pages]
                for slot, content in zip(move.slots, copied, strict=True):
                    self.memory[slot] = content
            else:
                copied = [self.memory[slot] for slot in move.slots]
                for page, content in zip(move.pages, copied, strict=True):
                    self.device[page] = content
        for page, page_hash in self.todo:
            self.device[page] = page_hash
        self.todo.clear()

    @rule(holder=holders, count=st.integers(1, 6))
    def publish(self, holder: Holder, count: int) -> None:
        """At read-back, so after a step."""
        self.step()
        for index in range(holder.num_published, min(holder.num_published + count, len(holder.hashes))):
            if holder.broken:
                return
            page = holder.table[index]
            assert self.device[page] == holder.hashes[index], "another page's content is published"
            answer = self.pool.publish(page, holder.hashes[index], holder.tail)
            if answer == NULL_PAGE:
                holder.broken = True
                return
            if answer != page:
                holder.pins.append((index, answer))
            holder.tail, holder.num_published = answer, index + 1
            assert not self.host.holds(holder.hashes[index]), "the device answers from now on"

    @rule(holder=consumes(holders))
    def finish(self, holder: Holder) -> None:
        self.publish(holder, len(holder.hashes))
        self.release(holder)

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        self.step()
        self.live.remove(holder)
        self.pool.release(holder.pages())

    @rule(count=st.integers(NUM_PAGES // 2, NUM_PAGES))
    def churn(self, count: int) -> None:
        if count <= self.pool.num_available:
            pages = self.pool.allocate(count)
            self.todo += [(page, b"churn") for page in pages]
            self.step()
            self.pool.release(pages)

    @rule(holder=holders, skip=st.integers(0, 2), often=st.integers(0, 2))
    def doubt(self, holder: Holder, skip: int, often: int) -> None:
        doubtful = holder.hashes[skip:]
        if often or not doubtful:
            return
        chain = [self.pool.lookup(page_hash) for page_hash in doubtful]
        self.pool.unpublish(chain[: chain.index(NULL_PAGE)] if NULL_PAGE in chain else chain)
        self.host.drop(doubtful)
        assert not any(self.pool.lookup(page_hash) or self.host.holds(page_hash) for page_hash in doubtful)

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()  # the host tier's too
        assert [set(keys) for keys in self.pool.residency()] == self.sink.tiers
        counts, host = self.pool.counts(), self.host.counts()
        assert counts["free"] + counts["cached"] + counts["held"] == counts["all"]
        assert host["used"] == len(self.sink.tiers[1]) <= host["all"]
        held = {page for holder in self.live for page in holder.pages()}
        assert counts["held"] == len(held)
        if not self.host._moves:
            for entry in self.host._entries.values():
                assert self.memory[entry.slot] == entry.page_hash, "a slot holds another page's content"
            for page, page_hash in enumerate(self.pool._hash):
                assert not page_hash or self.device[page] == page_hash, "a page holds another page's content"


def test_ten_thousand_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    audits = restored = 0
    audit, load = PagePool.check_invariants, HostTier.load

    def counted(pool: PagePool) -> None:
        nonlocal audits
        audits += 1
        audit(pool)

    def noted(host: HostTier, hashes, pages) -> None:
        nonlocal restored
        restored += len(hashes)
        load(host, hashes, pages)

    monkeypatch.setattr(PagePool, "check_invariants", counted)
    monkeypatch.setattr(HostTier, "load", noted)
    run_state_machine_as_test(
        TwoTiers,
        settings=settings(
            max_examples=290, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert audits >= 10_000 and restored > 50


def test_an_equal_key_of_another_hash_is_never_restored() -> None:
    host = HostTier(8, Mute())
    honest = chain_of([0, 1])
    forged = honest[0][:8] + bytes(8)
    host.save(1, honest[0], b"")
    assert host.match([forged], 0, 1) == 0 and host.match(honest[:1], 0, 1) == 1
    host.save(2, honest[1], forged)  # a child of the device's forged page, so to speak
    host.save(3, forged, b"")
    assert not host.holds(forged) and not host.holds(honest[1]), "no room for it, so its child leaves too"
    assert host.holds(honest[0])


def test_the_oldest_entry_makes_room_and_the_pinned_stay() -> None:
    host = HostTier(3, Mute())
    a, b = chain_of([0]), chain_of([1, 0])
    host.save(1, b[1], b[0])
    host.save(2, b[0], b"")
    host.save(3, a[0], b"")
    host.pin(b)
    others = chain_of([2]) + chain_of([3])
    host.save(4, others[0], b"")
    assert not host.holds(a[0]) and host.holds(others[0]), "the pinned are older, and stay"
    host.save(5, others[1], b"")
    assert host.holds(others[0]) and not host.holds(others[1]), "no room beside the pinned and what came since"
    host.load(b, [6, 7])
    assert [(m.to_host, m.pages) for m in host.take_moves()][-1] == (False, [6, 7])
    assert host.counts() == {"all": 3, "used": 3, "saved": 4, "restored": 2, "evicted": 1}


# --- the engine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def reference(prompt: list[int], count: int) -> list[int]:
    return expected_ids(prompt, count, seed=7, vocab_size=VOCAB)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("chunk", [32, None])
@pytest.mark.parametrize("host_pages", [5, 60, 400])
def test_pages_that_come_back_change_no_token(host_pages: int, chunk: int | None, async_scheduling: bool) -> None:
    """A pool too small for the prompts in turn, so that they push each other out; three rounds of the same ones."""
    harness = Harness(
        host_cache_gb=host_gb(host_pages),
        chunk_size=chunk or "auto",
        chunked_prefill=chunk is not None,
        async_scheduling=async_scheduling,
        max_batch_size=4,
        max_num_pages=40,
        max_model_len=600,
        watermark=0.0,
    )
    lengths = (1, 16, 17, 33, 200, 300, 513)
    for round_ in range(3):
        wanted = {}
        for i in range(9):
            prompt = prompt_of(lengths[i % len(lengths)])
            if i >= len(lengths):
                prompt = [*prompt_of(513)[: 100 * (i - 5)], i]
            wanted[harness.submit(prompt, max_tokens=20, seed=7)] = prompt
        harness.finish(audit=round_ == 1)
        for request_id, prompt in wanted.items():
            output = harness.outputs[request_id]
            assert output.ids == reference(prompt, 20) and output.finish == Finish.LENGTH
    host = harness.engine.info()["pages"]["host"]
    assert host["restored"] > 0 and host["saved"] > 0 and (host["evicted"] > 0) is (host_pages < 400)
    if host_pages == 400:
        assert harness.engine.info()["counters"]["prefix_hits"] > 2 * (500 + 288 + 192), "nothing is computed twice"


def test_restored_tokens_count_as_cached_and_are_not_computed() -> None:
    harness = Harness(host_cache_gb=host_gb(100), max_num_pages=20, max_model_len=300)
    prompt = prompt_of(250)
    harness.submit(prompt, max_tokens=2, seed=7)
    harness.finish()
    for seed in (1, 2):
        harness.submit(prompt_of(250, seed), max_tokens=2, seed=7)
        harness.finish()
    frame = harness.frame(prompt)
    keys = [int.from_bytes(frame.hashes[i : i + 8], "little") for i in range(0, len(frame.hashes), 16)]
    assert set(keys) <= harness.mirror.host and not set(keys) & harness.mirror.keys
    before = harness.runner.num_computed
    again = harness.submit(prompt, max_tokens=2, seed=7)
    harness.finish()
    assert harness.outputs[again].num_cached == 240 and harness.outputs[again].ids == reference(prompt, 2)
    assert harness.runner.num_computed - before == 11, "ten tokens of the prompt and one of the answer"
    assert set(keys) <= harness.mirror.keys and not set(keys) & harness.mirror.host, "on one tier at a time"


def test_a_request_waits_for_pages_that_another_brings_back() -> None:
    """Both tiers take part in single flight: one copy comes back, not four."""
    harness = Harness(host_cache_gb=host_gb(100), max_num_pages=40, max_model_len=300)
    prompt = prompt_of(250)
    for seed in (0, 1, 2, 3):
        harness.submit(prompt_of(250, seed), max_tokens=2, seed=7)
        harness.finish()
    ids = [harness.submit(prompt, max_tokens=2, seed=7) for _ in range(4)]
    harness.finish()
    assert [harness.outputs[i].num_cached for i in ids] == [240] * 4
    assert harness.engine.info()["pages"]["host"]["restored"] == 15


@pytest.mark.parametrize("when", ["abort", "fault", "failed step"])
def test_a_request_that_ends_early_leaves_its_pages_on_the_host(when: str) -> None:
    armed: list[str] = []

    def before_step(batch):
        if armed and armed.pop() == "failed step":
            raise RuntimeError("injected")
        return {0: "bad"} if when == "fault" and batch.rows[0].num_prompt == 251 else None

    harness = Harness(host_cache_gb=host_gb(100), max_num_pages=20, max_model_len=300, before_step=before_step)
    prompt = prompt_of(250)
    harness.submit(prompt, max_tokens=2, seed=7)
    harness.finish()
    harness.submit(prompt_of(250, 1), max_tokens=2, seed=7)
    harness.finish()
    hashes = harness.frame(prompt).hashes
    keys = [int.from_bytes(hashes[i : i + 8], "little") for i in range(0, len(hashes), 16)]
    spared = 16 * sum(key in harness.mirror.keys for key in keys)
    assert 0 < spared < 240 and set(keys) <= harness.mirror.keys | harness.mirror.host
    victim = harness.submit([*prompt, 3], max_tokens=20, seed=7)
    if when == "failed step":
        armed.append(when)
    harness.step()
    if when == "abort":
        harness.engine.cancel(harness, victim)
    harness.finish()
    assert harness.outputs[victim].finish == (Finish.ABORT if when == "abort" else Finish.ERROR)
    again = harness.submit(prompt, max_tokens=2, seed=7)
    harness.finish()
    assert harness.outputs[again].ids == reference(prompt, 2)
    if when == "fault":
        assert harness.outputs[again].num_cached == spared, (
            "what came back for a faulty row is in doubt, what lay there not"
        )
    else:
        assert harness.outputs[again].num_cached == 240


def test_snapshot_lists_both_tiers() -> None:
    harness = Harness(host_cache_gb=host_gb(100), max_num_pages=20, max_model_len=300)
    for seed in range(3):
        harness.submit(prompt_of(250, seed), max_tokens=2, seed=7)
        harness.finish()
    chunks = harness.engine.snapshot()
    listed = {chunk.tier: len(chunk.keys) // 8 for chunk in chunks}
    assert listed == {Tier.DEVICE: len(harness.mirror.keys), Tier.HOST: len(harness.mirror.host)}
    assert [chunk.index for chunk in chunks] == [0, 1] and all(chunk.total == 2 for chunk in chunks)


def test_keys_of_a_tier_come_parents_first() -> None:
    host = HostTier(8, Mute())
    chain = chain_of([0, 1, 0])
    for index in (2, 1, 0):
        host.save(index + 1, chain[index], chain[index - 1] if index else b"")
    assert host.keys() == [key64(page_hash) for page_hash in chain]
    host.drop(chain[1:2])
    assert host.keys() == [key64(chain[0])]
