"""Decode attention over what requests have in common: a split of the context is read once for all who share it.

    request 0   |== split 0 ==|== split 1 ==|-- own --*       one program for split 0 and these three requests,
    request 1   |== split 0 ==|== split 1 ==|---- own ----*   one for split 1 and the first two
    request 2   |== split 0 ==|-- own --*

The rows of a tile are (request, query head) pairs of one KV head's group. Results are the partials that decode
attention would have written for these splits, so its combine kernel merges them like any others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionMeta, AttentionShape, LayerKV, SharedSplits
from kernels.triton_attend import INDEX, LOG2E, attend, norm_rope
from kernels.triton_common import Launch, next_power_of_2

ROWS = 64
BLOCK, STAGES, WARPS = 64, 3, 4


def members(shape: AttentionShape) -> int:
    """How many requests one program serves; below 2 nothing can be shared."""
    return ROWS // next_power_of_2(shape.num_heads // shape.num_kv_heads)


@triton.jit(do_not_specialize=["eps", "scale", "max_pages", "split", "max_split"], do_not_specialize_on_alignment=INDEX)
def shared_attention_kernel(qkv_ptr, qw_ptr, cos_ptr, sin_ptr, kc_ptr, vc_ptr, table_ptr, len_ptr, cu_q_ptr, items_ptr,
                            part_ptr, lse_ptr, scale, eps, max_pages, split, max_split, HQ: tl.constexpr,
                            HKV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr,
                            PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FUSED: tl.constexpr,
                            QK_NORM: tl.constexpr, ALL_DECODE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (HKV, I). items [I, 1 + MEMBERS]; the first member's block table is read for all. GROUP: query heads of a
    KV head, rounded up to a power of two. FUSED, ALL_DECODE: as in decode attention."""
    kvh = tl.program_id(0)
    items_ptr += tl.program_id(1) * (MEMBERS + 1)
    part = tl.load(items_ptr)
    if part < 0:
        return
    G: tl.constexpr = HQ // HKV
    H: tl.constexpr = D // 2
    r = tl.arange(0, MEMBERS * GROUP)
    rh = tl.arange(0, H)
    rd = tl.arange(0, D)
    b = tl.load(items_ptr + 1 + r // GROUP)
    ok = (b >= 0) & (r % GROUP < G)
    head = kvh * G + r % GROUP
    row = b
    if not ALL_DECODE:
        row = tl.load(cu_q_ptr + b, mask=ok, other=0)
    row = tl.where(ok, row, 0).to(tl.int64)
    q_at = qkv_ptr + (row * ((HQ + 2 * HKV) * D) + head * D)[:, None] + rh[None, :]
    q1 = tl.load(q_at, mask=ok[:, None], other=0.0)
    q2 = tl.load(q_at + H, mask=ok[:, None], other=0.0)
    dt = q1.dtype
    if FUSED:
        pos = tl.load(len_ptr + b, mask=ok, other=1) - 1
        cos = tl.load(cos_ptr + pos[:, None] * H + rh[None, :])
        sin = tl.load(sin_ptr + pos[:, None] * H + rh[None, :])
        q1, q2 = norm_rope(q1.to(tl.float32), q2.to(tl.float32), qw_ptr, cos, sin, eps, D, QK_NORM)
        q1 = q1.to(dt)
        q2 = q2.to(dt)
    m_i = tl.full([MEMBERS * GROUP], float("-inf"), tl.float32)
    l_i = tl.zeros([MEMBERS * GROUP], tl.float32)
    acc = tl.zeros([MEMBERS * GROUP, D], tl.float32)
    table_ptr += tl.load(items_ptr + 1).to(tl.int64) * max_pages
    start = part * split
    m_i, l_i, acc = attend(q1, q2, m_i, l_i, acc, kc_ptr, vc_ptr, table_ptr, start, start + split, kvh, scale, HKV, D,
                           PAGE, BLOCK, STAGES)  # fmt: skip
    at = (b * HQ + head).to(tl.int64) * max_split + part
    tl.store(part_ptr + at[:, None] * D + rd[None, :], acc / l_i[:, None], mask=ok[:, None])
    tl.store(lse_ptr + at, m_i + tl.log2(l_i), mask=ok)


def shared_attention(
    launch: Launch,
    shared: SharedSplits,
    qkv: torch.Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    shape: AttentionShape,
    q_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    part: torch.Tensor,
    lse: torch.Tensor,
    max_split: int,
    *,
    fused: bool,
) -> None:
    """Writes the partials of all items: ``part`` fp32 [requests, heads, max_split, head_dim], ``lse`` the same without
    head_dim."""
    unused: Any = qkv
    assert shared.items.shape[1] == 1 + members(shape) and shared.split % BLOCK == 0
    launch(
        shared_attention_kernel, (shape.num_kv_heads, shared.items.shape[0]), qkv,
        unused if q_norm is None else q_norm, cos, sin, kv.k, kv.v, meta.block_table, meta.kv_len, meta.cu_q,
        shared.items, part, lse, shape.scale * LOG2E, shape.eps, meta.block_table.stride(0), shared.split, max_split,
        HQ=shape.num_heads, HKV=shape.num_kv_heads, D=shape.head_dim,
        GROUP=next_power_of_2(shape.num_heads // shape.num_kv_heads), MEMBERS=members(shape), PAGE=meta.page_size,
        BLOCK=BLOCK, STAGES=STAGES, FUSED=fused, QK_NORM=q_norm is not None, ALL_DECODE=meta.decode_only,
        num_warps=WARPS,
    )  # fmt: skip
