"""QK-norm, RoPE and the KV write of any number of packed tokens, in one kernel (prefill and mixed batches)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.triton_attend import INDEX, norm_rope
from kernels.triton_common import Launch, next_power_of_2, pdl_wait


@triton.jit
def _rotate_heads(src, w_ptr, cos, sin, eps, heads, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    H: tl.constexpr = D // 2
    rr = tl.arange(0, HEADS)
    rh = tl.arange(0, H)
    at = src + rr[:, None] * D + rh[None, :]
    inside = rr[:, None] < heads
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + H, mask=inside, other=0.0).to(tl.float32)
    return norm_rope(a, b, w_ptr, cos, sin, eps, D, NORM)


@triton.jit
def _rotate_q(src, w_ptr, cos, sin, eps, HQ: tl.constexpr, D: tl.constexpr, QB: tl.constexpr, NORM: tl.constexpr):
    H: tl.constexpr = D // 2
    rr = tl.arange(0, QB)
    rh = tl.arange(0, H)
    a, b = _rotate_heads(src, w_ptr, cos, sin, eps, HQ, QB, D, NORM)
    to = src + rr[:, None] * D + rh[None, :]
    tl.store(to, a.to(src.dtype.element_ty), mask=rr[:, None] < HQ)
    tl.store(to + H, b.to(src.dtype.element_ty), mask=rr[:, None] < HQ)


@triton.jit
def _rotate_k(src, w_ptr, cos, sin, kc_ptr, vc_ptr, slot, eps, HKV: tl.constexpr, D: tl.constexpr, KB: tl.constexpr,
              NORM: tl.constexpr):  # fmt: skip
    H: tl.constexpr = D // 2
    rr = tl.arange(0, KB)
    rh = tl.arange(0, H)
    rd = tl.arange(0, D)
    inside = rr[:, None] < HKV
    write = rr[:, None] < tl.where(slot >= 0, HKV, 0)
    v = tl.load(src + HKV * D + rr[:, None] * D + rd[None, :], mask=inside, other=0.0)
    a, b = _rotate_heads(src, w_ptr, cos, sin, eps, HKV, KB, D, NORM)
    at = slot * (HKV * D) + rr[:, None] * D
    tl.store(kc_ptr + at + rh[None, :], a.to(kc_ptr.dtype.element_ty), mask=write)
    tl.store(kc_ptr + at + H + rh[None, :], b.to(kc_ptr.dtype.element_ty), mask=write)
    tl.store(vc_ptr + at + rd[None, :], v.to(vc_ptr.dtype.element_ty), mask=write)
    to = src + rr[:, None] * D + rh[None, :]
    tl.store(to, a.to(src.dtype.element_ty), mask=inside)
    tl.store(to + H, b.to(src.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=INDEX)
def rope_write_kernel(qkv_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, kc_ptr, vc_ptr, slot_ptr, pos_ptr, eps,
                      HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, QB: tl.constexpr, KB: tl.constexpr,
                      QK_NORM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (M, 2): part 0 norms and rotates q in place; part 1 does the same to k, in place and into the cache
    [pages, PAGE, HKV, D] at slot = page * PAGE + offset, and copies v there; a slot below 0 is not written. QB, KB >=
    HQ, HKV: powers of two."""
    H: tl.constexpr = D // 2
    rh = tl.arange(0, H)
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    pos = tl.load(pos_ptr + row)
    cos = tl.load(cos_ptr + pos * H + rh)[None, :]
    sin = tl.load(sin_ptr + pos * H + rh)[None, :]
    src = qkv_ptr + row * ((HQ + 2 * HKV) * D)
    if tl.program_id(1) == 0:
        _rotate_q(src, qw_ptr, cos, sin, eps, HQ, D, QB, QK_NORM)
    else:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        _rotate_k(src + HQ * D, kw_ptr, cos, sin, kc_ptr, vc_ptr, slot, eps, HKV, D, KB, QK_NORM)


def rope_write(
    launch: Launch,
    qkv: torch.Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    shape: AttentionShape,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Changes qkv [M, (num_heads + 2 num_kv_heads) * head_dim] in place and writes kv at ``meta.slots``."""
    assert kv.k.is_contiguous() and kv.v.is_contiguous(), "pages must be contiguous"
    unused: Any = qkv
    launch(
        rope_write_kernel, (qkv.shape[0], 2), qkv, unused if q_norm is None else q_norm,
        unused if k_norm is None else k_norm, cos, sin, kv.k, kv.v, meta.slots, meta.positions, shape.eps,
        HQ=shape.num_heads, HKV=shape.num_kv_heads, D=shape.head_dim, QB=next_power_of_2(shape.num_heads),
        KB=next_power_of_2(shape.num_kv_heads), QK_NORM=q_norm is not None, num_warps=4,
    )  # fmt: skip
