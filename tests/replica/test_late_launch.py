"""On a GPU the next step is launched late, so that whoever arrives while a step runs is in the one after it."""

from __future__ import annotations

import dataclasses

import pytest

from replica.step_time import StepShape
from tests.replica.engine_harness import Harness

STEP_MS = 300.0


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_arrival_is_in_the_step_after_the_one_under_way(device: str) -> None:
    harness = Harness(step_ms=STEP_MS, chunk_size=64)
    engine = harness.engine
    engine.config = dataclasses.replace(engine.config, device=device)
    for number in range(80):  # a fit that knows how long steps take
        engine.step_time.update(StepShape(8 * (number % 2), 0.0, 40, 1), STEP_MS)
    engine.step_time.settle()
    engine._fit = (1e-3, 0.0, STEP_MS, 0.0, 0.0)
    first = harness.submit(list(range(20)), max_tokens=8)
    while len(harness.outputs[first].ids) < 2:
        harness.step(audit=False)
    under_way = len(harness.batches)
    harness.step(audit=False)
    second = harness.submit(list(range(30, 50)), max_tokens=2)
    while not any(row.num_prompt == 20 and row.start == 0 for batch in harness.batches[1:] for row in batch.rows):
        harness.step(audit=False)
    between = len(harness.batches) - 1 - under_way
    assert between == 0 if device == "cuda" else between >= 1
    while harness.outputs[second].finish is None:
        harness.step(audit=False)
    assert len(harness.outputs[second].ids) == 2
    harness.audit()


def test_without_a_fit_steps_are_launched_at_once() -> None:
    harness = Harness(step_ms=50.0)
    harness.engine.config = dataclasses.replace(harness.engine.config, device="cuda")
    harness.submit(list(range(20)), max_tokens=6)
    harness.step(2, audit=False)
    assert len(harness.batches) == 2, "the second is launched while the first runs"
