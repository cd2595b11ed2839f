"""Prefill: attention of chunks with and without a cached prefix, and the gate-up product, against what torch offers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from kernels.bench_step import EPS, MODELS, Shape, Step, repack, replay_us
from kernels.interface import Stream
from kernels.triton_norm import silu_mul
from kernels.triton_ops import TritonOps
from kernels.triton_prefill import prefill_attention

CHUNKS = ((1024, 0), (2048, 0), (8192, 0), (512, 1536), (1024, 3072), (2048, 6144))
"""(new tokens, cached before)."""
LAYERS = 8


def run(models: list[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in models:
        for new, prefix in CHUNKS:
            row = rows[f"{name} attention {new} after {prefix}"] = _attention(MODELS[name], new, prefix)
            print(f"{name} attention {new} after {prefix}:", {k: round(v, 1) for k, v in row.items()}, "TFLOP/s")
        for tokens in (256, 512, 1024, 2048, 8192):
            row = rows[f"{name} gate-up {tokens}"] = _gate_up(MODELS[name], tokens)
            print(f"{name} gate-up {tokens}:", {k: round(v, 1) for k, v in row.items()}, "us")
        torch.cuda.empty_cache()
    return rows


def _attention(s: Shape, new: int, prefix: int) -> dict[str, float]:
    """TFLOP/s of useful work. ``ours`` includes QK-norm, RoPE and the KV write; torch's starts from rotated tensors, as
    ``alone`` does, which still reads pages."""
    small = Shape(LAYERS, s.hidden, s.heads, s.kv_heads, s.dim, 512, 1024, s.qk_norm)
    step = Step(small, 1, new + prefix)
    repack(step, [new], [prefix])
    ops = TritonOps(torch.device("cuda"))
    qkv = torch.randn(new, (s.heads + 2 * s.kv_heads) * s.dim, dtype=torch.bfloat16, device="cuda")
    q_norm, k_norm = step.layers[0][6:8] if s.qk_norm else (None, None)
    work = 4 * s.heads * s.dim * (new * prefix + new * (new + 1) / 2)

    def ours() -> None:
        for kv in step.kv:
            ops.attention(qkv, kv, step.meta, step.attention, q_norm, k_norm, step.cos, step.sin)

    out = torch.empty(new, s.heads * s.dim, dtype=qkv.dtype, device="cuda")

    def alone() -> None:
        for kv in step.kv:
            config = ops.prefill_config(qkv, kv, step.meta, step.attention)
            prefill_attention(ops.launch, config, qkv, kv, step.meta, step.attention, out, min_new=2)

    found = {"ours": work / replay_us(ours, LAYERS) / 1e6, "alone": work / replay_us(alone, LAYERS) / 1e6}
    bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(1, s.heads, new, s.dim, **bf16)
    k, v = (torch.randn(1, s.kv_heads, new + prefix, s.dim, **bf16) for _ in range(2))
    mask = causal_lower_right(new, new + prefix) if prefix else None
    for label, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def theirs(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                for _ in range(LAYERS):
                    F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not prefix, enable_gqa=True)

        found[label] = work / replay_us(theirs, LAYERS) / 1e6
    found["varlen"] = work / replay_us(_varlen(q, k, v), LAYERS) / 1e6
    return found


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
    """torch's packed attention on [1, heads, tokens, dim], causal from the bottom right."""
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
    ends_q, ends_k = (torch.tensor([0, t.shape[0]], dtype=torch.int32, device="cuda") for t in (q, k))
    # Grouped heads were accepted without being asked for before there was an argument.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def call() -> None:
        for _ in range(LAYERS):
            varlen_attn(q, k, v, ends_q, ends_k, len(q), len(k), window_size=(-1, 0), **grouped)

    return call


def _gate_up(s: Shape, tokens: int) -> dict[str, float]:
    """Microseconds from a normed input to silu(gate) * up."""
    bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    normed = torch.randn(tokens, s.hidden, **bf16)
    x = Stream(torch.randn(tokens, s.hidden, **bf16), normed=normed)
    g = torch.ones(s.hidden, **bf16)
    weights = [torch.randn(2 * s.inter, s.hidden, **bf16) * 0.02 for _ in range(4)]
    ops = TritonOps(torch.device("cuda"))

    def ours() -> None:
        for w in weights:
            ops.norm_mlp(x, g, EPS, w)

    def product() -> None:
        for w in weights:
            F.linear(normed, w)

    def theirs() -> None:
        for w in weights:
            gate, up = F.linear(normed, w).chunk(2, -1)
            F.silu(gate) * up

    def in_slices(size: int) -> Callable[[], None]:
        """cuBLAS and our pass for SiLU x gate, over so many tokens at a time: of few, what lies between is in L2."""

        def call() -> None:
            for w in weights:
                for part in normed.split(size):
                    silu_mul(ops.launch, F.linear(part, w))

        return call

    candidates = {"ours": ours, "cublas alone": product, "cublas + torch": theirs, "cublas + ours": in_slices(tokens)}
    candidates |= {f"the same in {size}s": in_slices(size) for size in (512, 1024) if size < tokens}
    return {name: replay_us(call, 4) for name, call in candidates.items()}
