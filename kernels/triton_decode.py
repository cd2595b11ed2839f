"""Paged decode attention: one new token per request, split along the context, query heads of a group packed.

One program per (KV head, split, request) keeps the group's query heads as the rows of one tile, so every cached key is
read once. In fused form it takes the raw QKV projection: QK-norm, RoPE and the write of the new token's key and value
happen here, and the new token is attended from registers, so nothing waits for the cache write.

    context      |----- split 0 -----|----- split 1 -----|-- split 2 --*   * = the new token, position kv_len - 1,
                                                                           handled by the split that contains it

Leading splits that several requests have in common are left to :mod:`kernels.triton_shared`, which reads them once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.triton_attend import INDEX, LOG2E, attend, norm_rope
from kernels.triton_common import Launch, next_power_of_2, pdl_trigger, pdl_wait
from kernels.triton_shared import shared_attention
from kernels.tuning import DecodeConfig


@triton.jit
def _new_token(qkv_ptr, kw_ptr, cos, sin, kc_ptr, vc_ptr, slot, row, kvh, eps, write, HQ: tl.constexpr,
               HKV: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr):  # fmt: skip
    """Key halves [1, D / 2] and value [D] of the new token, as the cache holds them; written there if ``write``."""
    H: tl.constexpr = D // 2
    rh = tl.arange(0, H)
    rd = tl.arange(0, D)
    src = qkv_ptr + row * ((HQ + 2 * HKV) * D) + (HQ + kvh) * D
    a = tl.load(src + rh).to(tl.float32)[None, :]
    b = tl.load(src + H + rh).to(tl.float32)[None, :]
    a, b = norm_rope(a, b, kw_ptr, cos, sin, eps, D, QK_NORM)
    a = a.to(kc_ptr.dtype.element_ty)
    b = b.to(kc_ptr.dtype.element_ty)
    v = tl.load(src + HKV * D + rd).to(vc_ptr.dtype.element_ty)
    dst = (slot * HKV + kvh) * D
    tl.store(kc_ptr + dst + rh[None, :], a, mask=rh[None, :] < tl.where(write, H, 0))
    tl.store(kc_ptr + dst + H + rh[None, :], b, mask=rh[None, :] < tl.where(write, H, 0))
    tl.store(vc_ptr + dst + rd, v, mask=rd < tl.where(write, D, 0))
    return a.to(tl.float32), b.to(tl.float32), v.to(tl.float32)


@triton.jit(do_not_specialize=["eps", "scale", "max_pages", "split", "max_split"], do_not_specialize_on_alignment=INDEX)
def decode_attention_kernel(qkv_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, kc_ptr, vc_ptr, table_ptr, len_ptr, cu_q_ptr,
                            slot_ptr, covered_ptr, out_ptr, part_ptr, lse_ptr, scale, eps, max_pages, split, max_split,
                            HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                            PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FUSED: tl.constexpr,
                            QK_NORM: tl.constexpr, SINGLE: tl.constexpr, ALL_DECODE: tl.constexpr,
                            SHARED: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr):  # fmt: skip
    """Grid (HKV, max_split, R). qkv [M, (HQ + 2 HKV) * D]; cache [pages, PAGE, HKV, D]; table [R, max_pages].

    FUSED: qkv is raw. Otherwise its q part is normed and rotated already and the new token is in the cache.
    SINGLE: one program covers the whole context, nothing is combined afterwards.
    ALL_DECODE: request b is row b; otherwise rows come from cu_q and requests with more than one new token are left
    to the prefill kernel. Requests of length 0 are skipped and their output rows stay as they are.
    SHARED: splits below covered[b] are someone else's."""
    kvh = tl.program_id(0)
    part = tl.program_id(1)
    b = tl.program_id(2)
    G: tl.constexpr = HQ // HKV
    H: tl.constexpr = D // 2
    pdl_trigger(TRIGGER, 1)
    kv_len = tl.load(len_ptr + b)
    row = b
    if not ALL_DECODE:
        row = tl.load(cu_q_ptr + b)
        if tl.load(cu_q_ptr + b + 1) - row != 1:
            return
    start = part * split
    covered = tl.load(covered_ptr + b) if SHARED else 0
    if (start >= kv_len) | (start < covered):
        return
    rg = tl.arange(0, ROWS)
    rh = tl.arange(0, H)
    dt = out_ptr.dtype.element_ty
    pos = kv_len - 1
    slot = tl.load(slot_ptr + row).to(tl.int64)
    pdl_wait(PDL)
    row = row.to(tl.int64)
    q_at = qkv_ptr + row * ((HQ + 2 * HKV) * D) + (kvh * G + rg[:, None]) * D + rh[None, :]
    q1 = tl.load(q_at, mask=rg[:, None] < G, other=0.0).to(tl.float32)
    q2 = tl.load(q_at + H, mask=rg[:, None] < G, other=0.0).to(tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    end = tl.minimum(start + split, kv_len)
    if FUSED:
        cos = tl.load(cos_ptr + pos * H + rh)[None, :]
        sin = tl.load(sin_ptr + pos * H + rh)[None, :]
        q1, q2 = norm_rope(q1, q2, qw_ptr, cos, sin, eps, D, QK_NORM)
    q1 = q1.to(dt)
    q2 = q2.to(dt)
    if FUSED:
        mine = end == kv_len
        k1, k2, v = _new_token(qkv_ptr, kw_ptr, cos, sin, kc_ptr, vc_ptr, slot, row, kvh, eps, mine, HQ, HKV, D,
                               QK_NORM)  # fmt: skip
        end = tl.minimum(end, pos)
        s = tl.sum(q1.to(tl.float32) * k1, 1) + tl.sum(q2.to(tl.float32) * k2, 1)
        m_i = tl.where(mine, s * scale, float("-inf"))
        l_i += tl.where(mine, 1.0, 0.0)
        acc += tl.where(mine, 1.0, 0.0) * v[None, :]
    m_i, l_i, acc = attend(q1, q2, m_i, l_i, acc, kc_ptr, vc_ptr, table_ptr + b.to(tl.int64) * max_pages, start, end,
                           kvh, scale, HKV, D, PAGE, BLOCK, STAGES)  # fmt: skip
    pdl_trigger(TRIGGER, 2)
    _store(acc, m_i, l_i, out_ptr, part_ptr, lse_ptr, row, b, part, kvh, rg, kv_len, split, max_split, HQ, G, D,
           SINGLE)  # fmt: skip


@triton.jit
def _store(acc, m_i, l_i, out_ptr, part_ptr, lse_ptr, row, b, part, kvh, rg, kv_len, split, max_split,
           HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """The finished rows if this is the only split, else normalized partials and their log2-sum-exp2."""
    rd = tl.arange(0, D)
    head = kvh * G + rg
    inside = (rg[:, None] < G) & (rd[None, :] < D)
    out = (row * HQ + head[:, None]) * D + rd[None, :]
    if SINGLE:
        tl.store(out_ptr + out, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        if kv_len <= split:
            tl.store(out_ptr + out, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        else:
            at = (b * HQ + head).to(tl.int64) * max_split + part
            tl.store(part_ptr + at[:, None] * D + rd[None, :], acc / l_i[:, None], mask=inside)
            tl.store(lse_ptr + at, m_i + tl.log2(l_i), mask=rg < G)


@triton.jit(do_not_specialize=["split", "max_split"], do_not_specialize_on_alignment=INDEX)
def combine_kernel(part_ptr, lse_ptr, len_ptr, cu_q_ptr, out_ptr, split, max_split, HQ: tl.constexpr,
                   D: tl.constexpr, CHUNK: tl.constexpr, ALL_DECODE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Merges the partials of each (query head, request), in split order. Grid (HQ, R)."""
    h = tl.program_id(0)
    b = tl.program_id(1)
    kv_len = tl.load(len_ptr + b)
    row = b
    if not ALL_DECODE:
        row = tl.load(cu_q_ptr + b)
        if tl.load(cu_q_ptr + b + 1) - row != 1:
            return
    pdl_wait(PDL)
    if kv_len <= split:
        return
    parts = (kv_len + split - 1) // split
    rc = tl.arange(0, CHUNK)
    rd = tl.arange(0, D)
    first = (b * HQ + h).to(tl.int64) * max_split
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for c in range(0, parts, CHUNK):
        ok = c + rc < parts
        lse = tl.load(lse_ptr + first + c + rc, mask=ok, other=float("-inf"))
        o = tl.load(part_ptr + (first + c + rc)[:, None] * D + rd[None, :], mask=ok[:, None], other=0.0)
        top_new = tl.maximum(top, tl.max(lse, 0))
        alpha = tl.exp2(top - top_new)
        w = tl.exp2(lse - top_new)
        total = total * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(o * w[:, None], 0)
        top = top_new
    tl.store(out_ptr + (row.to(tl.int64) * HQ + h) * D + rd, (acc / total).to(out_ptr.dtype.element_ty))


def decode_attention(
    launch: Launch,
    config: DecodeConfig,
    qkv: torch.Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    shape: AttentionShape,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    *,
    fused: bool,
) -> None:
    """Writes rows of ``out`` [M, num_heads * head_dim] that belong to requests with one new token."""
    requests = meta.kv_len.shape[0]
    shared = meta.shared
    if shared is not None:
        config = replace(config, split=shared.split)
    single = config.split == 0  # not for short contexts: that would be one more variant to compile
    split = next_power_of_2(max(meta.max_kv, config.block)) if single else config.split
    max_split = 1 if single else triton.cdiv(meta.max_kv, split)
    assert kv.k.is_contiguous() and kv.v.is_contiguous(), "pages must be contiguous"
    assert split % config.block == 0, f"split {split} is no multiple of the block {config.block}"
    group = shape.num_heads // shape.num_kv_heads
    unused: Any = out
    part = lse = unused
    if not single:
        count = requests * shape.num_heads * max_split
        part = torch.empty(count * shape.head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(count, dtype=torch.float32, device=out.device)
    heads = {"HQ": shape.num_heads, "D": shape.head_dim, "ALL_DECODE": meta.decode_only}
    if shared is not None:
        shared_attention(launch, shared, qkv, kv, meta, shape, q_norm, cos, sin, part, lse, max_split, fused=fused)
    launch(
        decode_attention_kernel, (shape.num_kv_heads, max_split, requests), qkv, unused if q_norm is None else q_norm,
        unused if k_norm is None else k_norm, cos, sin, kv.k, kv.v, meta.block_table, meta.kv_len, meta.cu_q,
        meta.slots, meta.kv_len if shared is None else shared.covered, out, part, lse, shape.scale * LOG2E, shape.eps,
        meta.block_table.stride(0), split, max_split, HKV=shape.num_kv_heads, ROWS=max(16, next_power_of_2(group)),
        PAGE=meta.page_size, BLOCK=config.block, STAGES=config.stages, FUSED=fused, QK_NORM=q_norm is not None,
        SINGLE=single, SHARED=shared is not None, pdl=config.pdl, trigger=config.trigger, num_warps=config.warps,
        **heads,
    )  # fmt: skip
    if not single:
        launch(
            combine_kernel, (shape.num_heads, requests), part, lse, meta.kv_len, meta.cu_q, out, split, max_split,
            CHUNK=16, pdl=config.pdl, num_warps=4, **heads,
        )  # fmt: skip
