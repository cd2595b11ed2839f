"""The canary fires for a bit that flips and for nothing else; the idle engine audits itself."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from engine_harness import VOCAB, Harness, host_gb
from runner_driver import make_runner, prompts

from kernels.quantized_kv import STORED
from replica import watch
from replica.llm import LLM
from replica.stub import expected_ids
from router.wire import Finish, Sampling

GREEDY = Sampling(temperature=0, max_tokens=16)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def reference(prompt: list[int], count: int) -> list[int]:
    return expected_ids(prompt, count, seed=7, vocab_size=VOCAB)


def wait_for(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.005)


def canary(llm: LLM) -> dict[str, int]:
    return llm.engine.info()["watch"]["canary"]


@pytest.mark.parametrize("dtype", ["auto", *STORED])
def test_a_flipped_bit_is_noticed_and_its_page_serves_nobody(dtype: str) -> None:
    runner = make_runner(canary=True, kv_cache_dtype=dtype)
    asked = prompts((130, 70))
    with LLM(runner.config, runner) as llm:
        expected = [output.ids for output in llm.generate(asked, GREEDY)]
        wait_for(lambda: canary(llm)["pages"] == 9 + 5 and canary(llm)["compared"] > 30)
        assert canary(llm)["changed"] == 0
        hashes = [llm.request(prompt, GREEDY).hashes for prompt in asked]
        third, fourth = (llm.engine.pool.lookup(hashes[0][16 * i : 16 * i + 16]) for i in (2, 3))
        runner.kv.flip_bit(third, layer=1, word=9, bit=6)
        wait_for(lambda: canary(llm)["changed"] == 1)
        assert [llm.engine.pool.is_indexed(page) for page in (third, fourth)] == [False, False]
        again = llm.generate(asked, GREEDY)
        assert [output.num_cached for output in again] == [32, 64], "what is built upon it is recomputed, no more"
        assert [output.ids for output in again] == expected
        llm.engine.check_invariants()


def test_readers_of_a_changed_page_end_and_nobody_else() -> None:
    harness = Harness(canary=True, chunk_size=256)
    shared = prompt_of(64)
    victims = [harness.submit([*shared, i], max_tokens=200, seed=7) for i in (1, 2)]
    bystander = harness.submit(prompt_of(70, seed=3), max_tokens=60, seed=7)
    harness.step(30)
    page = int(harness.request(victims[0]).table[1])
    assert page == harness.request(victims[1]).table[1]
    harness.runner._kv[page * 16 + 5] += np.uint64(1)
    harness.finish()
    for i, request_id in enumerate(victims, 1):
        output = harness.outputs[request_id]
        assert (output.finish, output.error) == (Finish.ERROR, "a page of its context changed in memory")
        assert len(output.ids) > 10
        good = reference([*shared, i], 200)
        same = next((n for n, (a, b) in enumerate(zip(output.ids, good, strict=False)) if a != b), len(output.ids))
        assert len(output.ids) - same <= 4, "few tokens leave between the flip and the alarm"
    assert harness.outputs[bystander].ids == reference(prompt_of(70, seed=3), 60)
    assert harness.engine.info()["watch"]["canary"]["changed"] == 1
    fresh = harness.submit([*shared, 1], max_tokens=5, seed=7)
    harness.finish()
    assert harness.outputs[fresh].ids == reference([*shared, 1], 5)


def test_a_changed_page_does_not_move_to_the_host_when_its_readers_end() -> None:
    """With a limited prefix cache, pages that nobody holds any more are evicted at once."""
    harness = Harness(canary=True, prefix_cache_max_pages=2, host_cache_gb=host_gb(30), chunk_size=256)
    prompt = prompt_of(64)
    victim = harness.submit([*prompt, 1], max_tokens=200, seed=7)
    harness.step(10)
    page = int(harness.request(victim).table[3])
    harness.runner._kv[page * 16 + 5] += np.uint64(1)
    harness.finish()
    assert harness.outputs[victim].error == "a page of its context changed in memory"
    again = harness.submit([*prompt, 1], max_tokens=5, seed=7)
    harness.finish()
    assert harness.outputs[again].ids == reference([*prompt, 1], 5)


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
def test_a_cached_page_that_is_not_finite_costs_one_request_and_no_later_one(dtype: str) -> None:
    """Without a canary. Its NaN is cleared, or the page's next owner would inherit it; finite, it would be read on."""
    runner = make_runner(kv_cache_dtype=dtype)
    prompt = prompts((70,))[0]
    with LLM(runner.config, runner) as llm:
        expected = llm.generate([prompt], GREEDY)[0].ids
        hashes = llm.request(prompt, GREEDY).hashes
        page = llm.engine.pool.lookup(hashes[32:48])
        if dtype == "int8":
            runner.kv._scales[0, page] = float("nan")
        else:
            runner.kv.layers[0].k[page] = float("nan")
        failed = llm.generate([prompt], GREEDY)[0]
        assert (failed.ids, failed.error) == ([], "the model gave non-finite logits")
        again = llm.generate([prompt], GREEDY)[0]
        assert (again.num_cached, again.ids) == (32, expected)
        llm.engine.check_invariants()


@pytest.mark.parametrize("late", [False, True])
def test_readers_of_a_page_that_was_cleared_end(late: bool) -> None:
    """``late``: the other reader has been admitted to the step that is already launched when the fault is read."""
    harness = Harness(chunk_size=48, max_num_pages=60)
    shared = prompt_of(64)
    harness.submit([*shared, 0], max_tokens=1, seed=7)
    harness.finish()
    victim = harness.submit([*shared, 1], max_tokens=100, seed=7)
    harness.step(8)
    reader = harness.submit([*shared, 2], max_tokens=100, seed=7)
    bystander = harness.submit(prompt_of(30, seed=3), max_tokens=30, seed=7)
    harness.step(1 if late else 8)
    page, slot = int(harness.request(victim).table[1]), harness.request(victim).slot
    assert page == harness.request(reader).table[1]
    execute = harness.runner._execute

    def clear(batch):
        result = execute(batch)
        result.faults = {index: "not finite" for index, row in enumerate(batch.rows) if row.slot == slot}
        result.spoilt = [page]
        harness.runner._kv[page * 16 : page * 16 + 16] = 0
        harness.runner._execute = execute
        return result

    harness.runner._execute = clear
    harness.finish()
    assert harness.outputs[victim].error == "not finite"
    assert harness.outputs[reader].error == "a page of its context was not finite"
    good = reference([*shared, 2], 100)
    assert harness.outputs[reader].ids == good[: len(harness.outputs[reader].ids)]
    assert harness.outputs[bystander].ids == reference(prompt_of(30, seed=3), 30)
    fresh = harness.submit([*shared, 2], max_tokens=100, seed=7)
    harness.finish()
    assert harness.outputs[fresh].num_cached == 16 and harness.outputs[fresh].ids == good


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_no_false_alarm(async_scheduling: bool) -> None:
    """Under preemption, eviction to the host and back, aborts, and faults that take pages back."""
    rng = random.Random(1)

    def before_step(batch):
        return {0: "bad"} if rng.random() < 0.02 else None

    harness = Harness(
        canary=True, host_cache_gb=host_gb(30), chunk_size=48, max_batch_size=8, max_num_pages=30, max_model_len=400,
        watermark=0.0, async_scheduling=async_scheduling, before_step=before_step,
    )  # fmt: skip
    for i in range(120):
        prompt = prompt_of(rng.choice((20, 60, 100, 300)), seed=rng.randrange(3))
        request_id = harness.submit(prompt, max_tokens=rng.randrange(1, 60), seed=7)
        harness.step(rng.randrange(12), audit=i % 10 == 0)
        if rng.random() < 0.1:
            harness.engine.cancel(harness, request_id)
    harness.finish(audit=False)
    info = harness.engine.info()
    assert info["watch"]["canary"]["compared"] > 1000 and info["watch"]["canary"]["changed"] == 0
    assert info["pages"]["host"]["restored"] > 0 and info["counters"]["preemptions"] > 0
    counts = info["watch"]["canary"]
    assert counts["pages"] + counts["not_yet"] == info["pages"]["indexed"]


def test_the_canary_costs_a_bounded_share_and_is_off_by_default() -> None:
    class Slow:
        cost_s = 0.02

        def wait(self, timeout: float) -> bool:
            return True

        def result(self) -> list[int]:
            return [5]

    class Pool:
        def page_of(self, key: int) -> int:
            return 1

    asked: list[float] = []
    bird = watch.Canary(Harness().engine.events, None)
    bird._runner = type("R", (), {"checksums": lambda self, pages: asked.append(now) or Slow()})()
    bird._fresh[3] = None
    for tick in range(10_000):
        now = tick / 1000
        assert bird.turn(now, Pool()) == []
    assert 20 <= len(asked) <= 25, "20 ms of checksums each 400 ms"
    assert Harness().engine.info()["watch"]["canary"] is None


def test_an_idle_engine_audits_itself_once_and_ends_when_its_books_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "IDLE_S", 0.05)
    monkeypatch.setattr(watch, "AUDIT_EVERY_S", 0.0)
    runner = make_runner()
    with LLM(runner.config, runner) as llm:
        audits = lambda: llm.engine.info()["watch"]["idle_audits"]  # noqa: E731
        time.sleep(0.2)
        assert audits() == 0, "it has done nothing yet"
        llm.generate(prompts((40,)), GREEDY)
        wait_for(lambda: audits() == 1)
        time.sleep(0.3)
        assert audits() == 1, "once until it has worked again"
        llm.generate(prompts((40,)), GREEDY)
        wait_for(lambda: audits() == 2)
        assert llm.engine.health().ok
        llm.engine.pool._refs[3] += 1
        llm.generate(prompts((24,)), GREEDY)
        wait_for(lambda: not llm.engine.health().ok)
        assert "AssertionError" in llm.engine.health().reason
