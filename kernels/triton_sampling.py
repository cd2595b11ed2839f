"""Choosing tokens without sorting the vocabulary, and mostly without writing logits.

Every row is the argmax of something: of its logits when greedy, of logits / temperature + Gumbel noise when not. So
each tile of the head's product keeps one (value, id) per row, and one small kernel takes the best tile. The noise is
that of ``replica.noise``: a function of (key, token id) alone, integer work exact, so any tiling draws the same.

A tile that saw a logit that is not finite stores NaN, and the row's id becomes -1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import Draw
from kernels.triton_common import Launch, pdl_wait

BIG = tl.constexpr(2147483647)


@triton.jit
def gumbel(k0, k1, token):
    """Standard Gumbel noise fp32 for int32 keys and token ids, which broadcast.

    The hash leaves 31 bits as a number in (-1, 0), the argument of log1p; log1p(x) = log(1 + x) * x / ((1 + x) - 1)
    keeps its relative precision at the small end (Goldberg 1991, theorem 4)."""
    x = (token * -1640531535).to(tl.uint32, bitcast=True) ^ k0.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) ^ k1.to(tl.uint32, bitcast=True)
    x = x * 0x846CA68B
    f = (x | 0x80000001).to(tl.int32, bitcast=True).to(tl.float32) * ((1 - 2.0**-24) * 2.0**-31)
    u = 1.0 + f
    small = u == 1.0
    log1p = tl.where(small, f, tl.log(u) * (f / tl.where(small, 1.0, u - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def best_of_tile(logits, columns, rows, inside, temperature_ptr, key_ptr, M, NOISE: tl.constexpr):
    """(value, id) of each row of a tile of logits [BM, BN]; ``inside`` [BN]: columns of the vocabulary."""
    finite = (tl.abs(logits) < float("inf")) | ~inside[None, :]
    broken = tl.min(finite.to(tl.int32), 1) == 0
    values = logits
    if NOISE:
        t = tl.load(temperature_ptr + rows, mask=rows < M, other=0.0)
        if tl.max(t, 0) > 0:
            k0 = tl.load(key_ptr + rows * 2, mask=rows < M, other=0)
            k1 = tl.load(key_ptr + rows * 2 + 1, mask=rows < M, other=0)
            drawn = logits / tl.where(t > 0, t, 1.0)[:, None] + gumbel(k0[:, None], k1[:, None], columns[None, :])
            values = tl.where(t[:, None] > 0, drawn, logits)
    values = tl.where(inside[None, :], values, float("-inf"))
    best = tl.max(values, 1)
    index = tl.min(tl.where(values == best[:, None], columns[None, :], BIG), 1)
    return tl.where(broken, float("nan"), best), index


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["temperature_ptr", "key_ptr"])
def logits_tile_kernel(logits_ptr, value_ptr, index_ptr, temperature_ptr, key_ptr, M, V, BN: tl.constexpr,
                       NOISE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles of logits [M, V] that some other product has written. Grid (ceil(V / BN), M)."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1)
    rows = row + tl.arange(0, 1)
    inside = columns < V
    pdl_wait(PDL)
    logits = tl.load(logits_ptr + row.to(tl.int64) * V + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    best, index = best_of_tile(logits, columns, rows, inside, temperature_ptr, key_ptr, M, NOISE)
    at = rows * tl.num_programs(0) + tl.program_id(0)
    tl.store(value_ptr + at, best)
    tl.store(index_ptr + at, index)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slot_ptr", "ids_ptr"])
def best_tile_kernel(value_ptr, index_ptr, ids_ptr, last_ptr, slot_ptr, T, B: tl.constexpr, LAST: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    """ids[m] = index of the largest of T tile values [M, T], the lowest among equals; -1 if any is NaN. Grid (M,).
    LAST: also last[slot[m]] = ids[m]."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * T
    r = tl.arange(0, B)
    pdl_wait(PDL)
    best = tl.full([B], float("-inf"), tl.float32)
    at = tl.zeros([B], tl.int32) + BIG
    broken = tl.zeros([B], tl.int32)
    for t in range(0, T, B):
        inside = t + r < T
        v = tl.load(value_ptr + first + t + r, mask=inside, other=float("-inf"))
        i = tl.load(index_ptr + first + t + r, mask=inside, other=BIG)
        broken |= (v != v).to(tl.int32)
        take = (v > best) | ((v == best) & (i < at))
        best = tl.where(take, v, best)
        at = tl.where(take, i, at)
    top = tl.max(best, 0)
    found = tl.min(tl.where(best == top, at, BIG), 0)
    found = tl.where((tl.max(broken, 0) > 0) | (found == BIG), -1, found)
    tl.store(ids_ptr + row, found)
    if LAST:
        tl.store(last_ptr + tl.load(slot_ptr + row), found.to(last_ptr.dtype.element_ty))


def best_tile(
    launch: Launch, values: torch.Tensor, indices: torch.Tensor, draw: Draw | None, *, pdl: bool = False
) -> torch.Tensor:
    """values fp32, indices int32 [M, T] -> ids int32 [M], also stored for the slots of ``draw``."""
    m, t = values.shape
    ids: Any = torch.empty(m, dtype=torch.int32, device=values.device)
    last = None if draw is None else draw.last
    launch(
        best_tile_kernel, (m,), values, indices, ids, ids if last is None else last,
        ids if draw is None or last is None else draw.slots, t, B=4096 if m == 1 else 1024, LAST=last is not None,
        pdl=pdl, num_warps=16 if m == 1 else 8,
    )  # fmt: skip
    return ids


def sample_logits(launch: Launch, logits: torch.Tensor, draw: Draw | None) -> torch.Tensor:
    """logits [M, V] -> ids int32 [M]: for products that are not ours."""
    m, v = logits.shape
    block = 4096
    tiles = triton.cdiv(v, block)
    values = torch.empty(m, tiles, dtype=torch.float32, device=logits.device)
    indices = torch.empty(m, tiles, dtype=torch.int32, device=logits.device)
    noise = draw is not None and draw.temperature is not None
    launch(
        logits_tile_kernel, (tiles, m), logits, values, indices, draw.temperature if draw and noise else values,
        draw.keys if draw and noise else indices, m, v, BN=block, NOISE=noise, num_warps=8,
    )  # fmt: skip
    return best_tile(launch, values, indices, draw)
