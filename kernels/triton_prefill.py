"""Paged prefill attention: chunks of any length after cached prefixes of any length, packed, read through pages.

The rows of a tile are (token, query head) pairs of one KV head's group: row r is head r % G of token r // G, so a tile
of ROWS rows covers ROWS // G tokens and every cached key is read once for the whole group. Requests are packed without
padding; which request a program serves is found from cu_q on the device.

    keys       [ cached prefix | earlier new tokens | own tokens ]
                \\_________ no mask _______________/ \\_ masked _/
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.triton_attend import INDEX, LOG2E
from kernels.triton_common import Launch
from kernels.tuning import PrefillConfig


@triton.jit
def find_request(cu_q_ptr, tile, requests, TOKENS: tl.constexpr, SEARCH: tl.constexpr):
    """The request of a tile: request r's tiles start at cu_q[r] // TOKENS + r, an upper bound that needs no table."""
    rr = tl.arange(0, SEARCH)
    at_or_before = 0
    for r in range(0, requests, SEARCH):
        first = tl.load(cu_q_ptr + r + rr, mask=r + rr < requests, other=2147483647 // 2) // TOKENS + r + rr
        at_or_before += tl.sum((first <= tile).to(tl.int32), 0)
    return at_or_before - 1


@triton.jit
def _step(q, kc_ptr, vc_ptr, table_ptr, block, limit, pos, m_i, l_i, acc, kvh, scale, HKV: tl.constexpr,
          D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Keys [block * BLOCK, (block + 1) * BLOCK) against the tile's rows at positions ``pos``."""
    rd = tl.arange(0, D)
    tok = block * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        ok = tok < limit
        page = tl.load(table_ptr + tok // PAGE, mask=ok, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + tok // PAGE).to(tl.int64)
    base = ((page * PAGE + tok % PAGE) * HKV + kvh) * D
    if MASKED:
        k = tl.load(kc_ptr + base[None, :] + rd[:, None], mask=ok[None, :], other=0.0).to(q.dtype)
        v = tl.load(vc_ptr + base[:, None] + rd[None, :], mask=ok[:, None], other=0.0).to(q.dtype)
    else:
        k = tl.load(kc_ptr + base[None, :] + rd[:, None]).to(q.dtype)
        v = tl.load(vc_ptr + base[:, None] + rd[None, :]).to(q.dtype)
    s = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        s = tl.where(tok[None, :] <= pos[:, None], s, float("-inf"))
    # The fma is written out: left to the compiler, masked and plain blocks would round differently, and a row's result
    # would depend on where its chunk begins.
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(tl.fma(s, scale, -m_new[:, None]))
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit(do_not_specialize=["scale", "max_pages", "requests", "min_new"], do_not_specialize_on_alignment=INDEX)
def prefill_attention_kernel(qkv_ptr, kc_ptr, vc_ptr, table_ptr, len_ptr, cu_q_ptr, out_ptr, scale, max_pages,
                             requests, min_new, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
                             PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                             SEARCH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (M // TOKENS + R, HKV). qkv [M, (HQ + 2 HKV) * D] with q normed and rotated; all keys are in the cache
    [pages, PAGE, HKV, D]. Requests with fewer than min_new new tokens are someone else's."""
    G: tl.constexpr = HQ // HKV
    TOKENS: tl.constexpr = ROWS // G
    tile = tl.program_id(0)
    kvh = tl.program_id(1)
    b = find_request(cu_q_ptr, tile, requests, TOKENS, SEARCH)
    first = tl.load(cu_q_ptr + b)
    new = tl.load(cu_q_ptr + b + 1) - first
    tiles = (new + TOKENS - 1) // TOKENS
    local = tile - (first // TOKENS + b)
    if (local >= tiles) | (new < min_new):
        return
    local = tiles - 1 - local  # the longest rows start first
    kv_len = tl.load(len_ptr + b)
    prefix = kv_len - new
    r = tl.arange(0, ROWS)
    rd = tl.arange(0, D)
    tok = local * TOKENS + r // G
    inside = (r // G < TOKENS) & (tok < new)
    head = kvh * G + r % G
    row = (first + tok).to(tl.int64)
    q_at = qkv_ptr + row[:, None] * ((HQ + 2 * HKV) * D) + head[:, None] * D + rd[None, :]
    q = tl.load(q_at, mask=inside[:, None], other=0.0)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    table_ptr += b.to(tl.int64) * max_pages
    pos = prefix + tok
    # Every row of the tile sees all keys below the tile's first position, so whole blocks there need no mask.
    plain = (prefix + local * TOKENS) // BLOCK
    end = tl.minimum(prefix + (local + 1) * TOKENS, kv_len)
    for i in tl.range(0, plain, num_stages=STAGES):
        m_i, l_i, acc = _step(q, kc_ptr, vc_ptr, table_ptr, i, end, pos, m_i, l_i, acc, kvh, scale, HKV, D, PAGE,
                              BLOCK, False)  # fmt: skip
    for i in tl.range(plain, tl.cdiv(end, BLOCK), num_stages=1):
        m_i, l_i, acc = _step(q, kc_ptr, vc_ptr, table_ptr, i, end, pos, m_i, l_i, acc, kvh, scale, HKV, D, PAGE,
                              BLOCK, True)  # fmt: skip
    o_at = out_ptr + (row[:, None] * HQ + head[:, None]) * D + rd[None, :]
    tl.store(o_at, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


def prefill_attention(
    launch: Launch,
    config: PrefillConfig,
    qkv: torch.Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    shape: AttentionShape,
    out: torch.Tensor,
    *,
    min_new: int,
    search: int = 256,
) -> None:
    """Writes rows of ``out`` [M, num_heads * head_dim] of requests with at least ``min_new`` new tokens. qkv's q part
    is normed and rotated, and the new keys and values are in the cache. ``search``: requests compared
    in one go to find the one a program serves."""
    requests = meta.kv_len.shape[0]
    tokens = config.rows // (shape.num_heads // shape.num_kv_heads)
    launch(
        prefill_attention_kernel, (qkv.shape[0] // tokens + requests, shape.num_kv_heads), qkv, kv.k, kv.v,
        meta.block_table, meta.kv_len, meta.cu_q, out, shape.scale * LOG2E, meta.block_table.stride(0), requests,
        min_new, HQ=shape.num_heads, HKV=shape.num_kv_heads, D=shape.head_dim, PAGE=meta.page_size, ROWS=config.rows,
        BLOCK=config.block, STAGES=config.stages, SEARCH=search, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
