"""Each kernel alone: microseconds, share of its floor, and the best alternative on the machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.bench_step import COPY_RATE, EPS, MODELS, Shape, Step, replay_us
from kernels.interface import Stream
from kernels.triton_ops import TritonOps
from kernels.tuning import Role

ROTATE = 200e6
"""Bytes of weights to go through between two uses of the same ones: several times the L2 cache."""
LAUNCHES = 32
"""Calls per graph, at least: launching the graph itself costs 8 us."""


def run(models: list[str], batches: list[int]) -> dict[str, Any]:

    rows: dict[str, Any] = {}
    print(f"{'':34s}{'us':>9s}{'floor':>9s}{'share':>8s}{'other':>9s}  which")

    def report(name: str, ours: float, num_bytes: float, other: float, which: str) -> None:
        floor = num_bytes / COPY_RATE * 1e6
        rows[name] = {"us": ours, "floor_us": floor, "other_us": other, "other": which}
        print(f"{name:34s}{ours:9.2f}{floor:9.2f}{floor / ours:8.1%}{other:9.2f}  {which}")

    for name in models:
        for batch in batches:
            for role, weight, ours, theirs in _products(MODELS[name], batch):
                count = max(1, int(ROTATE // (weight.numel() * 2)))
                weights = [weight] + [torch.randn_like(weight) * 0.02 for _ in range(count - 1)]
                weights *= -(-LAUNCHES // count)
                a, b = (replay_us(partial(_each, call, weights), len(weights)) for call in (ours, theirs))
                report(f"{name} {role} {weight.shape[0]}x{weight.shape[1]} M={batch}", a, weight.numel() * 2, b,
                       "cuBLAS + torch")  # fmt: skip
                del weights
                torch.cuda.empty_cache()
            for context in (1024, 4096):
                step = Step(MODELS[name], batch, context)
                a, b = _attention(step)
                s = step.shape
                report(f"{name} decode attention {batch} x {context}", a,
                       batch * context * s.kv_heads * s.dim * 4, b, "SDPA on contiguous KV")  # fmt: skip
                del step
                torch.cuda.empty_cache()
    return rows


def _each(call: Callable[..., Any], weights: list[torch.Tensor]) -> None:
    for weight in weights:
        call(weight)


def _products(s: Shape, m: int) -> list[tuple[Role, torch.Tensor, Callable[..., Any], Callable[..., Any]]]:
    """(role, weight, our call, torch's call), norm and epilogue included on both sides."""
    ops = TritonOps(torch.device("cuda"))
    bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    width = (s.heads + 2 * s.kv_heads) * s.dim
    mk = lambda *size: torch.randn(*size, **bf16) * 0.02  # noqa: E731
    h, g = torch.randn(m, s.hidden, **bf16), torch.rand(s.hidden, **bf16) + 0.5
    x = Stream(h) if m == 1 else Stream(h, h * g, h.float().square().view(m, 32, -1).sum(-1))
    att, act = torch.randn(m, s.heads * s.dim, **bf16), torch.randn(m, s.inter, **bf16)
    norm = lambda: F.rms_norm(h, (s.hidden,), g, EPS)  # noqa: E731

    def gated(w: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(norm(), w).chunk(2, -1)
        return F.silu(gate) * up

    return [
        ("qkv", mk(width, s.hidden), lambda w: ops.norm_linear(x, g, EPS, w, None), lambda w: F.linear(norm(), w)),
        ("add", mk(s.hidden, s.heads * s.dim), lambda w: ops.linear_add(att, w, x, g), lambda w: h + F.linear(att, w)),
        ("gate_up", mk(2 * s.inter, s.hidden), lambda w: ops.norm_mlp(x, g, EPS, w), gated),
        ("add", mk(s.hidden, s.inter), lambda w: ops.linear_add(act, w, x, g), lambda w: h + F.linear(act, w)),
        ("head", mk(s.vocab, s.hidden), lambda w: ops.norm_sample(x, None, g, EPS, w),
         lambda w: F.linear(norm(), w).argmax(-1)),
    ]  # fmt: skip


def _attention(step: Step) -> tuple[float, float]:
    """Ours from the raw projection through pages, torch's from rotated q on contiguous keys and values."""
    ops, s, b = TritonOps(torch.device("cuda")), step.shape, step.batch
    qkv = torch.randn(b, (s.heads + 2 * s.kv_heads) * s.dim, dtype=torch.bfloat16, device="cuda")
    qn, kn = step.layers[0][6:8]
    used = max(1, min(s.layers, int(ROTATE // (b * step.context * s.kv_heads * s.dim * 4)) + 1))
    repeat = -(-LAUNCHES // used)

    def ours() -> None:
        for kv in step.kv[:used] * repeat:
            ops.attention(qkv, kv, step.meta, step.attention, qn, kn, step.cos, step.sin)

    q = torch.randn(b, s.heads, 1, s.dim, dtype=torch.bfloat16, device="cuda")
    flat = [torch.randn(2, b, s.kv_heads, step.context, s.dim, dtype=q.dtype, device="cuda") for _ in range(used)]

    def theirs() -> None:
        for k, v in flat * repeat:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return replay_us(ours, used * repeat), replay_us(theirs, used * repeat)
