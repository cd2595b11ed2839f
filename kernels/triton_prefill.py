"""Paged prefill attention: chunks of any length after cached prefixes of any length, packed, read through pages.

The rows of a tile are (token, query head) pairs of one KV head's group: row r is head r % G of token r // G, so a tile
of ROWS rows covers ROWS // G tokens and every cached key is read once for the whole group. Requests are packed without
padding; which request a program serves is found from cu_q on the device.

    keys       [ cached prefix | earlier new tokens | own tokens ]
                \\_________ no mask _______________/ \\_ masked _/

Where there is a copy engine (sm_90), new keys are read from the projection itself, and prefixes after being copied out
of their pages: what is not masked then comes in tiles that one instruction fetches, instead of 16 bytes a thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.triton_attend import INDEX, LOG2E
from kernels.triton_common import Launch
from kernels.tuning import PrefillConfig

GATHER_ROOM = 32768
"""Tokens of prefixes that are gathered in one step, at most: 4 KiB each with 8 KV heads of 128. The rest is read
through pages."""
GATHER_PROGRAMS = 528
"""Four on each multiprocessor of an H200; where there is nothing to gather, they cost about a microsecond."""


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
def prefix_blocks(len_ptr, cu_q_ptr, r, requests, min_new, BLOCK: tl.constexpr):
    """Whole blocks in the prefixes of requests r; 0 beyond ``requests`` and with fewer than min_new new tokens."""
    mine = r < requests
    new = tl.load(cu_q_ptr + r + 1, mask=mine, other=0) - tl.load(cu_q_ptr + r, mask=mine, other=0)
    prefix = tl.load(len_ptr + r, mask=mine, other=0) - new
    return tl.where(mine & (new >= min_new), prefix // BLOCK, 0)


@triton.jit
def blocks_before(len_ptr, cu_q_ptr, b, min_new, BLOCK: tl.constexpr, SEARCH: tl.constexpr):
    """Where the gathered prefix of request b begins, in blocks."""
    blocks = 0
    for r in range(0, b, SEARCH):
        blocks += tl.sum(prefix_blocks(len_ptr, cu_q_ptr, r + tl.arange(0, SEARCH), b, min_new, BLOCK), 0)
    return blocks


@triton.jit(do_not_specialize=["max_pages", "requests", "min_new", "room"], do_not_specialize_on_alignment=INDEX)
def gather_kernel(kc_ptr, vc_ptr, table_ptr, len_ptr, cu_q_ptr, near_ptr, max_pages, requests, min_new, room,
                  HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Copies the whole blocks of the prefixes of requests with at least min_new new tokens, one after the other, to
    near [room * BLOCK, 2 * HKV * D]: keys, then values of a token. What has no room is left out. Any grid."""
    total = tl.minimum(blocks_before(len_ptr, cu_q_ptr, requests, min_new, BLOCK, SEARCH), room)
    rr = tl.arange(0, SEARCH)
    rb = tl.arange(0, BLOCK)
    rd = tl.arange(0, D)
    for item in range(tl.program_id(0), total * HKV, tl.num_programs(0)):
        block = item // HKV
        kvh = item % HKV
        b = 0
        start = 0
        before = 0
        for r in range(0, requests, SEARCH):
            blocks = prefix_blocks(len_ptr, cu_q_ptr, r + rr, requests, min_new, BLOCK)
            over = (r + rr < requests) & (before + tl.cumsum(blocks, 0) <= block)
            b += tl.sum(over.to(tl.int32), 0)
            start += tl.sum(tl.where(over, blocks, 0), 0)
            before += tl.sum(blocks, 0)
        tok = (block - start) * BLOCK + rb
        page = tl.load(table_ptr + tl.cast(b, tl.int64) * max_pages + tok // PAGE).to(tl.int64)
        at = ((page * PAGE + tok % PAGE) * HKV + kvh)[:, None] * D + rd[None, :]
        to = near_ptr + (block * BLOCK + rb).to(tl.int64)[:, None] * (2 * HKV * D) + kvh * D + rd[None, :]
        tl.store(to, tl.load(kc_ptr + at))
        tl.store(to + HKV * D, tl.load(vc_ptr + at))


@triton.jit
def _weigh(s, m_i, l_i, scale, DT: tl.constexpr):
    """A block of scores [ROWS, BLOCK] (-inf: not seen) into the running maximum and sum: its weights, and the factor by
    which what was accumulated before shrinks."""
    # The fma is written out: left to the compiler, masked and plain blocks would round differently, and a row's result
    # would depend on where its chunk begins.
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(tl.fma(s, scale, -m_new[:, None]))
    return m_new, l_i * alpha + tl.sum(p, 1), alpha, p.to(DT)


@triton.jit
def _pages(q, kc_ptr, vc_ptr, table_ptr, block, end, last, m_i, l_i, acc, kvh, scale, HKV: tl.constexpr,
           D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Keys [block * BLOCK, (block + 1) * BLOCK) of the context. MASKED: those below ``end``, up to a row's ``last``."""
    rd = tl.arange(0, D)
    tok = block * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        ok = tok < end
        page = tl.load(table_ptr + tok // PAGE, mask=ok, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + tok // PAGE).to(tl.int64)
    at = ((page * PAGE + tok % PAGE) * HKV + kvh) * D
    if MASKED:
        m_i, l_i, acc = _masked(q, kc_ptr + at, vc_ptr + at, ok, tok, last, m_i, l_i, acc, scale, D)
    else:
        k = tl.load(kc_ptr + at[None, :] + rd[:, None]).to(q.dtype)
        v = tl.load(vc_ptr + at[:, None] + rd[None, :]).to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee")
        m_i, l_i, alpha, p = _weigh(s, m_i, l_i, scale, q.dtype)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def _masked(q, k_at, v_at, ok, key, last, m_i, l_i, acc, scale, D: tl.constexpr):
    """A block of keys at ``k_at`` [BLOCK], those of them that are ``ok``; a row sees keys up to its ``last``. Others
    are not even read: they may be NaN, and another request's."""
    rd = tl.arange(0, D)
    k = tl.load(k_at[None, :] + rd[:, None], mask=ok[None, :], other=0.0).to(q.dtype)
    v = tl.load(v_at[:, None] + rd[None, :], mask=ok[:, None], other=0.0).to(q.dtype)
    s = tl.dot(q, k, input_precision="ieee")
    s = tl.where(ok[None, :] & (key[None, :] <= last[:, None]), s, float("-inf"))
    m_i, l_i, alpha, p = _weigh(s, m_i, l_i, scale, q.dtype)
    return m_i, l_i, tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")


@triton.jit
def _near(q, desc, row, k_column, v_column, blocks, m_i, l_i, acc, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Blocks of keys and values that lie one after the other from ``row`` on and that all rows see, through the copy
    engine: no thread computes an address."""
    for i in tl.range(0, blocks, num_stages=STAGES):
        s = tl.dot(q, desc.load([row + i * BLOCK, k_column]).T, input_precision="ieee")
        m_i, l_i, alpha, p = _weigh(s, m_i, l_i, scale, q.dtype)
        v = desc.load([row + i * BLOCK, v_column])
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["scale", "max_pages", "requests", "min_new", "room"],
            do_not_specialize_on_alignment=INDEX)  # fmt: skip
def prefill_attention_kernel(qkv_ptr, fresh_desc, near_desc, kc_ptr, vc_ptr, table_ptr, len_ptr, cu_q_ptr, out_ptr,
                             scale, max_pages, requests, min_new, room, HQ: tl.constexpr, HKV: tl.constexpr,
                             D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                             STAGES: tl.constexpr, FRESH: tl.constexpr, GATHER: tl.constexpr, SEARCH: tl.constexpr,
                             PDL: tl.constexpr):  # fmt: skip
    """Grid (M // TOKENS + R, HKV). qkv [M, (HQ + 2 HKV) * D] with q and k normed and rotated; all keys are in the cache
    [pages, PAGE, HKV, D]. Requests with fewer than min_new new tokens are someone else's. FRESH: keys of this step are
    read from qkv, fresh_desc being a descriptor of it with block [BLOCK, D]. GATHER: the whole blocks of a prefix are
    read where gather_kernel put them, as far as there was room; near_desc has the same block."""
    G: tl.constexpr = HQ // HKV
    WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
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
    q_at = qkv_ptr + row[:, None] * WIDTH + head[:, None] * D + rd[None, :]
    q = tl.load(q_at, mask=inside[:, None], other=0.0)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    table_ptr += b.to(tl.int64) * max_pages
    # Every row of the tile sees all keys below the tile's first position, so whole blocks there need no mask.
    seen = local * TOKENS
    if FRESH:
        plain = prefix // BLOCK
        end = prefix
    else:
        plain = (prefix + seen) // BLOCK
        end = tl.minimum(prefix + seen + TOKENS, kv_len)
    near = 0
    if GATHER:
        before = blocks_before(len_ptr, cu_q_ptr, b, min_new, BLOCK, SEARCH)
        near = tl.minimum(plain, tl.maximum(room - before, 0))
        m_i, l_i, acc = _near(q, near_desc, before * BLOCK, kvh * D, (HKV + kvh) * D, near, m_i, l_i, acc, scale, BLOCK,
                              STAGES)  # fmt: skip
    for i in tl.range(near, plain, num_stages=STAGES):
        m_i, l_i, acc = _pages(q, kc_ptr, vc_ptr, table_ptr, i, end, prefix + tok, m_i, l_i, acc, kvh, scale, HKV, D,
                               PAGE, BLOCK, False)  # fmt: skip
    for i in tl.range(plain, tl.cdiv(end, BLOCK), num_stages=1):
        m_i, l_i, acc = _pages(q, kc_ptr, vc_ptr, table_ptr, i, end, prefix + tok, m_i, l_i, acc, kvh, scale, HKV, D,
                               PAGE, BLOCK, True)  # fmt: skip
    if FRESH:
        column = (HQ + kvh) * D
        m_i, l_i, acc = _near(q, fresh_desc, first, column, column + HKV * D, seen // BLOCK, m_i, l_i, acc, scale,
                              BLOCK, STAGES)  # fmt: skip
        end = tl.minimum(seen + TOKENS, new)
        for i in tl.range(seen // BLOCK, tl.cdiv(end, BLOCK), num_stages=1):
            key = i * BLOCK + tl.arange(0, BLOCK)
            at = qkv_ptr + (first + key).to(tl.int64) * WIDTH + column
            m_i, l_i, acc = _masked(q, at, at + HKV * D, key < end, key, tok, m_i, l_i, acc, scale, D)
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
    """Writes rows of ``out`` [M, num_heads * head_dim] of requests with at least ``min_new`` new tokens. qkv's q and k
    are normed and rotated, and the new keys and values are in the cache; with ``config.fresh`` they are read from qkv,
    which must have the cache's dtype. ``search``: requests compared in one go to find the one a program serves."""
    requests, dim = meta.kv_len.shape[0], shape.head_dim
    tokens = config.rows // (shape.num_heads // shape.num_kv_heads)
    assert not config.fresh or kv.k.dtype == qkv.dtype, "keys in the projection are not those of the cache"
    assert config.fresh or not config.gather, "prefixes are gathered only where new keys are read from the projection"
    fresh: Any = qkv
    near: Any = qkv
    room, stride = 0, meta.block_table.stride(0)
    sizes: Any = {"HKV": shape.num_kv_heads, "D": dim, "PAGE": meta.page_size, "BLOCK": config.block,
                  "SEARCH": search}  # fmt: skip
    if config.fresh:
        fresh = TensorDescriptor(qkv, list(qkv.shape), list(qkv.stride()), [config.block, dim])
    if config.gather:
        room = min(GATHER_ROOM, requests * meta.max_kv) // config.block
        rows = torch.empty(
            max(1, room) * config.block, 2 * shape.num_kv_heads * dim, dtype=qkv.dtype, device=qkv.device
        )
        near = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [config.block, dim])
        launch(
            gather_kernel, (GATHER_PROGRAMS,), kv.k, kv.v, meta.block_table, meta.kv_len, meta.cu_q, rows, stride,
            requests, min_new, room, num_warps=4, **sizes,
        )  # fmt: skip
    launch(
        prefill_attention_kernel, (qkv.shape[0] // tokens + requests, shape.num_kv_heads), qkv, fresh, near, kv.k, kv.v,
        meta.block_table, meta.kv_len, meta.cu_q, out, shape.scale * LOG2E, stride, requests, min_new, room,
        HQ=shape.num_heads, ROWS=config.rows, STAGES=config.stages, FRESH=config.fresh, GATHER=config.gather,
        num_warps=config.warps, num_stages=config.stages, **sizes,
    )  # fmt: skip
