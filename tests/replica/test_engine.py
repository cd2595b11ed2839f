"""The three equalities and the ends of requests, on a runner whose output depends on the KV it is shown."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from engine_harness import VOCAB, Harness

from replica.stub import expected_ids
from router.wire import Code, Finish, Refusal

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 511, 513)
_reference: dict[tuple[int, ...], list[int]] = {}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def reference(prompt: list[int], count: int, seed: int = 7) -> list[int]:
    key = (*prompt, -count, -seed)
    if key not in _reference:
        _reference[key] = expected_ids(prompt, count, seed=seed, vocab_size=VOCAB)
    return _reference[key]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [32, 64, None])
def test_output_depends_on_nothing_else(chunk: int | None, prefix_caching: bool, async_scheduling: bool) -> None:
    """Alone, with 15 others, and again on a warm cache: the same ids."""
    harness = Harness(
        chunk_size=chunk or "auto",
        chunked_prefill=chunk is not None,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        max_batch_size=16,
        max_num_pages=500,
    )
    for length in LENGTHS:
        prompt = prompt_of(length)
        alone = harness.submit(prompt, max_tokens=20, seed=7)
        harness.finish(audit=False)
        assert harness.outputs[alone].ids == reference(prompt, 20)
    for round_ in (1, 2):
        ids = {}
        for i in range(16):
            prompt = prompt_of(LENGTHS[i % len(LENGTHS)], seed=(i // len(LENGTHS)) * round_)
            ids[harness.submit(prompt, max_tokens=20, seed=7)] = prompt
        harness.finish(audit=False)
        for request_id, prompt in ids.items():
            output = harness.outputs[request_id]
            assert output.ids == reference(prompt, 20) and output.finish == Finish.LENGTH
            if round_ == 2 and len(prompt) > 16 and prefix_caching and prompt == prompt_of(len(prompt)):
                assert output.num_cached == (len(prompt) - 1) // 16 * 16, "to the page, less one token"
            elif not prefix_caching:
                assert output.num_cached == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [32, 64, None])
@pytest.mark.parametrize("priority", ["low", "high"])
def test_preemption_changes_nothing(chunk, prefix_caching, async_scheduling, priority) -> None:
    harness = Harness(
        chunk_size=chunk or "auto",
        chunked_prefill=chunk is not None,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        prefill_priority=priority,
        max_batch_size=16,
        max_num_pages=48,
        max_model_len=700,
        watermark=0.0,
    )
    progress: dict[str, list[int]] = {}
    steps: set[int] = set()
    preempt = harness.engine.scheduler._preempt

    def note(request) -> None:
        progress.setdefault(request.request_id, []).append(request.num_total)
        steps.add(harness.engine.num_steps)
        preempt(request)

    harness.engine.scheduler._preempt = note
    wanted = {}
    for i in range(16):
        prompt = prompt_of(LENGTHS[i % len(LENGTHS)], seed=i // len(LENGTHS))
        wanted[harness.submit(prompt, max_tokens=90, seed=7)] = prompt
    harness.finish()
    for request_id, prompt in wanted.items():
        assert harness.outputs[request_id].ids == reference(prompt, 90)
    assert harness.engine.info()["counters"]["preemptions"] > 0
    admitting = {batch.step for batch in harness.batches for row in batch.rows if row.new and row.start == 0}
    assert priority == "high" or not steps & admitting, "nothing is admitted in a step that had to preempt"
    for request_id, totals in progress.items():
        assert totals == sorted(set(totals)), f"{request_id} was preempted twice without a token in between"


@pytest.mark.parametrize("options", [
    {"kv_cache_paging": False, "max_num_pages": 181, "max_model_len": 560},
    {"scheduler": "static", "max_batch_size": 4},
    {"max_prefill_batch": 1},
    {"page_size": 32},
    {"page_size": 64},
    {"prefix_cache_max_pages": 10},
])  # fmt: skip
def test_baselines_and_options_give_the_same_ids(options: dict) -> None:
    harness = Harness(chunk_size=64, **options)
    wanted = {harness.submit(prompt_of(n), max_tokens=20, seed=7): n for n in LENGTHS}
    harness.finish()
    for request_id, length in wanted.items():
        assert harness.outputs[request_id].ids == reference(prompt_of(length), 20)
    if options.get("kv_cache_paging") is False:
        assert max(len(batch.rows) for batch in harness.batches) == 5, "180 pages hold five reservations of 35"
        assert not harness.mirror.keys, "nothing is cached"
    if "prefix_cache_max_pages" in options:
        assert harness.engine.pool.counts()["cached"] == 10


def test_static_runs_a_batch_to_its_end() -> None:
    harness = Harness(scheduler="static", max_batch_size=2, async_scheduling=False)
    long, short, third = (harness.submit(prompt_of(8, seed=i), max_tokens=n) for i, n in enumerate((30, 2, 2)))
    while harness.outputs[short].finish is None:
        harness.step()
    for _ in range(10):
        harness.step()
        assert harness.request(third).slot == -1, "a free slot is not refilled before the batch ends"
    harness.finish()
    assert len(harness.outputs[long].ids) == 30 and len(harness.outputs[third].ids) == 2


def test_stop_id_ends_and_its_surplus_token_is_dropped_and_never_hashed() -> None:
    prompt = prompt_of(30)
    ids = reference(prompt, 40)
    stop = next(token for i, token in enumerate(ids) if i >= 20 and token not in ids[:i])
    cut = ids.index(stop) + 1
    for async_scheduling in (True, False):
        harness = Harness(async_scheduling=async_scheduling)
        request_id = harness.submit(prompt, max_tokens=40, seed=7, stop_token_ids=(stop,))
        harness.finish()
        output = harness.outputs[request_id]
        assert (output.ids, output.finish) == (ids[:cut], Finish.STOP)
        assert harness.engine.info()["counters"]["wasted_tokens"] == int(async_scheduling)
        # KV exists for all tokens but the last sampled one.
        assert len(harness.mirror.keys) == (len(prompt) + cut - 1) // 16


def test_min_tokens_holds_a_stop_id_back() -> None:
    prompt = prompt_of(5)
    ids = reference(prompt, 12)
    harness = Harness()
    request_id = harness.submit(prompt, max_tokens=12, seed=7, stop_token_ids=(ids[2],), min_tokens=len(ids))
    harness.finish()
    assert harness.outputs[request_id].ids == ids


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_ends_by_count_are_predicted(async_scheduling: bool) -> None:
    harness = Harness(async_scheduling=async_scheduling, max_model_len=64)
    one = harness.submit(prompt_of(20), max_tokens=1, seed=7)
    full = harness.submit(prompt_of(50, seed=1), max_tokens=500, seed=7)
    harness.finish()
    assert harness.outputs[one].ids == reference(prompt_of(20), 1)
    assert harness.outputs[full].ids == reference(prompt_of(50, seed=1), 14)
    assert harness.outputs[full].finish == Finish.LENGTH
    assert harness.engine.info()["counters"]["wasted_tokens"] == 0
    computed = sum(batch.num_tokens for batch in harness.batches)
    assert computed == 20 + 63, "the last sampled token is never fed back"


@pytest.mark.parametrize("num_emitted", [1, 7, 19, 20])
def test_resumed_stream_goes_on_identically(num_emitted: int) -> None:
    prompt = prompt_of(33)
    ids = reference(prompt, 20)
    harness = Harness()
    request_id = harness.submit(prompt, emitted=ids[:num_emitted], max_tokens=20, seed=7)
    harness.finish()
    output = harness.outputs[request_id]
    assert ids[:num_emitted] + output.ids == ids and output.finish == Finish.LENGTH


def test_salts_never_share_pages() -> None:
    harness = Harness()
    first = harness.submit(prompt_of(100), salt="a", max_tokens=2, seed=7)
    harness.finish()
    other = harness.submit(prompt_of(100), salt="b", max_tokens=2, seed=7)
    harness.finish()
    same = harness.submit(prompt_of(100), salt="a", max_tokens=2, seed=7)
    harness.finish()
    assert [harness.outputs[r].num_cached for r in (first, other, same)] == [0, 0, 96]


def test_a_reservation_names_the_pages_that_will_be_computed() -> None:
    for prefix_caching in (True, False):
        harness = Harness(prefix_caching=prefix_caching)
        keys = []
        for length in (40, 100):
            frame = harness.frame(prompt_of(100)[:length], max_tokens=1)
            keys = [frame.hashes[i : i + 8] for i in range(0, len(frame.hashes), 16)]
            request_id = harness.submit(prompt_of(100)[:length], max_tokens=1)
            harness.step(2)
            accepted = dict(pair for batch in harness.mirror.batches for pair in batch.accepted)[request_id]
            found = 2 if length == 100 else 0
            assert accepted == (b"".join(keys[found:]) if prefix_caching else b"")
            harness.finish()
            assert request_id in [ended for batch in harness.mirror.batches for ended in batch.ended]


@pytest.mark.parametrize("length, first_out", [(200, False), (1000, True)])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_first_token_does_not_wait_for_the_pages_of_a_long_prompt(
    length: int, first_out: bool, max_tokens: int
) -> None:
    """It is out before they are published; the event that ends the reservation comes with theirs."""
    harness = Harness(chunk_size=1024, async_scheduling=False)
    said: list[object] = []
    box = harness.engine.outbox
    deltas, events = box.on_deltas, box.on_events
    box.on_deltas = lambda new: said.append("tokens") or deltas(new)  # type: ignore[func-returns-value]
    box.on_events = lambda batch: said.append((len(batch.stored), batch.ended)) or events(batch)  # type: ignore[func-returns-value]
    box.on_said = lambda: said.append("out")
    prompt = prompt_of(length)
    request = harness.submit(prompt, max_tokens=max_tokens, seed=7)
    while "tokens" not in said:
        harness.step()
    once = ["out"] if first_out else []
    assert said[said.index("tokens") :] == ["tokens", *once, (1, [request]), "out"]
    harness.finish()
    assert harness.outputs[request].ids == reference(prompt, max_tokens)


def test_refusals() -> None:
    harness = Harness(max_model_len=100, max_waiting=3, max_batch_size=1)
    engine = harness.engine

    def refused(code: Code, param: str | None, frame) -> str:
        with pytest.raises(Refusal) as caught:
            engine.submit(harness, frame)
        assert (caught.value.code, caught.value.param) == (code, param)
        return caught.value.message

    assert "99" not in refused(Code.INVALID, "prompt", harness.frame(prompt_of(100)))
    assert str(VOCAB) in refused(Code.INVALID, "prompt", harness.frame([1, VOCAB]))
    good = harness.frame(prompt_of(40))
    for bad in (
        {"hashes": good.hashes[:-16]},
        {"hashes": good.hashes + bytes(16)},
        {"root": b"short"},
        {"deadline_ms": 0},
        {"tokens": b"", "hashes": b"", "num_prompt": 0},
        {"num_prompt": 41},
    ):
        fields = {**good.__dict__, **bad}
        with pytest.raises(Refusal) as caught:
            engine.submit(harness, type(good)(**fields))
        assert caught.value.code == Code.INVALID
    for name, value in {
        "max_tokens": 0, "temperature": float("nan"), "top_p": 1.5, "top_k": -1, "min_p": 2.0, "min_tokens": -1,
        "seed": -1, "repetition_penalty": 0.0, "logprobs": -1, "stop_token_ids": (VOCAB,),
        "logit_bias": ((VOCAB, 1.0),), "bad_words": ((1, VOCAB),), "allowed_token_ids": (-1,),
        "grammar": ("regex", "a"),
    }.items():  # fmt: skip
        message = refused(Code.INVALID, name, harness.frame([1, 2], **{name: value}))
        assert name in message
    for name, value in {"seed": 1 << 64, "top_k": 1 << 31}.items():  # more than the arrays of a step hold
        assert str(value - 1) in refused(Code.INVALID, name, harness.frame([1, 2], **{name: value}))
    for _ in range(3):
        harness.submit(prompt_of(20), max_tokens=3)
    with pytest.raises(Refusal) as caught:
        engine.submit(harness, harness.frame(prompt_of(20)))
    assert caught.value.code == Code.OVERLOADED and caught.value.retry_after_s >= 1
    running = next(iter(harness.outputs))
    refused(Code.OVERLOADED, None, harness.frame(prompt_of(20), request_id=running))
    harness.step(2)
    refused(Code.INVALID, "request_id", harness.frame(prompt_of(20), request_id=running))
    engine.drain()
    refused(Code.DRAINING, None, harness.frame(prompt_of(20)))
    harness.finish()
    assert engine.idle()


def test_deadline_ends_a_request_waiting_or_running() -> None:
    harness = Harness(max_batch_size=1, step_ms=5.0)
    running = harness.submit(prompt_of(20), max_tokens=1000, deadline_ms=500, seed=7)
    waiting = harness.submit(prompt_of(30), max_tokens=1000, deadline_ms=40)
    harness.finish(audit=False)
    assert harness.outputs[running].finish == harness.outputs[waiting].finish == Finish.DEADLINE
    assert harness.outputs[waiting].ids == []
    ids = harness.outputs[running].ids
    assert 2 <= len(ids) <= 105 and ids == reference(prompt_of(20), len(ids))


def test_cancel_is_idempotent_and_frees_everything() -> None:
    harness = Harness()
    request_id = harness.submit(prompt_of(40), max_tokens=1000)
    harness.step(5)
    for _ in range(3):
        harness.engine.cancel(harness, request_id)
    harness.engine.cancel(harness, "unknown")
    harness.engine.cancel(object(), request_id)
    harness.finish()
    assert harness.outputs[request_id].finish == Finish.ABORT


def test_500_requests_aborted_at_random_moments() -> None:
    rng = random.Random(5)
    harness = Harness(max_num_pages=120, max_batch_size=16, chunk_size=64, max_waiting=600, max_model_len=400)
    open_ids: list[str] = []
    submitted = 0
    while submitted < 500 or open_ids:
        for _ in range(rng.randrange(4)):
            if submitted < 500:
                submitted += 1
                prompt = prompt_of(rng.choice(LENGTHS[:-2]) + rng.randrange(150), seed=rng.randrange(3))
                open_ids.append(harness.submit(prompt, max_tokens=rng.randrange(1, 60), seed=7))
        harness.step(rng.randrange(3))
        open_ids = [r for r in open_ids if harness.outputs[r].finish is None]
        if open_ids and (rng.random() < 0.5 or submitted == 500):
            victim = open_ids.pop(rng.randrange(len(open_ids)))
            harness.engine.cancel(harness, victim)
    harness.finish()
    finishes = [output.finish for output in harness.outputs.values()]
    assert finishes.count(Finish.ABORT) > 250 and Finish.LENGTH in finishes
    for request_id, output in harness.outputs.items():
        assert output.finish is not None, request_id


def test_step_views_are_never_rewritten() -> None:
    """The runner may read a batch late: what was launched must not change under it."""
    harness = Harness(max_num_pages=40, max_model_len=300, watermark=0.0)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    launch = harness.runner.launch

    def spy(batch):
        seen.extend((view, view.copy()) for row in batch.rows for view in (row.token_ids, row.pages))
        return launch(batch)

    harness.runner.launch = spy
    for i in range(8):
        harness.submit(prompt_of(20, seed=i), max_tokens=250)
    harness.finish(audit=False)
    assert harness.engine.info()["counters"]["preemptions"] > 0
    assert all((view == copy).all() for view, copy in seen)


def test_threads_submit_and_cancel_while_the_engine_runs() -> None:
    harness = Harness(step_ms=0.2)
    harness.engine.start()
    try:
        ids = [harness.submit(prompt_of(33, seed=i), max_tokens=30, seed=7) for i in range(40)]
        harness.engine.cancel(harness, ids[3])
        harness.engine.check_invariants()
        assert harness.engine.health().ok
        deadline = time.monotonic() + 20
        while not harness.engine.idle() and time.monotonic() < deadline:
            time.sleep(0.01)
        harness.engine.check_invariants()
        for i, request_id in enumerate(ids):
            if i != 3:
                assert harness.outputs[request_id].ids == reference(prompt_of(33, seed=i), 30)
    finally:
        harness.engine.stop()
        harness.engine.stop()
    assert not harness.engine.health().ok


def test_a_request_that_is_being_taken_may_be_audited_and_cancelled() -> None:
    """By other threads, between its place among the live and its way to the scheduler."""
    harness = Harness()
    engine, post = harness.engine, harness.engine._inbox.post
    problems: list[AssertionError] = []
    threads: list[threading.Thread] = []

    def audit() -> None:
        try:
            engine.check_invariants()
        except AssertionError as error:
            problems.append(error)

    def post_late(function, argument) -> None:
        if function == engine._enqueue:
            cancel = threading.Thread(target=engine.cancel, args=(harness, "r1"))
            threads.extend((threading.Thread(target=audit), cancel))
            for thread in threads:
                thread.start()
                thread.join(0.1)
        post(function, argument)

    engine._inbox.post = post_late  # type: ignore[method-assign]
    request_id = harness.submit(prompt_of(33), max_tokens=30, seed=7)
    for thread in threads:
        thread.join()
    harness.finish()
    assert not problems
    assert harness.outputs[request_id].finish == Finish.ABORT
