"""What the engine itself costs: CPU time of its thread per step, on a runner that does next to nothing.

python -m replica.overhead [batch size]
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from replica.batch import Batch, StepResult
from replica.config import EngineConfig, ModelFacts, resolve
from replica.loop import Engine
from replica.stub import StubRunner
from router.pages import RootFields, chain, pack_tokens
from router.wire import Sampling, Submit

WINDOW = 40
"""Steps per sample; the best one is what an undisturbed core needs."""


class _Timed(StubRunner):
    """Keeps its own CPU time apart."""

    cpu_s = 0.0

    def _execute(self, batch: Batch) -> StepResult:
        began = time.thread_time()
        result = super()._execute(batch)
        self.cpu_s += time.thread_time() - began
        return result


def measure(
    *, batch_size: int = 64, num_steps: int = 600, num_prompt: int = 256, async_scheduling: bool = True
) -> dict[str, Any]:
    """Decoding at a full batch, in microseconds of thread CPU per step: the best and the median window."""
    facts = ModelFacts(max_position=8192, num_layers=1, num_kv_heads=1, head_dim=16)
    pages = 2 + batch_size * (num_prompt + num_steps + 32) // 16
    config = resolve(
        EngineConfig(
            max_batch_size=batch_size,
            max_prefill_batch=batch_size,
            chunk_size=max(4096, batch_size),
            max_num_pages=pages,
            async_scheduling=async_scheduling,
        ),
        facts,
    )
    runner = _Timed(num_pages=pages, max_batch_size=batch_size, content=False)
    fields = RootFields("overhead", "none", config.dtype, config.page_size)
    counted: list[int] = []
    engine = Engine(
        config,
        runner,
        root=fields,
        on_deltas=lambda deltas: counted.append(len(deltas)),
        on_events=lambda batch: None,
    )
    rng, root = random.Random(0), fields.root()
    for i in range(batch_size):
        tokens = pack_tokens(rng.randrange(runner.vocab_size) for _ in range(num_prompt))
        hashes = b"".join(chain(root, tokens, config.page_size))
        sampling = Sampling(max_tokens=num_steps, seed=i)
        engine.submit(None, Submit(str(i), tokens, num_prompt, root, hashes, sampling))
    while len(engine.scheduler.running) < batch_size or not all(r.is_decoding for r in engine.scheduler.running):
        engine.iterate()
    samples: list[float] = []
    while not engine.idle():
        first, began, apart = engine.num_steps, time.thread_time(), runner.cpu_s
        while engine.num_steps < first + WINDOW and not engine.idle():
            engine.iterate()
        if engine.num_steps == first + WINDOW:
            samples.append((time.thread_time() - began - (runner.cpu_s - apart)) / WINDOW * 1e6)
    samples.sort()
    return {
        "batch_size": batch_size,
        "async_scheduling": async_scheduling,
        "best_us": round(samples[0], 1),
        "median_us": round(samples[len(samples) // 2], 1),
        "tokens": sum(counted),
    }


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    for ahead in (True, False):
        print(json.dumps(measure(batch_size=size, async_scheduling=ahead)))
