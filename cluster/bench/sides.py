"""The engines that ``everwarm bench engine`` puts beside each other: each runs one cell and says how fast it was."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.bench.peer import as_transformers, generate
from replica import weights
from replica.config import DeviceFacts, EngineConfig, resolve
from replica.llm import LLM
from replica.runner import ModelRunner
from router.wire import Sampling


@dataclass(frozen=True)
class Room:
    """What a side must hold: ``largest`` sequences of ``longest`` tokens at once, on ``threads`` threads."""

    largest: int
    longest: int
    threads: int


class Side(Protocol):
    name: str

    def run(self, asked: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        """Greedy ``count`` tokens after each prompt of ``asked``: (tokens per second, ids). The rate is the prompt's
        when ``count`` is 1, else that of the stretch in which all sequences decode. Raises RuntimeError."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-able: what it was built from, which kernels."""
        ...

    def close(self) -> None: ...


class Ours:
    """Our engine, whole and in process. Default options, but a batch and a pool that hold the largest cell."""

    def __init__(self, path: Path, room: Room, name: str = "fp32", **options: Any) -> None:
        """``options``: further EngineConfig fields. Raises ValueError for what can't be resolved."""
        self.name, self.longest = name, room.longest
        model = weights.read_config(path)
        if room.longest > model.max_position:
            raise ValueError(
                f"prompt + 1 or context + tokens: {room.longest} exceeds the model's {model.max_position} positions"
            )
        config = EngineConfig(
            threads=room.threads,
            device="cpu",
            max_batch_size=room.largest,
            max_num_pages=2 * room.largest * (room.longest // 16 + 2) + 64,
            max_model_len=min(model.max_position, room.longest + 16),
            **options,
        )
        resolved = resolve(config, model.facts(4), DeviceFacts("cpu", room.threads))
        self.engine = LLM(resolved, ModelRunner.open(path, resolved))

    def run(self, asked: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        if count > 1:  # so that all sequences start decoding together
            self.engine.generate(asked, Sampling(temperature=0, max_tokens=1))
        ids: list[list[int]] = [[] for _ in asked]
        stamps: list[list[float]] = [[] for _ in asked]
        started = time.perf_counter()
        for index, delta in self.engine.stream(asked, Sampling(temperature=0, max_tokens=count)):
            if delta.error:
                raise RuntimeError(f"sequence {index} failed: {delta.error}")
            ids[index] += delta.ids
            stamps[index] += [time.perf_counter()] * len(delta.ids)
        if count == 1:
            return len(asked[0]) / (stamps[0][0] - started), ids
        begin, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
        decoded = sum(begin < stamp <= end for s in stamps for stamp in s)
        return decoded / (end - begin), ids

    def describe(self) -> dict[str, Any]:
        return {"kernels": self.engine.engine.runner.describe()["kernels"]}

    def close(self) -> None:
        self.engine.close()


class Transformers:
    """transformers' ``generate`` on the very weights that we serve, fp32, sdpa attention."""

    name = "transformers"

    def __init__(self, path: Path) -> None:
        self._model = as_transformers(path)

    def run(self, asked: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        out = generate(self._model, asked, count)
        return (len(asked[0]) / out.first_s if count == 1 else len(asked) * out.steps_per_s), out.ids

    def describe(self) -> dict[str, Any]:
        import transformers

        return {"version": transformers.__version__, "attention": self._model.config._attn_implementation}

    def close(self) -> None:
        del self._model
