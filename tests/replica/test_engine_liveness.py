"""Faults end one request or one step, never the engine; and the engine says honestly how it is."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time

import numpy as np
import pytest
from engine_harness import VOCAB, Harness

from cluster import autoscale
from replica import loop, status
from replica.batch import OwnFault
from replica.stub import expected_ids
from router.wire import Code, Finish, Refusal


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


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("where", ["result", "launch"])
def test_a_failed_step_fails_only_its_requests(where: str, async_scheduling: bool) -> None:
    armed: list[bool] = []

    def before_step(batch):
        if armed and armed.pop():
            raise RuntimeError("injected")

    harness = Harness(
        before_step=before_step, async_scheduling=async_scheduling, max_batch_size=4, chunk_size=64, max_prefill_batch=4
    )
    early = [harness.submit(prompt_of(40, seed=i), max_tokens=30, seed=7) for i in range(4)]
    late = [harness.submit(prompt_of(50, seed=i), max_tokens=30, seed=7) for i in range(3)]
    harness.step(8)
    in_step = {r.request_id for r in harness.engine.scheduler.running}
    assert in_step == set(early)
    if where == "result":
        armed.append(True)
    else:
        launch = harness.runner.launch

        def broken(batch):
            harness.runner.launch = launch
            raise RuntimeError("injected")

        harness.runner.launch = broken
    harness.finish()
    for request_id in early:
        output = harness.outputs[request_id]
        assert output.finish == Finish.ERROR and "injected" in output.error
        assert output.ids == reference(prompt_of(40, seed=early.index(request_id)), 30)[: len(output.ids)]
    for i, request_id in enumerate(late):
        assert harness.outputs[request_id].ids == reference(prompt_of(50, seed=i), 30)
    assert harness.engine.info()["counters"]["failed_steps"] == 1
    again = [harness.submit(prompt_of(40, seed=i), max_tokens=30, seed=7) for i in range(4)]
    harness.finish()
    for i, request_id in enumerate(again):
        assert harness.outputs[request_id].ids == reference(prompt_of(40, seed=i), 30), (
            "no page of the failed step is used"
        )


@pytest.mark.parametrize(("kind", "finish"), [(str, Finish.ERROR), (OwnFault, Finish.REFUSED)])
def test_a_faulty_row_ends_one_request_and_its_pages_serve_nobody(kind: type[str], finish: Finish) -> None:
    victim_prompt = prompt_of(200)

    def before_step(batch):
        return {
            i: kind("non-finite logits")
            for i, row in enumerate(batch.rows)
            if row.num_prompt == 200 and row.num_samples and row.start + len(row.token_ids) >= 210
        }

    harness = Harness(before_step=before_step, chunk_size=64)
    victim = harness.submit(victim_prompt, max_tokens=100, seed=7)
    other = harness.submit(prompt_of(90), max_tokens=60, seed=7)
    seen = 0
    while harness.outputs[victim].finish is None:
        harness.step()
        seen = max(seen, len(harness.mirror.keys))
    harness.step(2)
    assert seen >= 200 // 16
    output = harness.outputs[victim]
    assert (output.finish, output.error) == (finish, "non-finite logits")
    assert output.ids == reference(victim_prompt, len(output.ids)) and len(output.ids) >= 9
    hashes = harness.frame(victim_prompt).hashes
    assert not {int.from_bytes(hashes[i : i + 8], "little") for i in range(0, len(hashes), 16)} & harness.mirror.keys
    harness.finish()
    assert harness.outputs[other].ids == reference(prompt_of(90), 60)


def test_a_fault_spares_pages_it_only_used() -> None:
    shared = prompt_of(64)
    harness = Harness(before_step=lambda batch: {0: "bad"} if batch.rows[0].num_prompt == 100 else None)
    good = harness.submit(shared, max_tokens=2, seed=7)
    harness.finish()
    keys = set(harness.mirror.keys)
    bad = harness.submit([*shared, *prompt_of(36, seed=4)], max_tokens=2, seed=7)
    harness.finish()
    assert harness.outputs[good].finish == Finish.LENGTH and harness.outputs[bad].finish == Finish.ERROR
    assert harness.outputs[bad].num_cached == 64 and harness.mirror.keys == keys


def test_an_id_outside_the_vocabulary_ends_its_request() -> None:
    harness = Harness()
    harness.engine._vocab_size = 10
    request_id = harness.submit([1, 2, 3], max_tokens=50, seed=7)
    harness.finish()
    assert harness.outputs[request_id].finish == Finish.ERROR
    assert "outside the vocabulary" in harness.outputs[request_id].error


class EvenIds:
    """Allows even ids only; ``mask`` and ``accept`` fail on demand."""

    def __init__(self, fail_mask_at: int = -1, fail_accept_at: int = -1) -> None:
        self.accepted: list[int] = []
        self.fail_mask_at, self.fail_accept_at = fail_mask_at, fail_accept_at

    def mask(self, num: int, draft: object = ()) -> np.ndarray:
        if len(self.accepted) == self.fail_mask_at:
            raise RuntimeError("mask lost")
        return np.full((num, -(-VOCAB // 32)), 0x55555555, np.int32)

    def accept(self, token_id: int) -> None:
        if len(self.accepted) == self.fail_accept_at or token_id % 2:
            raise RuntimeError("not accepted")
        self.accepted.append(token_id)


def test_grammar_masks_are_applied_and_fail_closed() -> None:
    sources = {"good": EvenIds(), "lost": EvenIds(fail_mask_at=3), "refused": EvenIds(fail_accept_at=2)}
    harness = Harness(masks=lambda grammar: sources[grammar[1]])
    ids = {
        name: harness.submit(prompt_of(20), max_tokens=10, seed=7, grammar=("regex", name)) for name in sources
    }  # fmt: skip
    free = harness.submit(prompt_of(20), max_tokens=10, seed=7)
    harness.finish()
    outputs = {name: harness.outputs[request_id] for name, request_id in ids.items()}
    assert outputs["good"].finish == Finish.LENGTH and outputs["good"].ids == sources["good"].accepted
    assert len(outputs["good"].ids) == 10 and all(token % 2 == 0 for token in outputs["good"].ids)
    assert outputs["lost"].finish == Finish.ERROR and len(outputs["lost"].ids) == 3
    assert outputs["refused"].finish == Finish.ERROR and len(outputs["refused"].ids) == 2
    assert harness.outputs[free].ids == reference(prompt_of(20), 10)
    resumed = EvenIds()
    harness.engine._masks = lambda grammar: resumed
    again = harness.submit(
        prompt_of(20), emitted=outputs["good"].ids[:4], max_tokens=10, seed=7, grammar=("regex", "x")
    )
    harness.finish()
    assert outputs["good"].ids[:4] + harness.outputs[again].ids == outputs["good"].ids == resumed.accepted


def test_logprobs_pass_through() -> None:
    harness = Harness(chunk_size=32)
    execute = harness.runner._execute

    def with_prompt_scores(batch):
        result = execute(batch)
        result.prompt_logprobs = [
            [None] * len(row.token_ids)
            if row.sampling.prompt_logprobs is not None and row.start < row.num_prompt
            else None
            for row in batch.rows
        ]
        return result

    harness.runner._execute = with_prompt_scores
    warm = harness.submit(prompt_of(70), max_tokens=1, seed=7)
    harness.finish()
    plain = harness.submit(prompt_of(70), max_tokens=5, seed=7)
    asked = harness.submit(prompt_of(70), max_tokens=5, seed=7, logprobs=2, prompt_logprobs=0)
    harness.finish()
    assert harness.outputs[plain].logprobs is None and harness.outputs[plain].num_cached == 64
    output = harness.outputs[asked]
    assert [p.token for p in output.logprobs] == [-float(i % 7) for i in output.ids] and len(output.ids) == 5
    assert output.num_cached == 0, "a cached prompt has no log-probabilities"
    assert len(output.prompt_logprobs) == 70 and harness.outputs[warm].prompt_logprobs is None


def heartbeat_gaps() -> list[float]:
    """Seconds between event batches, sorted, while two steps of 700 ms run."""
    harness = Harness(step_ms=700.0)
    times: list[float] = []
    apply = harness.mirror.apply
    harness.engine.outbox.on_events = lambda batch: (times.append(time.monotonic()), apply(batch))
    harness.engine.start()
    try:
        harness.submit(prompt_of(10), max_tokens=2)
        wait_for(harness.engine.idle)
        snapshot = harness.engine.snapshot()
        assert len(harness.engine.replay(snapshot[-1].seq)) >= 1
    finally:
        harness.engine.stop()
    return sorted(b - a for a, b in itertools.pairwise(times))


def test_heartbeats_go_on_while_a_step_is_long() -> None:
    for _ in range(4):  # a busy machine may hold any thread back; a loop that waits for its step does so every time
        gaps = heartbeat_gaps()
        if gaps[len(gaps) // 2] < 0.05 and gaps[-1] < 0.35:
            return
    raise AssertionError(f"an event batch every 50 ms was promised; median {gaps[len(gaps) // 2]}, worst {gaps[-1]}")


def test_health_turns_red_when_the_device_hangs_and_green_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status.HEALTH_FLOOR_S, "cpu", 0.3)
    harness = Harness(step_ms=1.0)
    launch = harness.runner.launch
    hung = []

    def hang(batch):
        step = launch(batch)
        step._ready = float("inf")
        hung.append(step)
        return step

    harness.engine.start()
    try:
        harness.submit(prompt_of(10), max_tokens=5)
        wait_for(harness.engine.idle)
        assert harness.engine.health().ok
        harness.runner.launch = hang
        harness.submit(prompt_of(11), max_tokens=1)
        wait_for(lambda: hung)
        time.sleep(max(0.4, 2.5e-3 * max(harness.engine.step_ms)))
        health = harness.engine.health()
        assert not health.ok and "a step has run" in health.reason
        hung[0]._ready = 0.0
        wait_for(harness.engine.idle)
        assert harness.engine.health().ok
    finally:
        harness.runner.launch = launch
        for step in hung:
            step._ready = 0.0
        harness.engine.stop()


def test_health_turns_red_when_the_loop_itself_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status.HEALTH_FLOOR_S, "cpu", 0.2)
    harness = Harness()
    release = threading.Event()
    harness.engine.start()
    try:
        harness.submit(prompt_of(10), max_tokens=5)
        wait_for(harness.engine.idle)
        launch = harness.runner.launch
        harness.runner.launch = lambda batch: (release.wait(10), launch(batch))[1]
        harness.submit(prompt_of(11), max_tokens=2)
        time.sleep(0.1)
        began = time.monotonic()
        health = harness.engine.health()
        assert not health.ok and "did not answer" in health.reason and time.monotonic() - began < 2
        release.set()
        wait_for(harness.engine.idle)
        assert harness.engine.health().ok
    finally:
        release.set()
        harness.engine.stop()


def test_a_broken_callback_does_not_stop_the_engine() -> None:
    harness = Harness()
    calls: list[int] = []

    def broken(_) -> None:
        calls.append(1)
        raise RuntimeError("a bug in the server")

    harness.engine.outbox.on_deltas = broken
    harness.submit(prompt_of(10), max_tokens=5)
    harness.finish()
    assert len(calls) == 5


def test_a_bug_in_the_loop_ends_all_requests_and_shows() -> None:
    harness = Harness()

    def broken(*_) -> None:
        raise RuntimeError("a bug in the scheduler")

    harness.engine.scheduler._decode = broken
    request_id = harness.submit(prompt_of(10), max_tokens=5)
    harness.engine.start()
    wait_for(lambda: harness.outputs[request_id].finish)
    assert harness.outputs[request_id].finish == Finish.ERROR
    wait_for(lambda: not harness.engine.health().ok)
    assert "a bug in the scheduler" in harness.engine.health().reason
    with pytest.raises(Refusal) as caught:
        harness.submit(prompt_of(10))
    assert caught.value.code == Code.DRAINING
    harness.engine.stop()


def test_a_request_that_is_being_taken_when_the_loop_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    engine = harness.engine
    build = loop.build_request

    def build_late(*args):
        engine._inbox.post(lambda _: 1 / 0, None)
        wait_for(lambda: engine.ended)
        return build(*args)

    engine.start()
    monkeypatch.setattr(loop, "build_request", build_late)
    with pytest.raises(Refusal, match="the engine loop failed") as caught:
        engine.submit(harness, harness.frame([1, 2, 3]))
    assert caught.value.code == Code.DRAINING and engine.idle()
    engine.stop()


def test_drain_finishes_what_was_taken() -> None:
    harness = Harness(step_ms=1.0)
    harness.engine.start()
    try:
        ids = [harness.submit(prompt_of(20, seed=i), max_tokens=20, seed=7) for i in range(5)]
        harness.engine.drain()
        with pytest.raises(Refusal):
            harness.engine.submit(harness, harness.frame(prompt_of(3)))
        wait_for(harness.engine.idle)
        assert all(harness.outputs[r].finish == Finish.LENGTH for r in ids)
    finally:
        harness.engine.stop()
    with pytest.raises(RuntimeError):
        harness.engine.start()


def test_info_is_json_and_counts() -> None:
    import json

    harness = Harness(chunk_size=64)
    for _ in range(2):
        harness.submit(prompt_of(100), max_tokens=10, seed=7)
        harness.finish()
    info = json.loads(json.dumps(harness.engine.info()))
    assert info["counters"]["generated_tokens"] == 20 and info["counters"]["prompt_tokens"] == 104
    assert (info["counters"]["prefix_queries"], info["counters"]["prefix_hits"]) == (200, 96)
    assert info["counters"]["finished_length"] == 2 and info["counters"]["finished_error"] == 0
    assert info["pages"]["free"] + info["pages"]["cached"] + info["pages"]["held"] == info["pages"]["all"]
    assert info["config"]["chunk_size"] == 64 and "max_batch_size" in info["config"]["reasons"]
    assert info["steps"]["count"] == len(harness.batches) and info["steps"]["p99_ms"] >= info["steps"]["p50_ms"]


def test_a_request_counts_once_for_autoscaling_while_it_is_prefilled() -> None:
    harness = Harness(chunk_size=32, max_batch_size=4)
    for seed in range(6):
        harness.submit(prompt_of(100, seed=seed), max_tokens=10)
    harness.step(2)
    info = harness.engine.info()
    assert info["load"]["running"] + info["load"]["waiting"] > 6, "those in the batch without a first token are both"
    assert info["requests"] == 6 and autoscale.load(info, 1.0) == 6 / 4
    assert info["waiting"] == 6 - info["load"]["running"] > 0, "as vLLM counts: those outside the batch"


def test_a_broken_device_shows_in_health() -> None:
    broken = [True]

    def before_step(batch):
        if broken[0]:
            raise RuntimeError("device lost")

    harness = Harness(before_step=before_step, max_batch_size=1)
    harness.engine.start()
    try:
        for seed in range(3):
            request_id = harness.submit(prompt_of(5, seed=seed), max_tokens=3, seed=7)
            wait_for(harness.engine.idle)
            assert harness.outputs[request_id].finish == Finish.ERROR
        assert re.search(r"the last \d steps failed", harness.engine.health().reason)
        broken[0] = False
        request_id = harness.submit(prompt_of(5), max_tokens=3, seed=7)
        wait_for(harness.engine.idle)
        assert harness.outputs[request_id].ids == reference(prompt_of(5), 3) and harness.engine.health().ok
    finally:
        harness.engine.stop()


def test_deadlines_of_finished_requests_are_forgotten() -> None:
    harness = Harness(max_batch_size=16)
    for i in range(300):
        harness.submit([i, i + 1], max_tokens=1, deadline_ms=3_600_000)
        if i % 10 == 9:
            harness.finish(audit=False)
    assert len(harness.engine._deadlines) < 100


def test_a_reservation_is_echoed_before_the_loop_waits_for_a_step() -> None:
    harness = Harness(step_ms=20.0)
    known_at_wait: list[set[str]] = []
    launch = harness.runner.launch

    def spy(batch):
        step = launch(batch)
        wait = step.wait
        step.wait = lambda timeout: (known_at_wait.append(set(harness.mirror.reservations)), wait(timeout))[1]
        return step

    harness.runner.launch = spy
    harness.submit(prompt_of(40), max_tokens=20)
    harness.step(2)
    second = harness.submit(prompt_of(50), max_tokens=20)
    known_at_wait.clear()
    harness.step(1)
    assert second in known_at_wait[0]
    harness.finish()
