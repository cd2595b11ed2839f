"""A step is as long as itl_target_ms lets it be, by the step times fitted so far."""

from __future__ import annotations

import random

import pytest

from replica.step_budget import QUIET, SIZES, StepBudget
from replica.step_time import StepShape, StepTimeModel
from tests.replica.engine_harness import Harness, make_config

TRUTH = (0.018, 2e-6, 3.0, 4e-5, 0.02)


def fitted(truth: tuple[float, float, float, float, float] = TRUTH, seed: int = 0) -> StepTimeModel:
    """A fit that has seen steps which take exactly what ``truth`` (a, b, t0, k1, k2) says."""
    rng, model = random.Random(seed), StepTimeModel()
    for number in range(400):
        u = rng.randrange(16, 2048) if number % 2 else 0
        shape = StepShape(u, u * (rng.randrange(0, 4096) + u / 2), rng.randrange(100, 60_000), rng.randrange(1, 64))
        model.update(shape, _ms(shape, truth))
    model.settle()
    return model


def _ms(shape: StepShape, truth: tuple[float, float, float, float, float] = TRUTH) -> float:
    a, b, t0, k1, k2 = truth
    return a * shape.prefill_tokens + b * shape.prefill_quad + t0 + k1 * shape.context + k2 * shape.running


def budget(target: float | str, step_time: StepTimeModel, chunk: int | str = 2048) -> StepBudget:
    return StepBudget(make_config(itl_target_ms=target, chunk_size=chunk, max_batch_size=64), step_time)


def test_a_step_takes_the_largest_size_within_the_target() -> None:
    rng, model, sizes = random.Random(1), fitted(), [*SIZES, 10_000]
    for _ in range(300):
        target, running, start = rng.uniform(5, 60), rng.randrange(1, 64), rng.randrange(0, 8000)
        context = running * rng.randrange(10, 2000)

        def ms(tokens: int, start: int = start, context: int = context, running: int = running) -> float:
            u = tokens - running
            return _ms(StepShape(u, u * (start + u / 2), context, running))

        tokens = budget(target, model).tokens(context, running, start)
        assert tokens in SIZES
        assert ms(tokens) <= 1.02 * target or tokens == SIZES[0]
        assert ms(sizes[sizes.index(tokens) + 1]) >= 0.98 * target or tokens == SIZES[-1]


def test_with_a_target_and_nobody_to_delay_a_step_takes_all() -> None:
    assert budget(10.0, fitted()).tokens(0, 0, 0) == 2048


def test_before_the_fit_and_beyond_the_target() -> None:
    assert budget(50.0, StepTimeModel(), chunk="auto").tokens(1000, 8, 0) == 512
    assert budget(50.0, StepTimeModel(), chunk=700).tokens(1000, 8, 0) == 700
    assert budget(1.0, fitted()).tokens(50_000, 60, 0) == SIZES[0], "decoding alone takes longer than the target"


def test_without_a_target_few_who_decode_bear_longer_steps() -> None:
    varying = StepBudget(make_config(chunk_size=2048, busy_chunk_size=1024, max_batch_size=64), StepTimeModel())
    assert [varying.tokens(9000, running, 0) for running in (0, QUIET, QUIET + 1, 64)] == [2048, 2048, 1024, 1024]
    assert varying.varies and not budget("off", fitted()).varies
    assert budget("off", fitted()).tokens(9000, 64, 0) == 2048


@pytest.mark.parametrize("target", [15.0, 40.0, "off"])
def test_the_scheduler_keeps_to_it(target: float | str) -> None:
    """A long prompt beside three who decode: no step beyond the target, and short prompts still slip in."""
    harness = Harness(
        itl_target_ms=target, chunk_size=2048, max_batch_size=16, max_num_pages=600, max_model_len=4096,
        async_scheduling=False,
    )  # fmt: skip
    engine, rng = harness.engine, random.Random(2)
    engine.step_time = engine.scheduler._step_budget._step_time = fitted()
    for _ in range(3):
        harness.submit([rng.randrange(400) for _ in range(40)], max_tokens=60)
    harness.step(6)
    first = len(harness.batches)
    long = harness.submit([rng.randrange(400) for _ in range(4000)], max_tokens=4)
    harness.step(1)
    short = harness.submit([rng.randrange(400) for _ in range(100)], max_tokens=4)
    while harness.outputs[long].finish is None or harness.outputs[short].finish is None:
        harness.step(1)
    chunks = [
        [(len(row.token_ids), row.start) for row in batch.rows if len(row.token_ids) > 1]
        for batch in harness.batches[first:]
    ]
    prefills = [step for step in chunks if step]
    assert sum(n for step in prefills for n, _ in step) == 4100
    sizes = [sum(n for n, _ in step) for step in prefills]
    if target == "off":
        assert sizes[0] == 2048 - 3 and len(sizes) <= 3
    else:
        for step in prefills:
            ms = _ms(StepShape(sum(n for n, _ in step), sum(n * (c + n / 2) for n, c in step), 300, 4))
            assert ms <= 1.1 * float(target)
        assert max(sizes) > 0.5 * min(2048, (float(target) - 3.2) / 0.018 * 0.8), "the target is used"
    assert harness.outputs[short].finish == "length"
