"""Speculation on a model changes no token and no log-probability: sampling options, grammars, draft models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafters import Replay, assert_speculated, at_no_price
from runner_driver import make_config, make_runner, prompts

from replica.batch import Batch, Row
from replica.llm import LLM, Output
from replica.model import Decoder, ModelConfig, random_model, tiny_config
from replica.runner import ModelRunner, _Pending, choose_ops
from replica.sampler import Sampled
from router.wire import Sampling

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
