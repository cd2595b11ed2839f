"""The step-time fit finds known coefficients through noise, outliers, cold starts and long silences."""

from __future__ import annotations

import random

import pytest

from replica.step_time import StepShape, StepTimeModel

TRUE = (0.9, 0.0002, 5.0, 0.0005, 0.4)


def cost(shape: StepShape, true=TRUE) -> float:
    a, b, t0, k1, k2 = true
    return a * shape.prefill_tokens + b * shape.prefill_quad + t0 + k1 * shape.context + k2 * shape.running


def draw(rng: random.Random, prefill: bool) -> StepShape:
    shape = StepShape(0, 0.0, rng.randrange(8000), rng.randrange(1, 16))
    if prefill:
        shape.prefill_tokens = rng.randrange(1, 256)
        shape.prefill_quad = shape.prefill_tokens * (rng.randrange(2000) + shape.prefill_tokens / 2)
    return shape


def worst_error(model: StepTimeModel, true=TRUE, share: float = 0.9) -> float:
    rng = random.Random(99)
    shapes = [draw(rng, i % 2 == 0) for i in range(300)]
    errors = sorted(abs(model.predict(shape) / cost(shape, true) - 1) for shape in shapes)
    return errors[int(len(errors) * share)]


def teach(model: StepTimeModel, rng: random.Random, count: int, prefill_share: float, true=TRUE, spikes: float = 0.01):
    for _ in range(count):
        shape = draw(rng, rng.random() < prefill_share)
        ms = cost(shape, true) * rng.gauss(1, 0.05)
        model.update(shape, ms * (20 if rng.random() < spikes else 1))


def test_within_15_percent_after_200_steps_with_outliers_and_a_cold_start() -> None:
    model, rng = StepTimeModel(), random.Random(1)
    model.update(draw(rng, True), 3000.0)
    teach(model, rng, 200, 0.3)
    assert worst_error(model) < 0.15
    assert all(c >= 0 for c in model.coefficients)


def test_remembers_prefill_through_hours_of_decoding() -> None:
    model, rng = StepTimeModel(), random.Random(2)
    teach(model, rng, 300, 0.3)
    teach(model, rng, 5000, 0.0)
    assert worst_error(model) < 0.15


def test_follows_a_lasting_change() -> None:
    model, rng = StepTimeModel(), random.Random(3)
    teach(model, rng, 500, 0.3)
    slower = tuple(2 * c for c in TRUE)
    teach(model, rng, 1500, 0.3, slower)
    assert worst_error(model, slower) < 0.15


def test_follows_a_lasting_change_for_the_faster() -> None:
    model, rng = StepTimeModel(), random.Random(3)
    teach(model, rng, 500, 0.3)
    faster = tuple(c / 4 for c in TRUE)
    teach(model, rng, 1500, 0.3, faster)
    assert worst_error(model, faster) < 0.15


@pytest.mark.parametrize("late", [0.01, 0.05])
def test_a_step_read_back_late_and_the_short_one_after_it_move_little(late: float) -> None:
    model, rng, debt = StepTimeModel(), random.Random(5), 0.0
    for _ in range(3000):
        shape = draw(rng, rng.random() < 0.3)
        ms = cost(shape) * rng.gauss(1, 0.02)
        if debt:
            ms, debt = max(0.05, ms - debt), 0.0
        elif rng.random() < late:
            debt = rng.uniform(5, 30)
            ms += debt
        model.update(shape, ms)
    assert worst_error(model) < 0.15


def test_never_negative_when_the_data_say_otherwise() -> None:
    model, rng = StepTimeModel(), random.Random(4)
    for _ in range(400):
        shape = draw(rng, rng.random() < 0.3)
        model.update(shape, max(0.5, 30 - 0.002 * shape.context + 0.5 * shape.prefill_tokens))
        assert min(model.coefficients) >= 0
    assert model.coefficients[3] == 0.0


@pytest.mark.parametrize("shape", [StepShape(), StepShape(0, 0.0, 0, 1)])
def test_a_constant_diet_stays_finite(shape: StepShape) -> None:
    model = StepTimeModel()
    for _ in range(3000):
        model.update(shape, 7.0)
    assert model.predict(shape) == pytest.approx(7.0, rel=0.02)
    prefill = StepShape(100, 0.0, shape.context, shape.running)
    assert model.predict(prefill) == pytest.approx(17.0, rel=0.02), "what was never seen keeps its prior"


def test_silent_until_prefill_is_known() -> None:
    """A router prices with a peer's fit meanwhile, not with a prior that makes a cold replica look fast."""
    model, rng = StepTimeModel(), random.Random(5)
    teach(model, rng, 500, 0.0)
    teach(model, rng, 19, 1.0)
    model.settle()
    assert model.coefficients == (0.0,) * 5
    teach(model, rng, 1, 1.0)
    model.settle()
    assert model.coefficients[0] > 0
