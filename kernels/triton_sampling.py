"""Choosing tokens without sorting the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_common import Launch, pdl_wait

BIG = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["T"])
def tile_argmax_kernel(value_ptr, index_ptr, ids_ptr, T, B: tl.constexpr, PDL: tl.constexpr):
    """ids[m] = index of the largest of T tile maxima [M, T]; the lowest index among equals. Grid (M,)."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, B)
    pdl_wait(PDL)
    best = tl.full([B], float("-inf"), tl.float32)
    at = tl.zeros([B], tl.int32) + BIG
    for t in range(0, T, B):
        inside = t + r < T
        v = tl.load(value_ptr + row * T + t + r, mask=inside, other=float("-inf"))
        i = tl.load(index_ptr + row * T + t + r, mask=inside, other=BIG)
        take = (v > best) | ((v == best) & (i < at))
        best = tl.where(take, v, best)
        at = tl.where(take, i, at)
    top = tl.max(best, 0)
    # All NaN: no tile compares equal; 0 keeps the id inside the vocabulary and the caller's finite check reports it.
    found = tl.min(tl.where(best == top, at, BIG), 0)
    tl.store(ids_ptr + row, tl.where(found == BIG, 0, found))


def tile_argmax(launch: Launch, values: torch.Tensor, indices: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """values fp32, indices int32 [M, T] -> ids int32 [M]."""
    m, t = values.shape
    ids = torch.empty(m, dtype=torch.int32, device=values.device)
    block = 4096 if m == 1 else 1024
    launch(tile_argmax_kernel, (m,), values, indices, ids, t, B=block, pdl=pdl, num_warps=16 if m == 1 else 8)
    return ids
