"""The cost rule: its formula, its ties, its bound; and the queue it is fed from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.backlog import Backlog
from router.pages import mix64, pack_keys
from router.placement import Placement
from router.policy import Coefficients, PolicyOptions, ReplicaView, choose, congestion, identity
from router.wire import EventBatch, Load, Snapshot

FIT = Coefficients(a=0.05, b=1e-6, t0=2.0, k1=1e-5, k2=0.02)
KEYS = [mix64(i) for i in range(64)]


def view(name: str, *, cached: int = 0, queue_ms: float = 0.0, waiting: int = 0, fit: Coefficients = FIT, **more):
    defaults = {"running": 0, "context_tokens": 0, "free_pages": 10_000, "chunk": 512}
    return ReplicaView(name, identity(name), cached, queue_ms, waiting, coefficients=fit, **(defaults | more))


def decide(views: list[ReplicaView], num_tokens: int = 1024, **more):
    return choose(views, num_tokens, KEYS[: num_tokens // 16], 16, fallback_key=1, **more)


def test_cost_is_the_formula() -> None:
    fit = Coefficients(a=0.1, b=1e-4, t0=3.0, k1=0.001, k2=0.5)
    chosen = decide([view("a", cached=160, queue_ms=40.0, fit=fit, running=4, context_tokens=500, chunk=300)])
    uncached = 1024 - 160
    own = 0.1 * uncached + 1e-4 * uncached * (160 + uncached / 2) + 3 * (3.0 + 0.5 + 2.0)
    assert chosen is not None
    assert chosen.prefill_ms == pytest.approx(own)
    assert chosen.cost_ms == pytest.approx(40.0 + own) and chosen.price == 1.0
    assert chosen.ttft_ms == pytest.approx(40.0 + own)


def test_price_is_lower_quartile_plus_eviction_capped() -> None:
    views = [view(f"r{i}", waiting=w, queue_ms=1e5 if i else 0.0) for i, w in enumerate((9, 3, 5, 7, 4, 6, 8, 1))]
    assert congestion(views) == 4
    assert decide(views).price == 5.0
    views[0].free_pages = 63
    assert decide(views).price == 6.0
    assert decide([view("a", waiting=100)]).price == 8.0


def test_a_fully_cached_prompt_still_computes_one_token() -> None:
    chosen = decide([view("a", cached=1024)])
    assert chosen.cached == 1023 and chosen.prefill_ms > 0


def test_holder_wins_until_its_queue_costs_more_than_recomputing() -> None:
    full = FIT.prefill_ms(1024, 0, 512, 0, 0)
    tail = FIT.prefill_ms(64, 960, 512, 0, 0)
    for queue_ms, expected in ((0.0, "holder"), (full - tail - 6, "holder"), (full - tail + 6, "idle")):
        assert decide([view("holder", cached=960, queue_ms=queue_ms), view("idle")]).replica == expected


def test_fetching_overlaps_the_queue() -> None:
    assert decide([view("a", transfer_ms=30.0, queue_ms=10.0)]).ttft_ms == pytest.approx(
        30.0 + FIT.prefill_ms(1024, 0, 512, 0, 0)
    )


def test_ties_go_to_one_place_per_new_prefix_whatever_the_router() -> None:
    rng = random.Random(1)
    seen = set()
    for prompt in range(200):
        keys = [mix64(prompt * 100 + i) for i in range(40)]
        views = [view(f"r{i}", queue_ms=rng.random() * 4) for i in range(8)]
        first = choose(views, 640, keys, 16, fallback_key=1)
        rng.shuffle(views)
        tail = [*keys[:39], mix64(rng.getrandbits(60))]
        again = choose(views, 640, tail, 16, fallback_key=2)
        assert first.replica == again.replica and first.tied == 8
        seen.add(first.replica)
    assert len(seen) == 8, "new prefixes spread over all replicas"


def test_tie_breaks_on_the_first_page_not_shared() -> None:
    """All hold 20 pages: the 21st decides, so branches of one hot prefix spread."""
    views = [view(f"r{i}", cached=320) for i in range(4)]
    winners = {
        choose(views, 640, [*KEYS[:20], *(mix64(branch * 50 + i) for i in range(20))], 16, fallback_key=1).replica
        for branch in range(60)
    }
    assert len(winners) == 4
    short = {choose(views, 15, [], 16, fallback_key=key).replica for key in range(60)}
    assert len(short) == 4, "prompts without a full page spread by request"


def test_a_tie_never_loses_a_holder_that_costs_no_more() -> None:
    """Short prompts cost less than the tie window, so the holder has to win inside of it, whatever the fits' noise."""
    slower = Coefficients(FIT.a, FIT.b, FIT.t0 + 1.0, FIT.k1, FIT.k2)
    for prompt in range(60):
        keys = [mix64(prompt * 10 + i) for i in range(2)]
        for fit in (FIT, slower):
            views = [view("holder", cached=32, fit=fit), view("cold"), view("half", cached=16)]
            chosen = choose(views, 37, keys, 16, fallback_key=prompt)
            assert (chosen.replica, chosen.cached) == ("holder", 32)


def test_a_busier_holder_within_the_window_is_tied() -> None:
    """Its queue makes it cost more: then the page decides, the same way in every router."""
    winners = {
        choose(
            [view("holder", cached=32, queue_ms=4.0), view("cold")],
            37,
            [mix64(prompt * 10 + i) for i in range(2)],
            16,
            fallback_key=1,
        ).replica
        for prompt in range(60)
    }
    assert winners == {"holder", "cold"}


def test_suspicious_replicas_only_when_nothing_else() -> None:
    assert decide([view("a", suspicious=True), view("b", queue_ms=500.0)]).replica == "b"
    assert decide([view("a", suspicious=True)]).replica == "a"


def test_slo_drops_replicas_and_may_leave_none() -> None:
    views = [view("holder", cached=1000, queue_ms=200.0), view("busy", queue_ms=100.0)]
    assert decide(views, slo_ms=180.0).replica == "busy"
    assert decide(views, slo_ms=10.0) is None
    assert decide([]) is None


replica_views = st.builds(
    lambda cached, queue_ms, waiting, free: (cached * 16, queue_ms, waiting, free),
    st.integers(0, 64),
    st.floats(0, 20_000),
    st.integers(0, 40),
    st.integers(0, 100),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(replica_views, min_size=1, max_size=16), st.integers(1, 1024))
def test_hot_spotting_is_bounded(raw: list[tuple[int, float, int, int]], num_tokens: int) -> None:
    """Q_chosen - Q_min <= 8 P(whole prompt) + the tie window, whoever holds what."""
    views = [
        view(f"r{i}", cached=cached, queue_ms=queue_ms, waiting=waiting, free_pages=free)
        for i, (cached, queue_ms, waiting, free) in enumerate(raw)
    ]
    chosen = decide(views, num_tokens)
    assert chosen is not None
    full = FIT.prefill_ms(num_tokens, 0, 512, 0, 0)
    least = min(view.queue_ms for view in views)
    assert chosen.queue_ms - least <= 8 * full + PolicyOptions().tie_ms + 1e-6


def test_backlog_counts_progress_of_the_oldest_only() -> None:
    backlog = Backlog()
    backlog.push("a", 100.0, now=0.0)
    backlog.push("b", 50.0, now=0.01)
    backlog.push("a", 999.0, now=0.01)
    assert backlog.queue_ms(0.04) == pytest.approx(110.0)
    assert backlog.queue_ms(9.0) == pytest.approx(52.0), "progress never exceeds 98 % of the estimate"
    backlog.pop("a", 0.1, served=True)
    assert backlog.queue_ms(0.1) == pytest.approx(50.0)
    assert not backlog.pop("a", 0.1, served=True)
    backlog.pop("b", 0.2, served=False)
    assert backlog.queue_ms(1.0) == 0.0 and not len(backlog)
    backlog.check_invariants()


def placed(names: str = "ab") -> Placement:
    placement = Placement(16)
    for name in names:
        state = placement.add(name)
        state.accepting = True
        slot = placement.directory.open(name, 1)
        placement.directory.set_synced(slot, True)
        state.on_slot(slot, {})
        state.on_load(Load(free_pages=1000, coefficients=(0.05, 0.0, 2.0, 0.0, 0.0)))
    return placement


def test_a_reservation_is_credit_at_once_and_ends_with_the_request() -> None:
    placement = placed()
    first = placement.decide(KEYS, 1024, 0.0, fallback_key=1)
    assert first is not None and first.cached == 0
    placement.commit(first, "x", KEYS, 0.0)
    second = placement.decide(KEYS, 1030, 0.0, fallback_key=1)
    assert second is not None and second.best_cached == 1024
    state = placement.replicas[first.replica]
    assert len(state.backlog) == 1
    placement.first_token(first.replica, "x", 0.05)
    assert not len(state.backlog) and placement.prediction.count == 1
    assert placement.decide(KEYS, 1030, 0.0, fallback_key=1).best_cached == 1024
    placement.check_invariants()
    placement.end(first.replica, "x", 0.06)
    placement.end(first.replica, "x", 0.06)
    assert placement.decide(KEYS, 1030, 0.0, fallback_key=1).best_cached == 0
    placement.check_invariants()


def test_other_routers_requests_count_by_their_echo() -> None:
    placement = placed()
    state = placement.replicas["a"]
    batch = EventBatch("a", 1, 1, 1, accepted=[("theirs", pack_keys(KEYS))])
    state.on_batch(batch, 0.0)
    assert len(state.backlog) == 1 and state.backlog.queue_ms(0.0) > 50
    assert placement.decide(KEYS, 1030, 0.0, fallback_key=1).best_cached == 1024
    state.on_batch(EventBatch("a", 1, 2, 2, ended=["theirs"]), 0.1)
    assert not len(state.backlog) and not placement.directory.pending.bits
    state.on_batch(EventBatch("a", 1, 3, 3, accepted=[("old", pack_keys(KEYS[:4]))]), 0.2)
    state.on_snapshot(Snapshot("a", 1, 4, 0, 1, 0, b"", [(0, 0)] * 2, [("new", pack_keys(KEYS[:2]))]), 0.3)
    assert state.backlog.requests() == ["new"]
    placement.check_invariants()


def test_a_lost_connection_frees_our_requests_and_keeps_the_others() -> None:
    placement = placed("a")
    state = placement.replicas["a"]
    state.on_batch(EventBatch("a", 1, 1, 1, accepted=[("theirs", pack_keys(KEYS[:8]))]), 0.0)
    decision = placement.decide(KEYS, 1030, 0.0, fallback_key=1)
    placement.commit(decision, "ours", KEYS, 0.0)
    state.on_lost(0.1)
    assert state.backlog.requests() == ["theirs"] and not state.accepting and not state.own
    assert placement.decide(KEYS, 1030, 0.0, fallback_key=1) is None
    placement.check_invariants()


def test_unfitted_replicas_borrow_a_peers_fit() -> None:
    placement = placed()
    placement.replicas["b"].coefficients = None
    placement.replicas["a"].accepting = False
    alone = placement.decide(KEYS, 1024, 0.0, fallback_key=1)
    placement.replicas["a"].accepting = True
    placement.replicas["a"].backlog.push("q", 1e4, 0.0)
    beside = placement.decide(KEYS, 1024, 0.0, fallback_key=1)
    assert alone.replica == beside.replica == "b"
    assert beside.prefill_ms == pytest.approx(0.05 * 1024 + 2 * 2.0) != alone.prefill_ms
