"""In-process generation."""

from __future__ import annotations

import threading
import time

import pytest
from engine_harness import VOCAB, make_config

from replica.llm import LLM, EngineStopped
from replica.stub import StubRunner, expected_ids
from router.wire import Refusal, Sampling


def open_llm(**options) -> LLM:
    config = make_config(**options)
    return LLM(config, StubRunner(num_pages=config.num_pages, vocab_size=VOCAB, step_ms=1.0))


PROMPTS = [[1, 2, 3], list(range(50)), [7]]


def test_generate_keeps_the_order_and_each_its_options() -> None:
    with open_llm() as llm:
        each = [Sampling(max_tokens=n, seed=n) for n in (3, 20, 9)]
        outputs = llm.generate(PROMPTS, each)
        for prompt, sampling, output in zip(PROMPTS, each, outputs, strict=True):
            n = sampling.max_tokens
            assert output.ids == expected_ids(prompt, n, seed=n, vocab_size=VOCAB)
            assert output.finish == "length" and output.error is None
        assert llm.generate([list(range(50))], Sampling(max_tokens=2))[0].num_cached == 48
        assert llm.generate([list(range(50))], Sampling(max_tokens=2), salt="x")[0].num_cached == 0
        with pytest.raises(ValueError, match="sampling"):
            llm.generate(PROMPTS, each[:2])


def test_stream_is_the_same_and_closing_it_cancels() -> None:
    with open_llm() as llm:
        whole = llm.generate(PROMPTS, Sampling(max_tokens=12))
        ids: list[list[int]] = [[], [], []]
        for index, delta in llm.stream(PROMPTS, Sampling(max_tokens=12)):
            ids[index] += delta.ids
        assert ids == [output.ids for output in whole]
        stream = llm.stream(PROMPTS, Sampling(max_tokens=3000))
        next(stream)
        stream.close()
        until = time.monotonic() + 10
        while not llm.engine.idle():
            assert time.monotonic() < until
            time.sleep(0.01)
        llm.engine.check_invariants()


def test_a_refused_prompt_takes_the_others_with_it() -> None:
    with open_llm() as llm:
        with pytest.raises(Refusal, match="vocabulary"):
            llm.generate([[1], [VOCAB]], Sampling(max_tokens=2000))
        until = time.monotonic() + 10
        while not llm.engine.idle():
            assert time.monotonic() < until
            time.sleep(0.01)


def test_an_engine_that_stops_is_noticed() -> None:
    llm = open_llm()
    threading.Timer(0.3, llm.close).start()
    with pytest.raises(EngineStopped, match="not running"):
        llm.generate([[1, 2, 3]], Sampling(max_tokens=4000))


def test_threads_share_an_engine() -> None:
    with open_llm() as llm:
        results: dict[int, list[int]] = {}

        def work(seed: int) -> None:
            results[seed] = llm.generate([[seed, 5, 6]], Sampling(max_tokens=10, seed=seed))[0].ids

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {s: expected_ids([s, 5, 6], 10, seed=s, vocab_size=VOCAB) for s in range(8)}
