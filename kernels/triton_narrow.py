"""Attention over pages of int8 or int4: codes are read as they are and become numbers in registers.

    scores    (q . codes) * scale of the key's token      the scale is taken out of the product, so codes go to the
    values    (p * scale of the value's token) . codes     tensor cores as whole numbers, exact in bf16

A head's dimensions come in two halves everywhere, since a byte of int4 holds dimension i and D / 2 + i. One kernel does
chunks and single tokens: rows of a tile are (token, query head) pairs of one KV head as in ``triton_prefill``; contexts
of requests with one new token may be split, and are then put together by ``triton_decode``'s second kernel. New tokens
are stored first and read back, so what a token sees does not depend on the chunk that it comes in.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.triton_attend import INDEX, LOG2E
from kernels.triton_common import Launch, next_power_of_2
from kernels.triton_decode import combine_kernel
from kernels.triton_prefill import find_request
from kernels.triton_rope import rope_write
from kernels.tuning import decode_attention_config


@triton.jit
def _store_row(a, b, codes_ptr, scale_ptr, at, write, H: tl.constexpr, BITS: tl.constexpr):
    """Halves a, b [H], fp32, of one head to place ``at`` (in heads) of the pages."""
    rh = tl.arange(0, H)
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2^23: fp32 has no fractions there, so adding it rounds, ties to even
    scale = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0)) / LEVELS
    # a NaN is lost in a maximum; it must show, or a faulty request would be given tokens
    scale = tl.where(tl.sum(a + b, 0) * 0.0 == 0.0, scale, float("nan"))
    safe = tl.maximum(scale, 1.1754944e-38)
    a = tl.where(a == a, a / safe, 0.0) + MAGIC - MAGIC
    b = tl.where(b == b, b / safe, 0.0) + MAGIC - MAGIC
    a = tl.minimum(tl.maximum(a, -LEVELS), LEVELS).to(tl.int32)
    b = tl.minimum(tl.maximum(b, -LEVELS), LEVELS).to(tl.int32)
    tl.store(scale_ptr + at, scale, mask=write)
    if BITS == 8:
        dst = codes_ptr + at * (2 * H) + rh
        tl.store(dst, a.to(tl.int8), mask=rh < tl.where(write, H, 0))
        tl.store(dst + H, b.to(tl.int8), mask=rh < tl.where(write, H, 0))
    else:
        packed = (a + 8) | ((b + 8) << 4)
        tl.store(codes_ptr + at * H + rh, packed.to(tl.uint8), mask=rh < tl.where(write, H, 0))


@triton.jit(do_not_specialize_on_alignment=INDEX)
def narrow_write_kernel(qkv_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, slot_ptr, HQ: tl.constexpr, HKV: tl.constexpr,
                        D: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (M, HKV). Rotated keys, and values, of qkv [M, (HQ + 2 HKV) * D] to the pages at slot = page * PAGE +
    offset; a slot below 0 is not written."""
    H: tl.constexpr = D // 2
    rh = tl.arange(0, H)
    row = tl.program_id(0).to(tl.int64)
    kvh = tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    write = slot >= 0
    at = tl.where(write, slot, 0) * HKV + kvh
    src = qkv_ptr + row * ((HQ + 2 * HKV) * D) + (HQ + kvh) * D + rh
    a, b = tl.load(src).to(tl.float32), tl.load(src + H).to(tl.float32)
    _store_row(a, b, kc_ptr, ks_ptr, at, write, H, BITS)
    src += HKV * D
    a, b = tl.load(src).to(tl.float32), tl.load(src + H).to(tl.float32)
    _store_row(a, b, vc_ptr, vs_ptr, at, write, H, BITS)


@triton.jit
def _halves(ptr, ok, H: tl.constexpr, BITS: tl.constexpr, DT: tl.constexpr):
    """Codes at ``ptr``, which points at first-half elements, as two tiles of whole numbers."""
    if BITS == 8:
        return tl.load(ptr, mask=ok, other=0).to(DT), tl.load(ptr + H, mask=ok, other=0).to(DT)
    else:
        packed = tl.load(ptr, mask=ok, other=0).to(tl.int32)
        return ((packed & 15) - 8).to(DT), ((packed >> 4) - 8).to(DT)


@triton.jit(do_not_specialize=["scale", "max_pages", "requests", "split", "max_split"],
            do_not_specialize_on_alignment=INDEX)  # fmt: skip
def narrow_attention_kernel(qkv_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, len_ptr, cu_q_ptr, out_ptr, part_ptr,
                            lse_ptr, scale, max_pages, requests, split, max_split, HQ: tl.constexpr,
                            HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
                            BLOCK: tl.constexpr, STAGES: tl.constexpr, SEARCH: tl.constexpr, BITS: tl.constexpr,
                            PDL: tl.constexpr):  # fmt: skip
    """Grid (M // TOKENS + R, HKV, max_split). q is normed and rotated, all keys and values are in the pages. Only
    requests with one new token are split; split, a multiple of BLOCK, is in tokens."""
    G: tl.constexpr = HQ // HKV
    H: tl.constexpr = D // 2
    WIDTH: tl.constexpr = D if BITS == 8 else H
    TOKENS: tl.constexpr = ROWS // G
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    tile = tl.program_id(0)
    kvh = tl.program_id(1)
    part = tl.program_id(2)
    b = find_request(cu_q_ptr, tile, requests, TOKENS, SEARCH)
    first = tl.load(cu_q_ptr + b)
    new = tl.load(cu_q_ptr + b + 1) - first
    tiles = (new + TOKENS - 1) // TOKENS
    local = tile - (first // TOKENS + b)
    kv_len = tl.load(len_ptr + b)
    start = part * split
    if (local >= tiles) | (start >= kv_len) | ((new > 1) & (part > 0)):
        return
    local = tiles - 1 - local
    end = tl.minimum(kv_len - new + (local + 1) * TOKENS, kv_len)
    if new == 1:
        end = tl.minimum(end, start + split)
    r = tl.arange(0, ROWS)
    rh = tl.arange(0, H)
    tok = local * TOKENS + r // G
    inside = (r // G < TOKENS) & (tok < new)
    head = kvh * G + r % G
    row = (first + tok).to(tl.int64)
    pos = kv_len - new + tok
    q_at = qkv_ptr + row[:, None] * ((HQ + 2 * HKV) * D) + head[:, None] * D + rh[None, :]
    q1 = tl.load(q_at, mask=inside[:, None], other=0.0)
    q2 = tl.load(q_at + H, mask=inside[:, None], other=0.0)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc1 = tl.zeros([ROWS, H], tl.float32)
    acc2 = tl.zeros([ROWS, H], tl.float32)
    table_ptr += b.to(tl.int64) * max_pages
    for i in tl.range(start // BLOCK, tl.cdiv(end, BLOCK), num_stages=STAGES):
        key = i * BLOCK + tl.arange(0, BLOCK)
        ok = key < end
        page = tl.load(table_ptr + key // PAGE, mask=ok, other=0).to(tl.int64)
        at = (page * PAGE + key % PAGE) * HKV + kvh
        k1, k2 = _halves(kc_ptr + at[None, :] * WIDTH + rh[:, None], ok[None, :], H, BITS, DT)
        s = tl.dot(q1, k1, input_precision="ieee")
        s = tl.dot(q2, k2, s, input_precision="ieee")
        s *= (tl.load(ks_ptr + at, mask=ok, other=0.0) * scale)[None, :]
        s = tl.where(key[None, :] <= pos[:, None], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(s - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        v1, v2 = _halves(vc_ptr + at[:, None] * WIDTH + rh[None, :], ok[:, None], H, BITS, DT)
        p = (p * tl.load(vs_ptr + at, mask=ok, other=0.0)[None, :]).to(DT)
        acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")
        acc2 = tl.dot(p, v2, acc2 * alpha[:, None], input_precision="ieee")
        m_i = m_new
    acc1 = acc1 / l_i[:, None]
    acc2 = acc2 / l_i[:, None]
    if (new > 1) | (kv_len <= split):
        o_at = out_ptr + (row[:, None] * HQ + head[:, None]) * D + rh[None, :]
        tl.store(o_at, acc1.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(o_at + H, acc2.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        at = (b * HQ + head).to(tl.int64) * max_split + part
        tl.store(part_ptr + at[:, None] * D + rh[None, :], acc1, mask=inside[:, None])
        tl.store(part_ptr + at[:, None] * D + H + rh[None, :], acc2, mask=inside[:, None])
        tl.store(lse_ptr + at, m_i + tl.log2(l_i), mask=inside)


def narrow_attention(
    launch: Launch,
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
    splits: bool,
    search: int = 256,
) -> None:
    """All of ``Ops.attention`` for pages of int8 and int4: changes qkv in place, writes the pages and all of ``out``.
    Without ``splits`` a row's result does not depend on the batch."""
    assert kv.k_scale is not None and kv.v_scale is not None
    heads, kv_heads, requests = shape.num_heads, shape.num_kv_heads, meta.kv_len.shape[0]
    sizes = {"HQ": heads, "HKV": kv_heads, "D": shape.head_dim}
    bits = 8 if kv.k.dtype == torch.int8 else 4
    nowhere = replace(meta, slots=torch.full_like(meta.slots, -1))
    rope_write(launch, qkv, LayerKV(qkv, qkv), nowhere, shape, q_norm, k_norm, cos, sin)
    launch(
        narrow_write_kernel, (qkv.shape[0], kv_heads), qkv, kv.k, kv.v, kv.k_scale, kv.v_scale, meta.slots,
        BITS=bits, num_warps=1, **sizes,
    )  # fmt: skip
    group = heads // kv_heads
    alone = meta.decode_only and splits
    rows, block = (max(16, next_power_of_2(group)), 64) if alone else (max(64, next_power_of_2(group)), 32)
    split = decode_attention_config(requests, kv_heads, meta.max_kv).split if splits else 0
    split = -(-split // block) * block if split else next_power_of_2(max(meta.max_kv, block))
    max_split = triton.cdiv(meta.max_kv, split)
    count = requests * heads * max_split
    part = torch.empty(count * shape.head_dim, dtype=torch.float32, device=out.device)
    lse = torch.empty(count, dtype=torch.float32, device=out.device)
    tokens = rows // group
    launch(
        narrow_attention_kernel, (qkv.shape[0] // tokens + requests, kv_heads, max_split), qkv, kv.k, kv.v,
        kv.k_scale, kv.v_scale, meta.block_table, meta.kv_len, meta.cu_q, out, part, lse, shape.scale * LOG2E,
        meta.block_table.stride(0), requests, split, max_split, PAGE=meta.page_size, ROWS=rows, BLOCK=block,
        STAGES=2, SEARCH=search, BITS=bits, num_warps=4, **sizes,
    )  # fmt: skip
    if max_split > 1:
        launch(
            combine_kernel, (heads, requests), part, lse, meta.kv_len, meta.cu_q, out, split, max_split, CHUNK=16,
            ALL_DECODE=meta.decode_only, HQ=heads, D=shape.head_dim, num_warps=4,
        )  # fmt: skip
