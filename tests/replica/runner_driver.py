"""Drives a runner through the batch contract alone: no scheduler, one step ahead, pages handed out in random order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from replica.batch import FROM_DEVICE, Batch, Row, StepResult
from replica.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from replica.model import ModelConfig, random_model, tiny_config
from replica.runner import ModelRunner
from router.wire import Logprob, Sampling

GREEDY = Sampling(temperature=0)


@dataclass
class Ask:
    """A prompt (with what was emitted before, when it resumes) and how to go on."""

    prompt: list[int]
    sampling: Sampling = GREEDY
    emitted: list[int] = field(default_factory=list)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    """Grammar bitmask [1, words] by number of tokens emitted before."""


@dataclass
class Got:
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    fault: str | None = None


def make_config(device: str = "cpu", **options: object) -> ResolvedConfig:
    options.setdefault("max_num_pages", 256)
    options.setdefault("max_model_len", 1024)
    options.setdefault("threads", 1)
    config = EngineConfig(**options)
    return resolve(config, tiny_config().facts(4), DeviceFacts(device))


def make_runner(model: ModelConfig | None = None, seed: int = 0, device: str = "cpu", **options: object) -> ModelRunner:
    model = model or tiny_config()
    config = make_config(device, **options)
    return ModelRunner(model, random_model(model, seed, getattr(torch, config.dtype), device), config)


class Driver:
    """Runs asks together, or alone; ``chunk`` tokens of prompt per step and row."""

    def __init__(self, runner: ModelRunner, *, chunk: int = 512, seed: int = 0) -> None:
        self.runner, self.chunk = runner, chunk
        self._page_size = runner.config.page_size
        self._free = list(range(1, runner.num_pages))
        random.Random(seed).shuffle(self._free)
        self._steps = 0

    def run(self, asks: list[Ask], count: int) -> list[Got]:
        """``count`` more tokens for each ask."""
        need = [-(-(len(a.prompt) + len(a.emitted) + count) // self._page_size) for a in asks]
        pages = [np.array([self._free.pop() for _ in range(n)], np.int32) for n in need]
        got = [Got() for _ in asks]
        history = [np.array(a.prompt + a.emitted, np.int32) for a in asks]
        done, launched = [0] * len(asks), [0] * len(asks)
        flights: list[tuple[list[int], object]] = []
        while True:
            rows, who = [], []
            for i, ask in enumerate(asks):
                if launched[i] < count and got[i].fault is None:
                    rows.append(self._row(i, ask, history[i], pages[i], done, launched))
                    who.append(i)
            if rows:
                flights.append((who, self.runner.launch(Batch(self._steps, rows))))
                self._steps += 1
            if len(flights) > 1 or not rows:
                if not flights:
                    break
                indices, step = flights.pop(0)
                self._take(indices, step.result(), got)
        for i, used in enumerate(pages):
            self.runner.release(i)
            self._free += used.tolist()
        return got

    def _row(
        self, i: int, ask: Ask, history: np.ndarray, pages: np.ndarray, done: list[int], launched: list[int]
    ) -> Row:
        start = done[i]
        if start < len(history):
            ids = history[start : start + self.chunk]
        else:
            ids = np.array([FROM_DEVICE], np.int32)
        end = start + len(ids)
        samples = int(end >= len(history))
        mask = ask.masks.get(launched[i]) if samples else None
        done[i], launched[i] = end, launched[i] + samples
        new = start == 0
        return Row(
            i, start, ids, pages, samples, ask.sampling, new, history if new else None, len(ask.prompt), end, mask
        )

    @staticmethod
    def _take(indices: list[int], result: StepResult, got: list[Got]) -> None:
        for row, i in enumerate(indices):
            if got[i].fault is not None:
                continue  # launched before its fault was read
            if row in result.faults:
                got[i].fault = result.faults[row]
                continue
            got[i].ids += result.ids[row]
            if result.logprobs and result.logprobs[row]:
                got[i].logprobs += result.logprobs[row]
            if result.prompt_logprobs and result.prompt_logprobs[row] is not None:
                got[i].prompt_logprobs += result.prompt_logprobs[row]


def prompts(lengths: tuple[int, ...], vocab: int = 256, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]
