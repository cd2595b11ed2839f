"""Speculation on the stub, every step audited: no end, no crowd and no tiny pool makes it say anything else."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from drafters import StubOracle, assert_speculated, at_no_price
from engine_harness import VOCAB, Harness

from replica.batch import FROM_DEVICE
from replica.ngram import lookup
from replica.pace import Pace
from replica.step_time import StepShape
from replica.stub import expected_ids
from replica.token_cost import PRIOR, TokenCost
from router.wire import Finish

SEED = 7


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def reference(prompt: list[int], count: int) -> list[int]:
    return expected_ids(prompt, count, seed=SEED, vocab_size=VOCAB)


def drafting(wrong_every: int = 5, **options) -> Harness:
    harness = Harness(speculative="ngram", **options)
    harness.engine.speculation.drafter = StubOracle(SEED, VOCAB, wrong_every)
    at_no_price(harness.engine)
    return harness


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("options", [
    {"chunk_size": 32, "max_batch_size": 16},
    {"chunk_size": 64, "prefix_caching": False},
    {"chunked_prefill": False, "prefill_priority": "high"},
    {"page_size": 32},
    {"scheduler": "static", "max_batch_size": 4},
    {"kv_cache_paging": False, "max_num_pages": 181, "max_model_len": 560},
])  # fmt: skip
def test_same_ids_alone_and_in_a_crowd(options: dict, async_scheduling: bool) -> None:
    harness = drafting(async_scheduling=async_scheduling, **options)
    lengths = (1, 15, 16, 17, 33, 200)
    for group in ([n] for n in lengths), [lengths * 2]:
        for together in group:
            wanted = {harness.submit(prompt_of(n), max_tokens=40, seed=SEED): n for n in together}
            harness.finish()
            for request_id, n in wanted.items():
                output = harness.outputs[request_id]
                assert (output.ids, output.finish) == (reference(prompt_of(n), 40), Finish.LENGTH)
    assert_speculated(harness.engine.info())
    assert max(batch.num_tokens for batch in harness.batches) <= harness.config.chunk_size


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("priority", ["low", "high"])
def test_same_ids_under_preemption(priority: str, prefix_caching: bool, async_scheduling: bool) -> None:
    harness = drafting(
        async_scheduling=async_scheduling,
        prefix_caching=prefix_caching,
        prefill_priority=priority,
        chunk_size=40,
        max_num_pages=24,
        max_batch_size=8,
        max_model_len=300,
        watermark=0.0,
    )
    wanted = {harness.submit(prompt_of(20 + 7 * i), max_tokens=90, seed=SEED): 20 + 7 * i for i in range(8)}
    harness.finish()
    for request_id, n in wanted.items():
        assert harness.outputs[request_id].ids == reference(prompt_of(n), 90)
    info = harness.engine.info()
    assert info["counters"]["preemptions"] > 0
    assert_speculated(info)


def test_a_request_that_is_preempted_while_its_guesses_are_verified_keeps_its_tokens() -> None:
    harness = drafting(wrong_every=1000)
    request_id = harness.submit(prompt_of(30), max_tokens=60, seed=SEED)
    harness.step(4)
    assert harness.engine.speculation.waits and harness.engine._launch(time.monotonic())
    assert harness.batches[-1].rows[0].num_samples > 1
    harness.engine.scheduler._preempt(harness.request(request_id))
    harness.finish()
    assert harness.outputs[request_id].ids == reference(prompt_of(30), 60)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_never_a_token_more_than_asked(count: int) -> None:
    harness = drafting(wrong_every=1000)
    ids = [harness.submit(prompt_of(14 + i), max_tokens=count, seed=SEED) for i in range(4)]
    harness.finish()
    for i, request_id in enumerate(ids):
        output = harness.outputs[request_id]
        assert (output.ids, output.finish) == (reference(prompt_of(14 + i), count), Finish.LENGTH)
    counters = harness.engine.info()["counters"]
    assert counters["wasted_tokens"] == 0 and (counters["accepted_tokens"] > 0 or count < 9)


def test_the_context_is_never_exceeded() -> None:
    harness = drafting(wrong_every=1000, max_model_len=64)
    request_id = harness.submit(prompt_of(40), max_tokens=500, seed=SEED)
    harness.finish()
    output = harness.outputs[request_id]
    assert (output.ids, output.finish) == (reference(prompt_of(40), 24), Finish.LENGTH)
    assert max(row.start + len(row.token_ids) for batch in harness.batches for row in batch.rows) <= 64


def test_a_stop_id_among_accepted_guesses_ends_the_text_and_nothing_after_it_is_hashed() -> None:
    prompt = prompt_of(30)
    ids = reference(prompt, 60)
    for at in range(8, 40):
        stop = ids[at]
        cut = ids.index(stop) + 1
        harness = drafting(wrong_every=1000)
        request_id = harness.submit(prompt, max_tokens=60, seed=SEED, stop_token_ids=(stop,), logprobs=0)
        harness.finish()
        output = harness.outputs[request_id]
        assert (output.ids, output.finish) == (ids[:cut], Finish.STOP)
        assert len(output.logprobs) == cut
        assert len(harness.mirror.keys) == (len(prompt) + cut - 1) // 16
    assert harness.engine.info()["counters"]["wasted_tokens"] > 0


def test_an_accepted_guess_saves_a_step_and_rejected_ones_cost_none() -> None:
    for wrong_every, fewest, most in ((1000, 80 // 16, 20), (1, 80, 82)):
        harness = drafting(wrong_every=wrong_every)
        harness.submit(prompt_of(30), max_tokens=80, seed=SEED)
        harness.finish()
        assert fewest <= len(harness.batches) <= most


def test_guesses_that_never_come_right_are_given_up_and_the_loop_runs_ahead_again() -> None:
    harness = drafting(wrong_every=1)
    harness.submit(prompt_of(30), max_tokens=200, seed=SEED)
    harness.finish()
    assert harness.engine.info()["counters"]["drafted_tokens"] < 20
    ahead = [row.token_ids[-1] == FROM_DEVICE for batch in harness.batches[-150:] for row in batch.rows]
    assert sum(ahead) == 150


def test_rejected_guesses_leave_no_page_behind() -> None:
    harness = drafting(wrong_every=2)
    harness.submit(prompt_of(30), max_tokens=300, seed=SEED)
    for _ in range(400):
        harness.step()
        for request in harness.engine.scheduler.running:
            assert request.num_pages <= harness.config.pages_for(request.num_computed + 1) + 1
    harness.finish()


def test_guesses_never_take_what_others_need() -> None:
    """A budget of 8 for 8 streams leaves nothing to guess with."""
    harness = drafting(wrong_every=1000, chunk_size=8, max_batch_size=8)
    for i in range(8):
        harness.submit(prompt_of(8, seed=i), max_tokens=30, seed=SEED)
    harness.step(10)
    while len(harness.engine.scheduler.running) == 8 and all(r.is_decoding for r in harness.engine.scheduler.running):
        harness.step()
        rows = harness.batches[-1].rows
        assert len(rows) < 8 or all(row.num_samples == 1 for row in rows)
    harness.finish()


# --- the parts


def test_lookup() -> None:
    def found(ids: list[int], count: int = 3, shortest: int = 2, longest: int = 4) -> list[int]:
        return lookup(np.array(ids, np.int32), count, shortest, longest).tolist()

    assert found([1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert found([1, 2, 9, 1, 2, 8, 5, 1, 2]) == [8, 5, 1], "of equal places the newest"
    assert found([7, 1, 2, 9, 9, 1, 2, 8, 7, 1, 2]) == [9, 9, 1], "of two places the one that agrees further"
    assert found([5, 5, 5]) == [5, 5, 5] and found([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1], "loops go on"
    assert found([1, 2, 3, 9, 2]) == [], "one id in common is not enough"
    assert found([1, 2, 3, 9, 2], shortest=1) == [3, 9, 2]
    assert found([1]) == [] and found([1, 1]) == [] and found([1, 1], shortest=1) == [1, 1, 1]


def test_lookup_against_a_plain_search() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        shortest, longest, best = rng.randrange(1, 3), rng.randrange(3, 6), (0, -1)
        for end in range(len(ids) - 1):
            agreed = 0
            while agreed < min(longest, end + 1) and ids[end - agreed] == ids[-1 - agreed]:
                agreed += 1
            if agreed >= shortest:
                best = max(best, (agreed, end))
        wanted = [ids[best[1] + 1 + i % (len(ids) - 1 - best[1])] for i in range(6)] if best[1] >= 0 else []
        assert lookup(np.array(ids, np.int32), 6, shortest, longest).tolist() == wanted


def test_a_token_more_costs_what_the_steps_say() -> None:
    """A step of 20 ms + 2 ms a token: at one row another token costs 1 / 11 of one; at 40 rows 4 / 5."""
    rng, cost = random.Random(0), TokenCost()
    assert cost.price(1) == pytest.approx(PRIOR)
    for _ in range(50):
        cost.learn(1, 22 * rng.gauss(1, 0.05))
    assert cost.price(1) == pytest.approx(PRIOR, rel=0.01), "steps of one size tell nothing"
    for i in range(100):
        tokens = 1 + 4 * (i % 3)
        cost.learn(tokens, (20 + 2 * tokens) * rng.gauss(1, 0.05) * (30 if i == 50 else 1))
    assert cost.price(1) == pytest.approx(2 / 22, rel=0.15)
    for _ in range(300):
        tokens = rng.randrange(30, 50)
        cost.learn(tokens, 20 + 2 * tokens)
    assert cost.price(40) == pytest.approx(80 / 100, rel=0.1)
    for _ in range(300):
        cost.learn(rng.randrange(1, 9), 7.0)
    assert cost.price(1) == 0.02, "free, and even what gets cheaper is not taken for less"


def test_the_engine_measures_what_a_token_more_costs() -> None:
    harness = Harness(speculative="ngram")
    for i in range(90):
        harness.engine.step_time.update(StepShape(running=1 + i % 5), 1e4 + 2e3 * (i % 5))
        harness.engine.step_time.update(StepShape(running=1, prefill_tokens=500), 7.0)
    harness.submit(prompt_of(20), max_tokens=2)
    harness.step()
    assert harness.engine.info()["speculation"]["price"] == pytest.approx(0.2, rel=0.1)
    harness.finish()


def test_pace_follows_what_comes_right_and_what_it_costs() -> None:
    pace = Pace()
    cheap, dear = 0.05, 0.6
    assert pace.length(cheap, 8) > 0 and pace.length(dear, 8) == 0
    for _ in range(10):
        pace.learn(4, 4)
    assert pace.length(cheap, 8) == 8 and 1 <= pace.length(dear, 8) < 8
    for _ in range(10):
        pace.learn(0, 1)
    assert pace.length(cheap, 8) == 0
    for _ in range(6):
        pace.learn(1, 1)
    assert pace.length(cheap, 8) > 0, "it comes back"
    rests = []
    for _ in range(8):
        pace.looked(True, 16)
        rests.append(pace.pause)
        while pace.is_resting():
            pass
    assert rests == [1, 2, 4, 8, 16, 16, 16, 16]
    pace.looked(False, 16)
    assert not pace.is_resting()
