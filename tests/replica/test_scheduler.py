"""What the scheduler promises about order, sharing and room; every step audited."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from drafters import StubOracle, at_no_price
from engine_harness import VOCAB, Harness

from replica.stub import expected_ids
from router.wire import Finish


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def run_until(harness: Harness, done, limit: int = 3000) -> int:
    """Steps until ``done()``; returns how many engine steps that took."""
    before = harness.engine.num_steps
    for _ in range(limit):
        if done():
            return harness.engine.num_steps - before
        harness.step()
    raise AssertionError("it never came")


def first_token(harness: Harness, request_id: str):
    return lambda: bool(harness.outputs[request_id].ids)


# --- single flight


def test_a_shared_prefix_is_computed_once() -> None:
    harness = Harness(chunk_size=64, max_batch_size=16)
    shared = prompt_of(320)
    ids = [harness.submit([*shared, i, i + 1], max_tokens=4, seed=7) for i in range(10)]
    harness.finish()
    assert harness.runner.num_computed == 322 + 9 * 2 + 10 * 3
    for i, request_id in enumerate(ids):
        assert harness.outputs[request_id].num_cached == (320 if i else 0)
        assert harness.outputs[request_id].ids == expected_ids([*shared, i, i + 1], 4, seed=7, vocab_size=VOCAB)


def test_waiting_for_a_page_does_not_block_others() -> None:
    harness = Harness(chunk_size=32, long_prefill_tokens=16)
    harness.submit(prompt_of(320), max_tokens=1)
    twin = harness.submit(prompt_of(320), max_tokens=1)
    harness.step(2)
    other = harness.submit(prompt_of(10, seed=3), max_tokens=1)
    assert run_until(harness, first_token(harness, other)) <= 3
    assert not harness.outputs[twin].ids and harness.request(twin).slot == -1
    harness.finish()
    assert harness.outputs[twin].num_cached == 304


@pytest.mark.parametrize("fate", ["cancel", "fault", "step", "deadline", "preempt"])
def test_whoever_waits_takes_over_when_the_computing_request_goes(fate: str) -> None:
    trouble: list[str] = []

    def before_step(batch):
        kind = trouble.pop() if trouble else None
        if kind == "step":
            raise RuntimeError("injected")
        return {0: "injected"} if kind == "fault" else None

    harness = Harness(chunk_size=32, before_step=before_step)
    first = harness.submit(prompt_of(320), max_tokens=2, seed=7, deadline_ms=60_000)
    twin = harness.submit(prompt_of(320), max_tokens=2, seed=7)
    harness.step(4)
    assert harness.request(twin).slot == -1 and harness.request(first).slot >= 0
    if fate == "cancel":
        harness.engine.cancel(harness, first)
    elif fate in ("fault", "step"):
        trouble.append(fate)
    elif fate == "deadline":
        harness.engine._expire(time.monotonic() + 61)
    elif fate == "preempt":
        harness.engine.scheduler._preempt(harness.request(first))
    harness.finish()
    ended = {"cancel": Finish.ABORT, "fault": Finish.ERROR, "step": Finish.ERROR, "deadline": Finish.DEADLINE}
    assert harness.outputs[first].finish == ended.get(fate, Finish.LENGTH)
    assert harness.outputs[twin].finish == Finish.LENGTH
    assert harness.outputs[twin].ids == expected_ids(prompt_of(320), 2, seed=7, vocab_size=VOCAB)


@pytest.mark.parametrize("busy", [None, 256])
def test_those_who_waited_for_a_long_prefix_start_together(busy: int | None) -> None:
    """What is left of them is short, whatever it was when they were queued."""
    harness = Harness(
        chunk_size=2048, busy_chunk_size=busy, max_batch_size=32, max_num_pages=900, async_scheduling=False
    )
    for i in range(8):
        harness.submit([*prompt_of(1500), i], max_tokens=4)
    harness.finish()
    assert [[len(row.token_ids) for row in batch.rows] for batch in harness.batches[:2]] == [[1501], [1] + [13] * 7]


# --- order


def test_low_protects_decode_and_high_favours_prefill() -> None:
    gaps = {}
    for priority in ("low", "high"):
        harness = Harness(chunk_size=16, max_batch_size=8, prefill_priority=priority, async_scheduling=False)
        decoding = harness.submit(prompt_of(8), max_tokens=60)
        run_until(harness, first_token(harness, decoding))
        slot = harness.request(decoding).slot
        harness.submit(prompt_of(200, seed=1), max_tokens=2)
        start = harness.engine.num_steps
        harness.finish()
        steps = [step for step, _, _ in harness.starts()[slot] if step >= start - 1][:60]
        gaps[priority] = max(b - a for a, b in itertools.pairwise(steps))
    assert gaps["low"] == 1, "a decoding stream is served in every step"
    assert gaps["high"] > 10, "prefill goes first and takes the whole budget"


def test_where_prefill_goes_first_streams_go_on_under_endless_arrivals() -> None:
    """Each prompt takes a step and ends with its first token, so prefill never leaves anything."""
    harness = Harness(chunk_size=64, max_batch_size=8, prefill_priority="high", ageing_s=1.0)
    now = time.monotonic()
    harness.engine._clock = lambda: now
    decoding = harness.submit(prompt_of(20), max_tokens=6, seed=7)
    run_until(harness, first_token(harness, decoding))
    prompts = (harness.submit(prompt_of(64, seed), max_tokens=1) for seed in itertools.count(1))
    steps = 0
    while harness.outputs[decoding].finish is None:
        while harness.engine.num_waiting < 4:
            next(prompts)
        harness.step()
        now, steps = now + 0.1, steps + 1
        assert steps < 100, f"{len(harness.outputs[decoding].ids)} tokens in {steps} steps"
    assert steps > 40, "prefill still goes first"
    harness.finish()


def test_max_prefill_batch() -> None:
    harness = Harness(chunk_size=256, max_batch_size=16, max_prefill_batch=3)
    for i in range(12):
        harness.submit(prompt_of(20, seed=i), max_tokens=3)
    harness.finish()
    most = max(sum(len(row.token_ids) > 1 for row in batch.rows) for batch in harness.batches)
    assert most == 3


def test_token_budget_is_never_exceeded() -> None:
    harness = Harness(chunk_size=40, max_batch_size=32)
    for i in range(30):
        harness.submit(prompt_of(10 + 7 * i, seed=i), max_tokens=20)
    harness.finish()
    assert max(batch.num_tokens for batch in harness.batches) == 40


def test_without_chunking_a_prompt_is_never_cut() -> None:
    harness = Harness(chunked_prefill=False, max_model_len=600, max_batch_size=8)
    for i in range(6):
        harness.submit(prompt_of(300 + i, seed=i), max_tokens=5)
    harness.finish()
    assert sorted(len(row.token_ids) for b in harness.batches for row in b.rows if row.new) == [
        300 + i for i in range(6)
    ]


def test_priority_runs_first_and_ageing_bounds_how_long_it_overtakes() -> None:
    harness = Harness(max_batch_size=1, ageing_s=5.0, async_scheduling=False)
    blocker = harness.submit(prompt_of(8), max_tokens=50)
    harness.step(2)
    low = harness.submit(prompt_of(9), max_tokens=1, priority=1)
    high = harness.submit(prompt_of(10), max_tokens=1, priority=0)
    urgent = harness.submit(prompt_of(11), max_tokens=1, priority=-1)
    harness.step()
    order = [r.request_id for r in harness.engine.scheduler.waiting]
    assert order == [urgent, high, low]
    # One that came a level's worth of seconds earlier is not overtaken by the next level.
    scheduler = harness.engine.scheduler
    aged = harness.request(low)
    scheduler.remove(aged)
    aged.arrival -= 5.5
    scheduler.add(aged)
    assert [r.request_id for r in scheduler.waiting] == [urgent, low, high]
    harness.engine.cancel(harness, blocker)
    harness.finish()


def test_short_prompts_slip_in_beside_a_long_one() -> None:
    harness = Harness(chunk_size=256, max_batch_size=16, max_num_pages=1200)
    streams = [harness.submit(prompt_of(10, seed=50 + i), max_tokens=200) for i in range(2)]
    run_until(harness, lambda: all(harness.outputs[s].ids for s in streams))
    long = harness.submit(prompt_of(4000), max_tokens=2)
    harness.step(3)
    later_long = harness.submit(prompt_of(1500, seed=1), max_tokens=2)
    harness.step(3)
    told = [len(harness.outputs[s].ids) for s in streams]
    shorts = [harness.submit(prompt_of(20, seed=i), max_tokens=2) for i in range(10)]
    steps = run_until(harness, lambda: all(harness.outputs[s].ids for s in shorts))
    assert steps <= 5 + 1, "each starts within five steps; one more to read the last back"
    assert not harness.outputs[long].ids and not harness.outputs[later_long].ids
    got = [len(harness.outputs[s].ids) - before for s, before in zip(streams, told, strict=True)]
    assert min(got) >= steps - 1, "who decodes gets a token in every step meanwhile"
    harness.finish()


@pytest.mark.parametrize("busy", [None, 24])
def test_a_long_prompt_finishes_under_endless_short_arrivals(busy: int | None) -> None:
    """It gets half of each step, or, where steps may be long, every other one to itself."""
    harness = Harness(
        chunk_size=64, busy_chunk_size=busy, long_prefill_tokens=32, max_batch_size=8, max_num_pages=300,
        async_scheduling=False,
    )  # fmt: skip
    count = 0

    def flood() -> None:
        nonlocal count
        while len(harness.engine.scheduler.waiting) < 6:
            count += 1
            harness.submit(prompt_of(20, seed=count), max_tokens=2)
            harness.engine._inbox.run()

    flood()
    long = harness.submit(prompt_of(640), max_tokens=1)
    begun = None
    for _ in range(400):
        flood()
        harness.step()
        if harness.outputs[long].ids:
            break
        if begun is None and harness.request(long).slot >= 0:
            begun = harness.engine.num_steps
    assert harness.outputs[long].ids and count > 20
    assert harness.engine.num_steps - begun <= 640 // 32 + 3


def test_where_steps_are_long_short_and_long_prompts_take_turns() -> None:
    """Nobody's first token waits for a longer prompt in the same step, and no long prompt waits for two steps."""
    harness = Harness(
        chunk_size=256, busy_chunk_size=64, long_prefill_tokens=32, max_batch_size=16, max_num_pages=300,
        async_scheduling=False,
    )  # fmt: skip
    for i in range(2):
        harness.submit(prompt_of(300 + i, seed=i), max_tokens=1)
    for i in range(5):
        harness.submit(prompt_of(20, seed=10 + i), max_tokens=8)
    harness.step(2)
    harness.submit(prompt_of(20, seed=20), max_tokens=1)
    harness.finish()
    prefills = [
        [(row.start, len(row.token_ids)) for row in batch.rows if row.start == 0 or len(row.token_ids) > 1]
        for batch in harness.batches[:6]
    ]
    assert prefills == [
        [(0, 20)] * 5,
        [(0, 256 - 5)],
        [(0, 20)],
        [(251, 49)],
        [(0, 256 - 5)],
        [(251, 50)],
    ]


@pytest.mark.parametrize("priority", ["low", "high"])
@pytest.mark.parametrize("seed", range(4))
def test_what_shares_a_long_step(priority: str, seed: int) -> None:
    """A step longer than usual holds short prompts or one long one, and all end as they should."""
    rng = random.Random(seed)
    harness = Harness(
        chunk_size=128, busy_chunk_size=32, long_prefill_tokens=24, max_batch_size=24, max_num_pages=900,
        prefill_priority=priority, async_scheduling=bool(seed % 2), max_model_len=1024,
    )  # fmt: skip
    budgets: list[int] = []
    scheduler = harness.engine.scheduler
    open_turn = scheduler._open_turn
    scheduler._open_turn = lambda *running: (turn := open_turn(*running), budgets.append(turn.budget))[0]  # type: ignore
    long_steps, schedule = [], scheduler.schedule

    def observe(step: int, now: float):
        plan = schedule(step, now)
        if plan is not None and budgets[-1] > 32:
            long_steps.append(plan.batch)
        return plan

    scheduler.schedule = observe  # type: ignore[method-assign]
    asked = {}
    for number in range(60):
        length = rng.choice([3, 20, 24, 25, 40, 130, 300, 700])
        prompt, count = prompt_of(length, seed=rng.choice([1, 100 + number])), rng.randrange(1, 30)
        asked[harness.submit(prompt, max_tokens=count, temperature=0)] = (prompt, count)
        harness.step(rng.randrange(4))
    harness.finish()
    held = [[row.num_prompt - row.start for row in batch.rows if row.start < row.num_prompt] for batch in long_steps]
    for prefills in held:  # what was left of each prompt, as none is preempted
        assert len(prefills) == 1 or all(remaining <= 24 for remaining in prefills), prefills
    assert sum(map(bool, held)) > 20 and any(len(prefills) > 1 for prefills in held)
    assert max(batch.num_tokens for batch in harness.batches) <= 128 and scheduler.num_preemptions == 0
    for name, (prompt, count) in asked.items():
        assert harness.outputs[name].ids == expected_ids(prompt, count, seed=0, vocab_size=VOCAB)


def test_a_long_prompt_is_not_overtaken_for_every_slot() -> None:
    """Short ones take all six slots at once and give them back at once; the last of them is cut by the step's end."""
    harness = Harness(
        chunk_size=128, busy_chunk_size=16, long_prefill_tokens=24, max_batch_size=6, max_model_len=350,
        prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    seeds = itertools.count()

    def flood() -> None:
        for count in (4, 4, 4, 4, 4, 3):
            harness.submit(prompt_of(24, seed=next(seeds)), max_tokens=count)

    flood()
    harness.step()
    long = harness.submit(prompt_of(200, seed=next(seeds)), max_tokens=1)
    for _ in range(40):
        if len(harness.engine.scheduler.waiting) < 7:
            flood()
        harness.step()
    assert harness.outputs[long].ids


def test_a_long_prompt_lets_only_one_step_pass_for_those_that_seemed_short() -> None:
    """Their pages were there when they were queued and are gone when they are admitted, so they are long themselves."""
    harness = Harness(
        chunk_size=128, busy_chunk_size=16, long_prefill_tokens=24, max_batch_size=8, async_scheduling=False
    )
    others = [prompt_of(200, seed=i) for i in range(1, 4)]
    for prompt in others:
        harness.submit(prompt, max_tokens=1)
    harness.finish()
    first = harness.submit(prompt_of(600), max_tokens=1)
    harness.step()
    late = [harness.submit([*prompt, 1], max_tokens=1) for prompt in others]
    harness.engine._inbox.run()
    for name in late:
        assert harness.request(name).uncached_estimate == 9
        harness.engine.scheduler.retract(harness.request(name))
    slot = harness.request(first).slot
    begun = harness.engine.num_steps
    run_until(harness, first_token(harness, first))
    steps = [begun - 1, *(step for step, _, _ in harness.starts()[slot] if step >= begun)]
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 2, "every other step is its own"
    harness.finish()


def test_those_who_aged_with_room_fill_steps_as_others_do() -> None:
    steps = {}
    for aged in (False, True):
        harness = Harness(
            chunk_size=4096, busy_chunk_size=64, max_num_pages=2400, max_batch_size=32, async_scheduling=False
        )
        for i in range(8):
            for length in (100, 2000):
                name = harness.submit(prompt_of(length, seed=2 * i + length), max_tokens=1)
                harness.engine._inbox.run()
                harness.request(name).arrival -= 10 * aged
        harness.finish()
        steps[aged] = len(harness.batches)
    assert steps[True] == steps[False] == 9, "all short ones at once, then the long ones"


def test_what_no_short_prompt_needs_goes_to_the_long_one() -> None:
    harness = Harness(chunk_size=64, long_prefill_tokens=16)
    harness.submit(prompt_of(640), max_tokens=1)
    harness.step(1)
    harness.submit(prompt_of(5, seed=2), max_tokens=1)
    harness.finish()
    assert sum(batch.num_tokens == 64 for batch in harness.batches) == 10


@pytest.mark.parametrize("steps", [{}, {"chunk_size": 512, "busy_chunk_size": 64, "long_prefill_tokens": 64}])
def test_a_request_without_room_is_overtaken_until_it_has_aged(steps: dict[str, int]) -> None:
    for aged in (False, True):
        harness = Harness(
            max_num_pages=41, max_batch_size=8, max_model_len=640, watermark=0.0, async_scheduling=False, **steps
        )
        holder = harness.submit(prompt_of(300), max_tokens=60)
        harness.step(2)
        big = harness.submit(prompt_of(500, seed=1), max_tokens=1)
        harness.step()
        if aged:
            harness.request(big).arrival -= 10
        small = harness.submit(prompt_of(20, seed=2), max_tokens=1)
        harness.step(5)
        assert bool(harness.outputs[small].ids) is not aged
        assert harness.request(big).slot == -1 and not harness.outputs[holder].finish
        harness.finish()
        assert harness.outputs[big].ids and harness.outputs[small].ids


def test_watermark_keeps_room_for_growth() -> None:
    preemptions = {}
    for watermark in (0.0, 0.2):
        harness = Harness(max_num_pages=101, watermark=watermark, max_batch_size=16, chunk_size=400)
        for i in range(10):
            harness.submit(prompt_of(156, seed=i), max_tokens=30)
        harness.finish()
        preemptions[watermark] = harness.engine.scheduler.num_preemptions
    assert preemptions[0.0] > 0 and preemptions[0.2] == 0


def test_headroom_for_those_who_run_is_kept_without_a_watermark() -> None:
    """Eight streams at the end of their pages: a prompt that fits exactly must not take what they need next."""
    harness = Harness(max_num_pages=25, watermark=0.0, max_batch_size=16, max_model_len=384, chunk_size=64)
    for i in range(8):
        harness.submit(prompt_of(16, seed=i), max_tokens=15)
    harness.step(4)
    assert harness.engine.pool.num_held == 16
    harness.submit(prompt_of(120), max_tokens=1)
    harness.step(2)
    assert len(harness.engine.scheduler.waiting) == 1 and harness.engine.pool.num_available == 8
    harness.finish()
    assert harness.engine.scheduler.num_preemptions == 0


def test_victims_keep_their_place() -> None:
    harness = Harness(max_num_pages=33, max_batch_size=8, watermark=0.0, max_model_len=500, prefix_caching=False)
    ids = [harness.submit(prompt_of(100, seed=i), max_tokens=150, seed=7) for i in range(6)]
    finished: list[str] = []
    while not harness.engine.idle():
        harness.step()
        finished += [r for r in ids if harness.outputs[r].finish and r not in finished]
    assert harness.engine.scheduler.num_preemptions > 0
    assert finished[0] == ids[0] and finished.index(ids[1]) <= 2, "those in front are not the victims"


def test_a_pool_that_holds_one_request_serves_all_in_turn() -> None:
    """No deadlock and no livelock at the smallest pool that max_model_len allows."""
    harness = Harness(max_num_pages=9, max_model_len=128, max_batch_size=8, watermark=0.0)
    wanted = {harness.submit(prompt_of(40 + i, seed=i), max_tokens=80, seed=7): 40 + i for i in range(6)}
    harness.finish()
    for i, (request_id, length) in enumerate(wanted.items()):
        ids = expected_ids(prompt_of(length, seed=i), 80, seed=7, vocab_size=VOCAB)
        assert harness.outputs[request_id].ids == ids
    tokens = sum(len(output.ids) for output in harness.outputs.values())
    assert 0 < harness.engine.scheduler.num_preemptions <= tokens


@pytest.mark.parametrize("priority", ["low", "high"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("chunk", "busy"), [(8, None), (512, 8)])
def test_the_only_one_left_may_give_itself_up(priority: str, ahead: bool, chunk: int, busy: int | None) -> None:
    """Who computes copies of pages that a twin indexed first pins the twin's as well. When both fill the pool it is its
    own victim, alone, and must be admitted again at once; the loop took that for a deadlock and stopped."""
    harness = Harness(
        max_num_pages=12, max_model_len=170, max_batch_size=6, chunk_size=chunk, busy_chunk_size=busy,
        watermark=0.0, prefill_priority=priority, async_scheduling=ahead,
    )  # fmt: skip
    twins = [harness.submit(prompt_of(150), max_tokens=16, seed=7) for _ in range(2)]
    harness.finish()
    for twin in twins:
        assert harness.outputs[twin].ids == expected_ids(prompt_of(150), 16, seed=7, vocab_size=VOCAB)
    assert ahead or harness.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("priority", ["low", "high"])
def test_who_gave_itself_up_and_starts_again_at_once_has_no_guesses_left(priority: str) -> None:
    """Three pages of copies and ten of its own fill the pool; most of it must be computed again, in the same step."""
    harness = Harness(
        max_num_pages=14, max_model_len=170, max_batch_size=6, chunk_size=32, watermark=0.0, prefill_priority=priority,
        prefix_cache_max_pages=3, async_scheduling=False, speculative="ngram",
    )  # fmt: skip
    harness.engine.speculation.drafter = StubOracle(0, VOCAB, 1000)
    at_no_price(harness.engine)
    harness.submit(prompt_of(160)[:49], max_tokens=1)
    harness.finish()
    alone = harness.submit(prompt_of(160), max_tokens=10, temperature=0, prompt_logprobs=0)
    harness.finish()
    assert harness.engine.scheduler.num_preemptions == 1
    assert harness.outputs[alone].ids == expected_ids(prompt_of(160), 10, seed=0, vocab_size=VOCAB)


def test_high_priority_mode_with_a_tiny_pool_comes_to_rest() -> None:
    harness = Harness(max_num_pages=13, max_model_len=190, max_batch_size=8, prefill_priority="high", chunk_size=16)
    wanted = {harness.submit(prompt_of(30 + i, seed=i), max_tokens=60, seed=7): 30 + i for i in range(12)}
    harness.finish()
    for i, (request_id, length) in enumerate(wanted.items()):
        ids = expected_ids(prompt_of(length, seed=i), 60, seed=7, vocab_size=VOCAB)
        assert harness.outputs[request_id].ids == ids


def test_a_prompt_that_is_being_recomputed_is_no_victim() -> None:
    """Seven streams grow while an eighth prompt gets a token a step: what headroom can't cover, its elders pay."""
    harness = Harness(chunk_size=8, max_batch_size=8, max_num_pages=61, max_model_len=300, watermark=0.0)
    victims: list[str] = []
    preempt = harness.engine.scheduler._preempt

    def note(request) -> None:
        assert request.is_decoding, "a victim must have sampled since it was admitted"
        victims.append(request.request_id)
        preempt(request)

    harness.engine.scheduler._preempt = note
    elders = [harness.submit(prompt_of(8, seed=i), max_tokens=200, seed=7) for i in range(7)]
    run_until(harness, lambda: all(len(harness.outputs[r].ids) >= 10 for r in elders))
    prompt = harness.submit(prompt_of(240), max_tokens=2, seed=7)
    harness.finish()
    assert victims and prompt not in victims
    assert harness.outputs[prompt].ids == expected_ids(prompt_of(240), 2, seed=7, vocab_size=VOCAB)


def test_a_victim_whose_last_token_is_still_on_the_device_waits_for_it() -> None:
    """The elder has nothing left to compute and the younger gives way to it, while the step of both is running."""
    harness = Harness(max_num_pages=6, max_model_len=80, watermark=0.0, step_ms=40.0)
    elder = harness.submit(prompt_of(31), max_tokens=3, seed=7)
    younger = harness.submit(prompt_of(30), max_tokens=20, seed=7)
    harness.finish()
    assert harness.engine.scheduler.num_preemptions == 1
    assert harness.outputs[elder].ids == expected_ids(prompt_of(31), 3, seed=7, vocab_size=VOCAB)
    assert harness.outputs[younger].ids == expected_ids(prompt_of(30), 20, seed=7, vocab_size=VOCAB)


def test_nobody_is_admitted_in_a_step_that_had_to_preempt() -> None:
    harness = Harness(max_num_pages=13, max_model_len=190, max_batch_size=2, watermark=0.0)
    for seed in range(2):
        harness.submit(prompt_of(80, seed=seed), max_tokens=60)
    small = harness.submit(prompt_of(10), max_tokens=1)
    run_until(harness, lambda: harness.engine.scheduler.num_preemptions)
    assert len(harness.engine.scheduler.running) == 1 and harness.request(small).slot == -1
    assert harness.engine.pool.num_available >= 5, "it would have fitted"
    harness.finish()


def test_a_static_batch_does_not_leave_twins_out() -> None:
    harness = Harness(scheduler="static", max_batch_size=4)
    for i in range(4):
        harness.submit([*prompt_of(100), i], max_tokens=20)
    harness.step(2)
    assert len(harness.engine.scheduler.running) == 4
    harness.finish()
