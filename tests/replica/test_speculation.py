"""Speculation changes nothing but the number of steps: every option, every end, every way of running together."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafters import Replay, StubOracle
from engine_harness import VOCAB, Harness
from runner_driver import make_config, make_runner, prompts

from replica.batch import FROM_DEVICE, Batch, Row
from replica.llm import LLM, Output
from replica.loop import Engine
from replica.model import Decoder, ModelConfig, random_model, tiny_config
from replica.ngram import lookup
from replica.pace import Pace
from replica.runner import ModelRunner, _Pending, choose_ops
from replica.sampler import Sampled
from replica.step_time import StepShape
from replica.stub import expected_ids
from replica.token_cost import PRIOR, TokenCost
from router.wire import Finish, Sampling

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


def at_no_price(engine: Engine) -> None:
    """How far it guesses shall not depend on how busy this machine is."""
    if engine.speculation is not None:
        engine.speculation._cost.price = lambda rows: 0.02


def assert_speculated(info: dict) -> None:
    """There were right guesses and wrong ones, and every position counts those who got there."""
    drafted, accepted = info["speculation"]["drafted"], info["speculation"]["accepted"]
    assert drafted == sorted(drafted, reverse=True) and all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert 0 < sum(accepted) < sum(drafted)
    assert info["counters"]["drafted_tokens"] == sum(drafted)
    assert info["counters"]["accepted_tokens"] == sum(accepted)


# --- on the stub: every step audited


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


# --- on a model: every option of the sampler

COUNT = 32
OPTIONS = [
    Sampling(temperature=0),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.8, seed=6, top_k=20),
    Sampling(temperature=1.2, seed=7, top_p=0.8),
    Sampling(temperature=1.0, seed=8, min_p=0.05, top_k=50, top_p=0.95),
    Sampling(temperature=0, repetition_penalty=1.3),
    Sampling(temperature=1.0, seed=9, frequency_penalty=0.7, presence_penalty=0.3),
    Sampling(temperature=0, logit_bias=((3, 4.0), (5, -9.0)), allowed_token_ids=tuple(range(100))),
    Sampling(temperature=0, bad_words=((7,), (3, 4), (10, 11, 12))),
    Sampling(temperature=1.0, seed=10, stop_token_ids=tuple(range(0, 256, 9)), min_tokens=20),
    Sampling(temperature=1.0, seed=11, logprobs=3),
    Sampling(temperature=0, logprobs=0),
]
OPTIONS = [replace(sampling, max_tokens=COUNT) for sampling in OPTIONS]
ASKED = prompts(tuple(range(3, 3 + 5 * len(OPTIONS), 5)), seed=4)


@contextmanager
def open_llm(**options: object) -> Iterator[LLM]:
    runner = make_runner(seed=3, **options)
    with LLM(runner.config, runner) as llm:
        at_no_price(llm.engine)
        yield llm
        llm.engine.check_invariants()
        runner.check_invariants()


@pytest.fixture(scope="module")
def plain() -> list[Output]:
    with open_llm() as llm:
        return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(ASKED, OPTIONS, strict=True)]


def replay(outputs: list[Output], wrong_every: int) -> Replay:
    return Replay([prompt + output.ids for prompt, output in zip(ASKED, outputs, strict=True)], 256, wrong_every)


def assert_equal(got: list[Output], plain: list[Output]) -> None:
    for ours, theirs, sampling in zip(got, plain, OPTIONS, strict=True):
        assert (ours.ids, ours.finish, ours.error) == (theirs.ids, theirs.finish, None), sampling
        assert (ours.logprobs is None) is (theirs.logprobs is None)
        for a, b in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert a.token == pytest.approx(b.token, abs=1e-4) and a.rank == b.rank
            assert [i for i, _ in a.top] == [i for i, _ in b.top]


@pytest.mark.parametrize("wrong_every", [2, 7])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False, "prefix_caching": False}, {"chunk_size": 32}])
def test_every_sampling_option(plain: list[Output], options: dict, wrong_every: int) -> None:
    with open_llm(speculative="ngram", **options) as llm:
        llm.engine.speculation.drafter = replay(plain, wrong_every)
        alone = [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(ASKED, OPTIONS, strict=True)]
        assert_equal(alone, plain)
        assert_equal(llm.generate(ASKED, OPTIONS), plain)
        assert_speculated(llm.engine.info())


def test_every_sampling_option_under_preemption(plain: list[Output]) -> None:
    with open_llm(speculative="ngram", max_num_pages=16, max_model_len=128, watermark=0.0) as llm:
        llm.engine.speculation.drafter = replay(plain, 6)
        assert_equal(llm.generate(ASKED, OPTIONS), plain)
        info = llm.engine.info()
        assert info["counters"]["preemptions"] > 0
        assert_speculated(info)


def test_prompt_lookup_finds_the_loops_of_a_random_model() -> None:
    """Greedy decoding of random weights soon repeats itself."""
    asks = [replace(OPTIONS[0], max_tokens=150), replace(OPTIONS[1], max_tokens=150, temperature=0.05)]
    with open_llm() as llm:
        expected = [output.ids for output in llm.generate(ASKED[:2], asks)]
    with open_llm(speculative="ngram") as llm:
        assert [output.ids for output in llm.generate(ASKED[:2], asks)] == expected
        info = llm.engine.info()
        assert_speculated(info)
        assert info["steps"]["count"] < 140


@pytest.mark.parametrize(("bad", "fault", "scrubbed"), [(None, False, 0), (1, True, 1), (2, False, 1)])
def test_only_what_becomes_output_can_be_at_fault(bad: int | None, fault: bool, scrubbed: int) -> None:
    """A rejected guess may lead nowhere, even to NaN: its traces go, its request stays."""
    runner = make_runner()
    pages = np.array([3, 4], np.int32)
    runner._kv[0].k[3, 5] = float("nan")
    row = Row(0, 5, np.array([1, 50, 60], np.int32), pages, 3, Sampling(temperature=0), position_base=6)
    sound = torch.tensor([i != bad for i in range(3)])
    pending = _Pending(Batch(0, [row]), Sampled(torch.tensor([50, 7, 8]), sound, None, None), [], 0.0, {})
    result = runner._collect(pending)
    assert (0 in result.faults) is fault and result.ids == [[] if fault else [50, 7]]
    assert bool(runner._kv[0].k.isnan().any()) is not bool(scrubbed)
    runner.close()


# --- a draft model


@contextmanager
def open_drafted(draft: Decoder | None, **options: object) -> Iterator[LLM]:
    config = make_config(speculative="draft", **options)
    runner = ModelRunner(tiny_config(), random_model(tiny_config(), 3), config, draft=draft)
    with LLM(config, runner) as llm:
        at_no_price(llm.engine)
        yield llm
        llm.engine.check_invariants()
        runner.check_invariants()


def decoder_of(shape: ModelConfig, seed: int, noise: float = 0.0) -> Decoder:
    """Random weights; ``noise`` on the output layer spoils some guesses."""
    weights = random_model(shape, seed)
    weights.head = weights.head + noise * torch.randn(weights.head.shape, generator=torch.Generator().manual_seed(0))
    config = make_config()
    return Decoder(shape, weights, choose_ops(shape, config), config.max_model_len)


TWIN = {"speculative_model": "twin"}
DRAFTS = {
    "first layer": (None, {"speculative_layers": 1}),
    "twin": (lambda: decoder_of(tiny_config(), 3), TWIN),
    "noisy twin": (lambda: decoder_of(tiny_config(), 3, 0.02), TWIN),
    "other heads, more ids": (lambda: decoder_of(tiny_config(num_heads=2, num_kv_heads=1, vocab_size=300), 5), TWIN),
    "fewer ids": (lambda: decoder_of(tiny_config(vocab_size=200), 6), TWIN),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_model_changes_no_token(plain: list[Output], kind: str) -> None:
    make, source = DRAFTS[kind]
    with open_drafted(make and make(), **source, chunk_size=32) as llm:
        assert_equal(llm.generate(ASKED, OPTIONS), plain)
        counters = llm.engine.info()["counters"]
        rejected = counters["drafted_tokens"] - counters["accepted_tokens"]
        if kind == "twin":
            # The same model with the same noise and the same options. What follows a stop id is not accepted.
            assert rejected <= counters["wasted_tokens"]
        else:
            assert rejected > 20
        assert counters["accepted_tokens"] > (50 if "twin" in kind else 0)


@pytest.mark.parametrize("kind", ["first layer", "noisy twin"])
def test_a_draft_model_alone_and_without_running_ahead(plain: list[Output], kind: str) -> None:
    make, source = DRAFTS[kind]
    with open_drafted(make and make(), **source, async_scheduling=False, prefix_caching=False) as llm:
        for i in (0, 3, 6, 10):
            output = llm.generate([ASKED[i]], OPTIONS[i])[0]
            assert (output.ids, output.finish) == (plain[i].ids, plain[i].finish)
        assert_speculated(llm.engine.info())


def test_a_draft_model_under_preemption_and_on_cached_pages(plain: list[Output]) -> None:
    options = {**TWIN, "max_num_pages": 16, "max_model_len": 128, "watermark": 0.0}
    with open_drafted(decoder_of(tiny_config(), 3), **options) as llm:
        assert_equal(llm.generate(ASKED, OPTIONS), plain)
        counters = llm.engine.info()["counters"]
        assert counters["preemptions"] > 0
        assert 0 <= counters["drafted_tokens"] - counters["accepted_tokens"] <= counters["wasted_tokens"]
    with open_drafted(decoder_of(tiny_config(), 3), **TWIN) as llm:
        for _ in range(2):
            output = llm.generate(ASKED[-1:], OPTIONS[:1])[0]
        assert output.num_cached >= 48
        counters = llm.engine.info()["counters"]
        assert counters["accepted_tokens"] == counters["drafted_tokens"] > 0, "cached pages hold the draft's part too"


def test_pages_from_the_host_lack_the_drafts_part_and_change_no_token() -> None:
    """They come back zeroed or stale for the draft model, which then guesses worse."""
    asked = prompts((100, 101, 102, 103, 104, 105), seed=9)
    greedy = Sampling(temperature=0, max_tokens=16)
    with open_llm() as llm:
        expected = [output.ids for output in llm.generate(asked, greedy)]
    options = {"max_num_pages": 12, "max_model_len": 160, "host_cache_gb": 0.01}
    with open_drafted(decoder_of(tiny_config(), 3), **TWIN, **options) as llm:
        for _ in range(3):
            outputs = [llm.generate([prompt], greedy)[0] for prompt in asked]
            assert [output.ids for output in outputs] == expected
        assert min(output.num_cached for output in outputs) == 96, "the pool holds one prompt, the host the others"
        counters = llm.engine.info()["counters"]
        assert counters["drafted_tokens"] > 0


def test_a_draft_model_beside_grammars() -> None:
    pytest.importorskip("llguidance")
    from test_masking_model import GRAMMARS, asks

    asked = prompts((9, 40, 5, 33, 12, 21, 60, 7))
    plain_runner = make_runner(seed=3)
    with LLM(plain_runner.config, plain_runner, masks=GRAMMARS) as llm:
        expected = [output.ids for output in llm.generate(asked, asks())]
    config = make_config(speculative="draft", **TWIN)
    runner = ModelRunner(tiny_config(), random_model(tiny_config(), 3), config, draft=decoder_of(tiny_config(), 3))
    with LLM(config, runner, masks=GRAMMARS) as llm:
        assert [output.ids for output in llm.generate(asked, asks())] == expected
        assert_speculated(llm.engine.info())


def test_a_draft_model_needs_its_weights() -> None:
    with pytest.raises(ValueError, match="speculative_model: 'twin' was not loaded"):
        ModelRunner(tiny_config(), random_model(tiny_config(), 3), make_config(speculative="draft", **TWIN))


# --- grammars


def test_grammars() -> None:
    pytest.importorskip("llguidance")
    from test_masking_model import EOS, GRAMMARS, asks

    asked, options = prompts((9, 40, 5, 33, 12, 21, 60, 7)), asks()

    def generate(speculative: str, drafter: object = None, **more: object) -> tuple[list[list[int]], dict]:
        runner = make_runner(speculative=speculative, **more)
        with LLM(runner.config, runner, masks=GRAMMARS) as llm:
            if drafter is not None:
                llm.engine.speculation.drafter = drafter
            outputs = llm.generate(asked, options)
            assert all(output.error is None for output in outputs)
            return [output.ids for output in outputs], llm.engine.info()

    expected, _ = generate("off")
    assert sum(ids[-1] == EOS for ids in expected) >= 4
    drafter = Replay([p + ids for p, ids in zip(asked, expected, strict=True)], EOS + 1, 4)
    for more in ({}, {"chunk_size": 16, "max_batch_size": 8}):
        got, info = generate("ngram", drafter, **more)
        assert got == expected
        assert_speculated(info)


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
