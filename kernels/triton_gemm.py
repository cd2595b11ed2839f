"""Skinny products y = x W^T for a few to a few hundred tokens, on tensor cores, with the layer's small work fused in.

What is folded in costs next to nothing (docs/kernels.md has the measurements):

* RMSNorm of the input, in *scale form*: the producer of the residual stream wrote h * g and, per output tile, the sum
  of h^2; here rows of the accumulator are only multiplied by rsqrt(sum / K + eps).
* the residual add, with h * g and sum(h^2) for the next norm;
* SiLU(gate) * up from two accumulators over un-interleaved weights [gate; up];
* sampling: the best (value, id) of each row over the output tile.

Split-K is deterministic: fp32 partials, and whichever program arrives last adds them in split order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import Draw
from kernels.triton_common import Launch, next_power_of_2, pdl_trigger, pdl_wait, silu
from kernels.triton_sampling import best_of_tile
from kernels.tuning import GemmConfig

STORE, RESIDUAL, SAMPLE = 0, 1, 2


@triton.jit
def _dot(a, b, acc):
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _accumulate(x_ptr, w_ptr, M, N, K, k0, kspan, rm, rn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                STAGES: tl.constexpr, SWAP: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """The loop over K: [BM, BN] accumulators of the tile, and of the up half if GATED. SWAP computes W x^T, which puts
    the weight on the 64-row operand of wgmma."""
    rk = tl.arange(0, BK)
    rows = rn.to(tl.int64) * K + k0
    cols = rm.to(tl.int64) * K + k0
    if SWAP:
        wp = w_ptr + rows[:, None] + rk[None, :]
        xp = x_ptr + cols[None, :] + rk[:, None]
        xm = rm[None, :] < M
        acc = tl.zeros([BN, BM], tl.float32)
        acu = tl.zeros([BN, BM], tl.float32)
    else:
        wp = w_ptr + rows[None, :] + rk[:, None]
        xp = x_ptr + cols[:, None] + rk[None, :]
        xm = rm[:, None] < M
        acc = tl.zeros([BM, BN], tl.float32)
        acu = tl.zeros([BM, BN], tl.float32)
    up = wp + N.to(tl.int64) * K
    for k in tl.range(0, kspan, BK, num_stages=STAGES):
        w = tl.load(wp + k, eviction_policy="evict_first")
        if GATED:
            u = tl.load(up + k, eviction_policy="evict_first")
        x = tl.load(xp + k, mask=xm, other=0.0)
        if SWAP:
            acc = _dot(w, x, acc)
            if GATED:
                acu = _dot(u, x, acu)
        else:
            acc = _dot(x, w, acc)
            if GATED:
                acu = _dot(x, u, acu)
    if SWAP:
        acc = acc.T
        acu = acu.T
    return acc, acu


@triton.jit
def _publish(part_ptr, count_ptr, acc, acu, M, width, N, rm, rn, SPLIT: tl.constexpr, GATED: tl.constexpr):
    """Stores this split's partials; true in the last program of the tile to get here."""
    tile = tl.program_id(0) + tl.program_id(2) * tl.num_programs(0)
    to = (tl.program_id(1) * M + rm[:, None]).to(tl.int64) * width + rn[None, :]
    tl.store(part_ptr + to, acc, mask=rm[:, None] < M)
    if GATED:
        tl.store(part_ptr + to + N, acu, mask=rm[:, None] < M)
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        tl.store(count_ptr + tile, 0)
    return last


@triton.jit
def _sum_splits(part_ptr, M, width, rm, rn, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Unrolled, so that no split's loads wait for the sum of those before."""
    acc = tl.zeros([BM, BN], tl.float32)
    for s in tl.static_range(SPLIT):
        at = (s * M + rm[:, None]).to(tl.int64) * width + rn[None, :]
        acc += tl.load(part_ptr + at, mask=rm[:, None] < M, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _row_scale(sumsq_ptr, M, K, eps, tiles_in, rm, TILES: tl.constexpr):
    """rsqrt(mean h^2 + eps) of each row from the producer's per-tile sums [M, tiles_in]."""
    rt = tl.arange(0, TILES)
    parts = tl.load(
        sumsq_ptr + rm[:, None] * tiles_in + rt[None, :],
        mask=(rm[:, None] < M) & (rt[None, :] < tiles_in),
        other=0.0,
    )
    return tl.rsqrt(tl.sum(parts, 1) / K + eps)


@triton.jit
def _finish(acc, bias_ptr, res_ptr, g_ptr, y_ptr, scaled_ptr, sumsq_out_ptr, idx_ptr, M, N, rm, rn,
            BIAS: tl.constexpr, EPILOGUE: tl.constexpr, NOISE: tl.constexpr):  # fmt: skip
    """STORE: y. RESIDUAL: y = acc + res, scaled, sums. SAMPLE: res and g hold temperatures and noise keys."""
    inside = rm[:, None] < M
    at = rm[:, None].to(tl.int64) * N + rn[None, :]
    pn = tl.program_id(0)
    tiles = tl.num_programs(0)
    if BIAS:
        acc += tl.load(bias_ptr + rn).to(tl.float32)[None, :]
    if EPILOGUE == 2:
        best, index = best_of_tile(acc, rn, rm, rn < N, res_ptr, g_ptr, M, NOISE)
        tl.store(y_ptr + rm * tiles + pn, best, mask=rm < M)
        tl.store(idx_ptr + rm * tiles + pn, index, mask=rm < M)
    elif EPILOGUE == 1:
        # h is rounded first: the norm must see exactly what the residual stream holds.
        h = (acc + tl.load(res_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, h, mask=inside)
        hf = h.to(tl.float32)
        g = tl.load(g_ptr + rn).to(tl.float32)
        tl.store(scaled_ptr + at, (hf * g[None, :]).to(scaled_ptr.dtype.element_ty), mask=inside)
        tl.store(sumsq_out_ptr + rm * tiles + pn, tl.sum(hf * hf, 1), mask=rm < M)
    else:
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "eps", "tiles_in"])
def skinny_gemm_kernel(x_ptr, w_ptr, bias_ptr, res_ptr, g_ptr, y_ptr, scaled_ptr, sumsq_out_ptr, sumsq_in_ptr,
                       part_ptr, count_ptr, idx_ptr, M, N, K, kspan, eps, tiles_in,
                       BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                       SWAP: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr, TILES: tl.constexpr,
                       GATED: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr, NOISE: tl.constexpr,
                       PDL: tl.constexpr, TRIGGER: tl.constexpr):  # fmt: skip
    """Grid (N / BN, SPLIT, ceil(M / BM)); x [M, K], w [N or 2N, K], y [M, N]; BN divides N, BK divides kspan.

    kspan = K / SPLIT is an argument, not computed here: a quotient would hide its divisibility by 16 from the
    compiler and make the weight loads two bytes wide. ``count`` must be zero at entry and is zero again at exit."""
    rm = tl.program_id(2) * BM + tl.arange(0, BM)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    pdl_trigger(TRIGGER, 1)
    pdl_wait(PDL)
    acc, acu = _accumulate(x_ptr, w_ptr, M, N, K, tl.program_id(1) * kspan, kspan, rm, rn, BM, BN, BK, STAGES, SWAP,
                           GATED)  # fmt: skip
    pdl_trigger(TRIGGER, 2)
    last = True
    if SPLIT > 1:
        width = N
        if GATED:
            width = 2 * N
        last = _publish(part_ptr, count_ptr, acc, acu, M, width, N, rm, rn, SPLIT, GATED)
        if last:
            acc = _sum_splits(part_ptr, M, width, rm, rn, BM, BN, SPLIT)
            if GATED:
                acu = _sum_splits(part_ptr + N, M, width, rm, rn, BM, BN, SPLIT)
    if last:
        if NORM:
            r = _row_scale(sumsq_in_ptr, M, K, eps, tiles_in, rm, TILES)
            acc = acc * r[:, None]
            acu = acu * r[:, None]
        if GATED:
            acc = silu(acc) * acu
        _finish(acc, bias_ptr, res_ptr, g_ptr, y_ptr, scaled_ptr, sumsq_out_ptr, idx_ptr, M, N, rm, rn, BIAS,
                EPILOGUE, NOISE)  # fmt: skip


class SplitWorkspace:
    """Partial sums and arrival counters of split-K products. One per stream: kernels using it run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)
        self.partials = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, elements: int) -> torch.Tensor:
        """Grows to ``elements`` fp32. Must have grown to its largest before a CUDA graph captures its address."""
        if self.partials.numel() < elements:
            self.partials = torch.empty(elements, dtype=torch.float32, device=self.counters.device)
        return self.partials

    def check_invariants(self) -> None:
        """Between kernels every counter is zero. Synchronizes."""
        assert int(self.counters.abs().max()) == 0, "a split-K product left its arrival counters dirty"


def row_tile(m: int) -> int:
    return min(128, max(16, next_power_of_2(m)))


def skinny_gemm(
    launch: Launch,
    config: GemmConfig,
    workspace: SplitWorkspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    eps: float = 0.0,
    sumsq: torch.Tensor | None = None,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None,
    sumsq_out: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    draw: Draw | None = None,
) -> None:
    """x [M, K] contiguous, weight [N or 2N, K] -> y [M, N].

    ``sumsq`` [M, tiles] fp32: x is h * g and rows are scaled by rsqrt(sum / K + eps). ``residual`` [M, N] with
    ``next_norm`` [N]: also writes ``scaled`` [M, N] and ``sumsq_out`` [M, N / bn] fp32. ``index``: y and index
    [M, N / bn] take each tile's best value (fp32) and its column (int32), with the noise that ``draw`` asks for."""
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    bm = row_tile(m)
    grid = (n // config.bn, config.split, triton.cdiv(m, bm))
    unused: Any = x
    partials = unused
    if config.split > 1:
        assert grid[0] * grid[2] <= workspace.counters.numel(), f"{grid} tiles exceed the split-K counters"
        partials = workspace.reserve(config.split * m * n * (2 if gated else 1))
    epilogue = SAMPLE if index is not None else RESIDUAL if residual is not None else STORE
    if draw is not None and draw.temperature is not None:
        residual, next_norm = draw.temperature, draw.keys
    noise = epilogue == SAMPLE and residual is not None
    tiles_in = 0 if sumsq is None else sumsq.shape[1]
    launch(
        skinny_gemm_kernel, grid, x, weight, unused if bias is None else bias, unused if residual is None else residual,
        unused if next_norm is None else next_norm, y, unused if scaled is None else scaled,
        unused if sumsq_out is None else sumsq_out, unused if sumsq is None else sumsq, partials, workspace.counters,
        workspace.counters if index is None else index, m, n, k, k // config.split, eps, tiles_in,
        BM=bm, BN=config.bn, BK=config.bk, STAGES=config.stages, SWAP=config.swap, SPLIT=config.split,
        NORM=sumsq is not None, TILES=max(16, next_power_of_2(tiles_in)), GATED=gated, BIAS=bias is not None,
        EPILOGUE=epilogue, NOISE=noise, pdl=config.pdl, trigger=config.trigger, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
