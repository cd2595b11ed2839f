"""Matrix times one vector (M = 1) without tensor cores: the decode step of a single request.

A program owns BN rows of the weight and streams them through registers; products and sums are fp32, one reduction at
the end. Many small programs balance better over the chip than a padded ``tl.dot``, and the RMSNorm of the input costs
only the extra registers for sum(x^2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import Draw
from kernels.triton_common import Launch, load_stream, next_power_of_2, pdl_trigger, pdl_wait, silu
from kernels.triton_sampling import best_of_tile
from kernels.tuning import GemmConfig


@triton.jit
def _input(x_ptr, g_ptr, k, rk, K, NORM: tl.constexpr, MASKED: tl.constexpr):
    """x (times the norm weight) and x^2 for columns k + rk, fp32."""
    if MASKED:
        x = tl.load(x_ptr + k + rk, mask=k + rk < K, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + k + rk).to(tl.float32)
    square = x * x
    if NORM:
        if MASKED:
            x *= tl.load(g_ptr + k + rk, mask=k + rk < K, other=0.0).to(tl.float32)
        else:
            x *= tl.load(g_ptr + k + rk).to(tl.float32)
    return x, square


@triton.jit
def _output(y, rn, inside, bias_ptr, res_ptr, y_ptr, idx_ptr, N, BIAS: tl.constexpr, RES: tl.constexpr,
            SAMPLE: tl.constexpr, NOISE: tl.constexpr):  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rn, mask=inside, other=0.0).to(tl.float32)
    if RES:
        y += tl.load(res_ptr + rn, mask=inside, other=0.0).to(tl.float32)
    if SAMPLE:
        row = tl.arange(0, 1)
        best, index = best_of_tile(y[None, :], rn, row, inside, res_ptr, bias_ptr, 1, NOISE)
        tl.store(y_ptr + tl.program_id(0) + row, best)
        tl.store(idx_ptr + tl.program_id(0) + row, index)
    else:
        tl.store(y_ptr + rn, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def gemv_kernel(x_ptr, g_ptr, w_ptr, bias_ptr, res_ptr, y_ptr, idx_ptr, N, K, eps,
                BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
                BIAS: tl.constexpr, RES: tl.constexpr, SAMPLE: tl.constexpr, NOISE: tl.constexpr, EVEN_N: tl.constexpr,
                EVEN_K: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr):  # fmt: skip
    """y[n] = epilogue(sum_k w[n, k] x[k]), one program per BN outputs.

    NORM: x is RMS-normalised with weight g. GATED: w is [2N, K] = [gate; up], y = silu(gate x) * (up x).
    RES: adds res[n]. SAMPLE: stores the program's best (value, id) instead, at index program_id; with NOISE, res and
    bias hold the temperature and the noise keys."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    rows = rn.to(tl.int64) * K
    wp = w_ptr + rows[:, None] + rk[None, :]
    up = wp + N.to(tl.int64) * K
    inside = rn < N
    MASKED: tl.constexpr = not (EVEN_N and EVEN_K)
    pdl_trigger(TRIGGER, 1)
    mask = inside[:, None] & (rk[None, :] < K)
    # The first weight tile is in flight while the kernel before this one still produces x.
    w = load_stream(wp, mask, MASKED)
    if GATED:
        u = load_stream(up, mask, MASKED)
    pdl_wait(PDL)
    x, square = _input(x_ptr, g_ptr, 0, rk, K, NORM, not EVEN_K)
    acc = w.to(tl.float32) * x[None, :]
    if GATED:
        acu = u.to(tl.float32) * x[None, :]
    for k in tl.range(BK, K, BK, num_stages=STAGES):
        mask = inside[:, None] & (k + rk[None, :] < K)
        w = load_stream(wp + k, mask, MASKED)
        if GATED:
            u = load_stream(up + k, mask, MASKED)
        x, more = _input(x_ptr, g_ptr, k, rk, K, NORM, not EVEN_K)
        if NORM:
            square += more
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acu += u.to(tl.float32) * x[None, :]
    pdl_trigger(TRIGGER, 2)
    y = tl.sum(acc, 1)
    r = 1.0
    if NORM:
        r = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y = y * r
    if GATED:
        y = silu(y) * (tl.sum(acu, 1) * r)
    _output(y, rn, inside, bias_ptr, res_ptr, y_ptr, idx_ptr, N, BIAS, RES, SAMPLE, NOISE)


def _or(given: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if given is None else given


def gemv(
    launch: Launch,
    config: GemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    index: torch.Tensor | None = None,
    draw: Draw | None = None,
) -> int:
    """x [1, K], weight [N or 2N, K] -> y [1, N] in y's dtype; with ``index`` (int32) y and index hold the best value
    and id of each program, with the noise ``draw`` asks for. Returns the number of programs."""
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    bn = config.bn
    bk = min(config.bk, next_power_of_2(k))
    programs = triton.cdiv(n, bn)
    noise = draw is not None and draw.temperature is not None
    temperature, keys = (draw.temperature, draw.keys) if draw is not None and noise else (None, None)
    launch(
        gemv_kernel, (programs,), x, _or(norm, x), weight, _or(keys if noise else bias, x),
        _or(temperature if noise else residual, x), y, _or(index, x), n, k, eps,
        BN=bn, BK=bk, STAGES=config.stages, NORM=norm is not None, GATED=gated, BIAS=bias is not None,
        RES=residual is not None, SAMPLE=index is not None, NOISE=noise, EVEN_N=n % bn == 0, EVEN_K=k % bk == 0,
        pdl=config.pdl, trigger=config.trigger, num_warps=config.warps,
    )  # fmt: skip
    return programs
