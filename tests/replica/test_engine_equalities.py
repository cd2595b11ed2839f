"""The equalities with a real (tiny, random) decoder and sampler in fp32: token for token, greedy and seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from runner_driver import make_runner

from replica.llm import LLM
from router.wire import Sampling

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 511, 513)
COUNT = 12
GREEDY = Sampling(temperature=0, max_tokens=COUNT)
SEEDED = Sampling(temperature=1.0, top_p=0.9, seed=11, max_tokens=COUNT)


@contextmanager
def open_llm(**options: object) -> Iterator[LLM]:
    runner = make_runner(seed=3, **options)
    with LLM(runner.config, runner) as llm:
        yield llm
        llm.engine.check_invariants()
        runner.check_invariants()


def prompts(vocab_size: int) -> list[list[int]]:
    """Nine lengths; seven more share the first 500 tokens of the longest, so that pages are found and awaited."""
    rng = random.Random(1)
    own = [[rng.randrange(vocab_size) for _ in range(n)] for n in LENGTHS]
    return own + [own[-1][:500] + [rng.randrange(vocab_size) for _ in range(i + 1)] for i in range(7)]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[list[int]]]:
    """Alone, nothing cached, never cut, one step at a time."""
    with open_llm(prefix_caching=False, chunked_prefill=False, async_scheduling=False) as llm:
        asked = prompts(llm.engine.runner.vocab_size)
        return {
            name: [llm.generate([prompt], sampling)[0].ids for prompt in asked]
            for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED))
        }


def check(llm: LLM, reference: dict[str, list[list[int]]]) -> None:
    asked = prompts(llm.engine.runner.vocab_size)
    for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED), ("greedy", GREEDY)):
        outputs = llm.generate(asked, sampling)
        assert [output.error for output in outputs] == [None] * 16
        assert [output.ids for output in outputs] == reference[name], name


def test_seeded_differs_from_greedy(reference) -> None:
    assert sum(a != b for a, b in zip(reference["greedy"], reference["seeded"], strict=True)) > 12


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [32, 64, None])
def test_in_a_crowd(reference, chunk: int | None, prefix_caching: bool, async_scheduling: bool) -> None:
    options = {"chunk_size": chunk} if chunk else {"chunked_prefill": False}
    with open_llm(
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        max_batch_size=16,
        max_num_pages=400,
        **options,
    ) as llm:
        check(llm, reference)
        hits = llm.engine.info()["counters"]["prefix_hits"]
        assert (hits > 0) is prefix_caching


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_where_short_and_long_prompts_take_turns(reference, prefix_caching: bool) -> None:
    """As on a GPU by default: long steps while few decode."""
    runner = make_runner(seed=3, prefix_caching=prefix_caching, max_batch_size=16, max_num_pages=400, chunk_size=256)
    with LLM(replace(runner.config, busy_chunk_size=64), runner) as llm:
        check(llm, reference)
        llm.engine.check_invariants()


@pytest.fixture(scope="module")
def short_reference() -> dict[tuple[int, ...], list[int]]:
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=48)
    with open_llm(prefix_caching=False, async_scheduling=False) as llm:
        asked = [prompt for prompt in prompts(llm.engine.runner.vocab_size) if len(prompt) <= 33]
        return {tuple(prompt): llm.generate([prompt], sampling)[0].ids for prompt in asked}


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [16, None])
def test_under_preemption(short_reference, chunk: int | None, prefix_caching: bool, async_scheduling: bool) -> None:
    options = {"chunk_size": chunk} if chunk else {"chunked_prefill": False}
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=48)
    with open_llm(
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        max_batch_size=16,
        max_num_pages=13,
        max_model_len=96,
        watermark=0.0,
        **options,
    ) as llm:
        asked = 2 * [list(prompt) for prompt in short_reference]
        outputs = llm.generate(asked, sampling)
        assert [output.ids for output in outputs] == 2 * list(short_reference.values())
        assert llm.engine.info()["counters"]["preemptions"] > 0


@pytest.mark.parametrize("options", [
    {"kv_cache_paging": False, "max_num_pages": 181, "max_model_len": 560},
    {"scheduler": "static", "max_batch_size": 5},
    {"prefill_priority": "high", "chunk_size": 48},
    {"page_size": 64},
])  # fmt: skip
def test_baselines(reference, options: dict) -> None:
    with open_llm(**options) as llm:
        check(llm, reference)
