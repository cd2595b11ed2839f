"""The small kernels between products: embedding, residual + RMSNorm, SiLU x gate. One program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_common import Launch, next_power_of_2, pdl_wait, silu


@triton.jit
def _emit(h, g_ptr, normed_ptr, sumsq_ptr, at, r, inside, K, eps, row, SCALED: tl.constexpr):
    """SCALED: h * g and sum(h^2), for a consumer that scales rows itself; else the finished norm."""
    hf = h.to(tl.float32)
    total = tl.sum(hf * hf, 0)
    y = hf * tl.load(g_ptr + r, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        tl.store(sumsq_ptr + row, total)
    else:
        y = y * tl.rsqrt(total / K + eps)
    tl.store(normed_ptr + at + r, y.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def add_norm_kernel(x_ptr, res_ptr, g_ptr, h_ptr, normed_ptr, sumsq_ptr, K, eps, B: tl.constexpr, ADD: tl.constexpr,
                    SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """h = x + res if ADD, else x; then its norm (see ``_emit``). Grid (M,)."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * K
    r = tl.arange(0, B)
    inside = r < K
    pdl_wait(PDL)
    h = tl.load(x_ptr + at + r, mask=inside, other=0.0)
    if ADD:
        h = h.to(tl.float32) + tl.load(res_ptr + at + r, mask=inside, other=0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at + r, h, mask=inside)
    _emit(h, g_ptr, normed_ptr, sumsq_ptr, at, r, inside, K, eps, row, SCALED)


@triton.jit(do_not_specialize=["eps", "vocab"], do_not_specialize_on_alignment=["ids_ptr"])
def embed_kernel(ids_ptr, table_ptr, g_ptr, h_ptr, normed_ptr, sumsq_ptr, K, eps, vocab, B: tl.constexpr,
                 SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """h = table[ids]; then its norm. Grid (M,). An id outside the table reads row 0: a padded or poisoned row must
    not fault the device."""
    row = tl.program_id(0)
    r = tl.arange(0, B)
    inside = r < K
    pdl_wait(PDL)
    i = tl.load(ids_ptr + row).to(tl.int64)
    i = tl.where((i >= 0) & (i < vocab), i, 0)
    h = tl.load(table_ptr + i * K + r, mask=inside, other=0.0)
    at = row.to(tl.int64) * K
    tl.store(h_ptr + at + r, h, mask=inside)
    _emit(h, g_ptr, normed_ptr, sumsq_ptr, at, r, inside, K, eps, row, SCALED)


@triton.jit
def silu_mul_kernel(gu_ptr, y_ptr, width, B: tl.constexpr, PDL: tl.constexpr):
    """y = silu(gu[:, :width]) * gu[:, width:]. Grid (M, ceil(width / B))."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * B + tl.arange(0, B)
    inside = o < width
    pdl_wait(PDL)
    g = tl.load(gu_ptr + row * 2 * width + o, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + row * 2 * width + width + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + o, (silu(g) * u).to(y_ptr.dtype.element_ty), mask=inside)


def _warps(k: int) -> int:
    return 8 if k >= 2048 else 4


def add_norm(
    launch: Launch,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    *,
    scaled: bool,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x (+ residual) [M, K] -> (h, normed, None), or (h, h * norm, sum(h^2) [M, 1] fp32) if ``scaled``."""
    m, k = x.shape
    normed = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    sumsq = torch.empty(m, 1, dtype=torch.float32, device=x.device) if scaled else None
    launch(
        add_norm_kernel, (m,), x, x if residual is None else residual, norm, h, normed, x if sumsq is None else sumsq,
        k, eps, B=next_power_of_2(k), ADD=residual is not None, SCALED=scaled, pdl=pdl, num_warps=_warps(k),
    )  # fmt: skip
    return h, normed, sumsq


def embed(
    launch: Launch, ids: torch.Tensor, table: torch.Tensor, norm: torch.Tensor, eps: float, *, scaled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids [M] -> as ``add_norm``. Never launched early: what prepares the step's inputs is finished once this runs,
    so kernels after it may read lengths and block tables before their own wait."""
    m, k = ids.shape[0], table.shape[1]
    h = torch.empty(m, k, dtype=table.dtype, device=table.device)
    normed = torch.empty_like(h)
    sumsq = torch.empty(m, 1, dtype=torch.float32, device=h.device) if scaled else None
    launch(
        embed_kernel, (m,), ids, table, norm, h, normed, h if sumsq is None else sumsq, k, eps, table.shape[0],
        B=next_power_of_2(k), SCALED=scaled, num_warps=_warps(k),
    )  # fmt: skip
    return h, normed, sumsq


def silu_mul(launch: Launch, gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """gate_up [M, 2I] -> [M, I]."""
    m, inter = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(m, inter, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, next_power_of_2(inter))
    launch(silu_mul_kernel, (m, triton.cdiv(inter, block)), gate_up, y, inter, B=block, pdl=pdl, num_warps=4)
    return y
