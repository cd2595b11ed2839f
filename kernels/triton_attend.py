"""What the kernels of decode attention share: QK-norm with RoPE in registers, and the pass over cached keys."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
INDEX = ["table_ptr", "len_ptr", "cu_q_ptr", "slot_ptr", "pos_ptr", "covered_ptr", "items_ptr"]
"""Read element by element: a kernel is not compiled again for another alignment of these."""


@triton.jit
def norm_rope(a, b, w_ptr, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """RMSNorm over the head (if NORM) and rotate-half RoPE of rows given as two halves [rows, D / 2], fp32."""
    H: tl.constexpr = D // 2
    rh = tl.arange(0, H)
    if NORM:
        r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        a = a * r[:, None] * tl.load(w_ptr + rh).to(tl.float32)[None, :]
        b = b * r[:, None] * tl.load(w_ptr + H + rh).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def attend(q1, q2, m_i, l_i, acc, kc_ptr, vc_ptr, table_ptr, start, end, kvh, scale, HKV: tl.constexpr,
           D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Online softmax of the packed rows over cached tokens [start, end); BLOCK divides start."""
    H: tl.constexpr = D // 2
    rh = tl.arange(0, H)
    rd = tl.arange(0, D)
    dt = q1.dtype
    # Counting blocks, not tokens, shows the compiler where blocks start: pages are then looked up once per page.
    for i in tl.range(start // BLOCK, tl.cdiv(end, BLOCK), num_stages=STAGES):
        tok = i * BLOCK + tl.arange(0, BLOCK)
        ok = tok < end
        page = tl.load(table_ptr + tok // PAGE, mask=ok, other=0).to(tl.int64)
        base = ((page * PAGE + tok % PAGE) * HKV + kvh) * D
        ka = tl.load(kc_ptr + base[None, :] + rh[:, None], mask=ok[None, :], other=0.0).to(dt)
        kb = tl.load(kc_ptr + base[None, :] + rh[:, None] + H, mask=ok[None, :], other=0.0).to(dt)
        v = tl.load(vc_ptr + base[:, None] + rd[None, :], mask=ok[:, None], other=0.0).to(dt)
        s = tl.dot(q1, ka, input_precision="ieee")
        s = tl.dot(q2, kb, s, input_precision="ieee")
        s = tl.where(ok[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(tl.fma(s, scale, -m_new[:, None]))
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(dt), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return m_i, l_i, acc
