"""Faults that ``everwarm verify --inject`` plants, to show that what it reports as equal would not be otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replica.batch import Batch, Step, StepResult
from replica.runner import ModelRunner


class _Flipped:
    """A step whose first sampled id is another one."""

    def __init__(self, step: Step, vocab_size: int) -> None:
        self._step, self._vocab_size, self._done = step, vocab_size, False

    def wait(self, timeout: float) -> bool:
        return self._step.wait(timeout)

    def result(self) -> StepResult:
        result = self._step.result()
        if not self._done:
            self._done = True
            ids = next(ids for ids in result.ids if ids)
            ids[0] = (ids[0] + 1) % self._vocab_size
        return result


def flip_a_token(runner: ModelRunner) -> None:
    """The tenth step that samples reports one id wrongly."""
    launch, sampling = runner.launch, 0

    def launched(batch: Batch) -> Any:
        nonlocal sampling
        step = launch(batch)
        sampling += any(row.num_samples for row in batch.rows)
        flip = sampling == 10 and any(row.num_samples for row in batch.rows)
        return _Flipped(step, runner.vocab_size) if flip else step

    runner.launch = launched  # type: ignore[method-assign]


def shift_rope(runner: ModelRunner) -> None:
    """From position 16 on, rotary tables are one position ahead."""
    decoder = runner._decoder
    for name in ("cos", "sin"):
        table = getattr(decoder, name).clone()
        table[16:-1] = table[17:].clone()
        setattr(decoder, name, table)


FAULTS: dict[str, Callable[[ModelRunner], None]] = {"token": flip_a_token, "rope": shift_rope}
