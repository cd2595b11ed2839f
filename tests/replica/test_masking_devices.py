"""Masks that depend on the id just sampled, on every device at hand: the host must see it in time, and only it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from runner_driver import make_config, make_runner, prompts

from replica.llm import LLM
from router.wire import Sampling

VOCAB, STEP = 256, 7
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Chain:
    """After id i only ids congruent to i + 1 modulo 7 are allowed; needs no grammar library."""

    def __init__(self) -> None:
        self.last = -1

    def mask(self, num: int, draft: Sequence[int] = ()) -> np.ndarray:
        assert num == 1 and not draft
        bits = np.zeros(VOCAB, np.uint8)
        bits[(self.last + 1) % STEP :: STEP] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)[None]

    def accept(self, token_id: int) -> None:
        if (token_id - self.last - 1) % STEP:
            raise ValueError(f"{token_id} after {self.last}")
        self.last = token_id


def run(device: str, *, together: bool) -> list[list[int]]:
    options = {"device": device, "dtype": "float32"} if device == "cuda" else {}
    samplings = [
        Sampling(max_tokens=40, seed=seed, temperature=float(seed % 2), grammar=("chain", "") if seed < 6 else None)
        for seed in range(8)
    ]
    given = list(zip(prompts((9, 40, 5, 33, 12, 21, 60, 7)), samplings, strict=True))
    runner = make_runner(**options)
    with LLM(runner.config, runner, masks=lambda _: Chain()) as llm:
        groups = [given] if together else [[pair] for pair in given]
        outputs = [out for group in groups for out in llm.generate([p for p, _ in group], [s for _, s in group])]
    assert all(output.error is None for output in outputs), outputs
    return [output.ids for output in outputs]


@pytest.mark.parametrize("device", DEVICES)
def test_chains_hold_alone_and_together(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    together = run(device, together=True)
    for ids in together[:6]:
        assert len(ids) == 40 and all((b - a - 1) % STEP == 0 for a, b in zip([-1, *ids], ids, strict=False))
    assert run(device, together=False) == together
    if device == "cuda":
        assert run("cpu", together=True) == together
    assert make_config().async_scheduling, "the point is to run one step ahead"
