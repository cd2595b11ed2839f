"""What the benches share: model shapes, a whole decode step with random weights, timing, parallel compilation."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.triton_common import Launcher
from kernels.triton_ops import TritonOps
from kernels.tuning import TuningTable

COPY_RATE = 4.3e12
"""Bytes per second of a device-to-device copy on an H200, reads plus writes: what floors are stated against."""
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inter: int
    vocab: int
    qk_norm: bool = True


MODELS = {
    "8b": Shape(36, 4096, 32, 8, 128, 12288, 151936),
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936),
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, qk_norm=False),
    "smollm2": Shape(30, 576, 9, 3, 64, 1536, 49152, qk_norm=False),
}


class Step:
    """One decode step, from ids to ids, of a model with random weights: every request at the same context length."""

    def __init__(self, shape: Shape, batch: int, context: int, page: int = 16, empty: bool = False) -> None:
        self.shape, self.batch, self.context = shape, batch, context
        bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        s = shape

        def mk(*size: int, sd: float = 0.02) -> torch.Tensor:
            t = torch.empty(*size, **bf16)
            return t if empty else t.normal_(0, sd)

        def near_one(n: int) -> torch.Tensor:
            return torch.ones(n, **bf16) if empty else torch.rand(n, **bf16) * 0.5 + 0.75

        width = (s.heads + 2 * s.kv_heads) * s.dim
        self.layers = [
            (near_one(s.hidden), mk(width, s.hidden), mk(s.hidden, s.heads * s.dim), near_one(s.hidden),
             mk(2 * s.inter, s.hidden), mk(s.hidden, s.inter), near_one(s.dim), near_one(s.dim))
            for _ in range(s.layers)
        ]  # fmt: skip
        self.final, self.head = near_one(s.hidden), mk(s.vocab, s.hidden)
        self.embedding = self.head if s.hidden < 2048 else mk(s.vocab, s.hidden, sd=1.0)
        pages = -(-context // page)
        size = (batch * pages + 1, page, s.kv_heads, s.dim)
        self.kv = [LayerKV(mk(*size, sd=1.0), mk(*size, sd=1.0)) for _ in range(s.layers)]
        table = torch.randperm(batch * pages, device="cuda").view(batch, pages) + 1
        position = context - 1
        i32: Any = {"dtype": torch.int32, "device": "cuda"}
        self.meta = AttentionMeta(
            torch.arange(batch + 1, **i32), torch.full((batch,), context, **i32), table.to(torch.int32),
            torch.full((batch,), position, **i32), table[:, position // page] * page + position % page, page, 1,
            context, True, list(range(batch + 1)), [context] * batch,
        )  # fmt: skip
        angle = torch.arange(max(context, 4096), device="cuda")[:, None] * 1e6 ** (
            -torch.arange(s.dim // 2, device="cuda") / (s.dim // 2)
        )
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        self.attention = AttentionShape(s.heads, s.kv_heads, s.dim, EPS, s.dim**-0.5)
        self.ids = torch.arange(batch, **i32) + 17

    def floor_ms(self) -> float:
        s = self.shape
        width = (s.heads + 2 * s.kv_heads) * s.dim
        weights = s.layers * (width + s.heads * s.dim + 3 * s.inter) * s.hidden + s.vocab * s.hidden
        kv = self.batch * self.context * s.layers * s.kv_heads * s.dim * 2
        return 2 * (weights + kv) / COPY_RATE * 1e3

    def hidden(self, ops: Any) -> Any:
        x = ops.embed(self.ids, self.embedding, self.layers[0][0], EPS)
        for i, (g1, qkv, o, g2, gate_up, down, qn, kn) in enumerate(self.layers):
            after = self.layers[i + 1][0] if i + 1 < len(self.layers) else self.final
            norms = (qn, kn) if self.shape.qk_norm else (None, None)
            y = ops.norm_linear(x, g1, EPS, qkv, None)
            y = ops.attention(y, self.kv[i], self.meta, self.attention, *norms, self.cos, self.sin)
            x = ops.linear_add(y, o, x, g2)
            x = ops.linear_add(ops.norm_mlp(x, g2, EPS, gate_up), down, x, after)
        return x

    def __call__(self, ops: TritonOps) -> torch.Tensor:
        return ops.norm_sample(self.hidden(ops), None, self.final, EPS, self.head)


def repack(step: Step, new: list[int], prefix: list[int]) -> None:
    """Turns the step's batch into one of ``new`` tokens per request after ``prefix`` cached ones, over its pages.
    Needs len(new) = the step's batch and no context above the step's."""
    page, table = step.meta.page_size, step.meta.block_table
    lens = [n + p for n, p in zip(new, prefix, strict=True)]
    assert max(lens) <= step.context and len(new) <= table.shape[0], (lens, table.shape)
    positions = torch.cat([torch.arange(p, p + n) for n, p in zip(new, prefix, strict=True)]).cuda()
    owner = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new)).cuda()
    cu = [sum(new[:i]) for i in range(len(new) + 1)]
    i32: Any = {"dtype": torch.int32, "device": "cuda"}
    slots = table[owner, positions // page].long() * page + positions % page
    step.meta = AttentionMeta(
        torch.tensor(cu, **i32), torch.tensor(lens, **i32), table[: len(new)], positions.int(), slots, page, max(new),
        max(lens), max(new) == 1, cu, lens,
    )  # fmt: skip
    step.ids = torch.randint(0, step.shape.vocab, (sum(new),), **i32)


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Runs once outside, for what is allocated or compiled on first use, then captures."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
    return graph


def replay_us(run: Callable[[], Any], launches: int = 1, repeats: int = 9) -> float:
    """Median microseconds of one of ``launches`` calls that ``run`` makes."""
    graph = capture(run)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def _compile(job: tuple[str, int, int, TuningTable]) -> str | None:
    """In a worker process: fills Triton's cache with everything a step of this table launches."""
    name, batch, context, table = job
    try:
        device = torch.device("cuda")
        step = Step(replace(MODELS[name], layers=1, vocab=MODELS[name].vocab), batch, context, empty=True)
        step(TritonOps(device, table=table, launch=Launcher(device, compile_only=True)))
    except Exception as error:
        return f"{name} batch {batch}: {error!r}"[:300]
    return None


def precompile(jobs: Iterable[tuple[str, int, int, TuningTable]], workers: int = 14) -> list[str]:
    """Compiles in parallel; returns what failed. Triton compiles on one core, a step needs a dozen kernels."""
    started = time.perf_counter()
    jobs = list(jobs)
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        failed = [e for e in pool.imap_unordered(_compile, jobs) if e]
    print(f"compiled {len(jobs)} variants of a step in {time.perf_counter() - started:.1f} s", *failed[:3], sep="\n")
    return failed
