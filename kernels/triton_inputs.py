"""One packed array from the host -> the arrays that a captured decode step reads at fixed addresses.

    packed int32:  [ width | id 0..B | slot 0..B | position 0..B | temperature 0..B | keys 0..2B | pages B x width ]

``temperature`` holds the bits of fp32. A padded row has position -1: it gets length 0, so that attention neither reads
nor writes for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_common import Launch

HEADER = 1
FIELDS = 6
"""Values per row before the page table, keys counting as two."""


@triton.jit(do_not_specialize=["B", "table_stride"])
def prepare_decode_kernel(packed_ptr, last_ptr, ids_ptr, len_ptr, slot_ptr, table_ptr, B, table_stride,
                          PAGE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (B,). An id below 0 is the one that the row's engine slot sampled last."""
    row = tl.program_id(0)
    width = tl.load(packed_ptr)
    token = tl.load(packed_ptr + 1 + row)
    slot = tl.load(packed_ptr + 1 + B + row)
    position = tl.load(packed_ptr + 1 + 2 * B + row)
    newest = tl.load(last_ptr + slot).to(tl.int32)
    tl.store(ids_ptr + row, tl.where(token < 0, newest, token))
    tl.store(len_ptr + row, position + 1)
    pages = packed_ptr + 1 + 6 * B + row.to(tl.int64) * width
    at = tl.maximum(position, 0)
    page = tl.load(pages + at // PAGE).to(tl.int64)
    tl.store(slot_ptr + row, page * PAGE + at % PAGE)
    c = tl.arange(0, CHUNK)
    to = table_ptr + row.to(tl.int64) * table_stride
    for first in range(0, width, CHUNK):
        inside = first + c < width
        tl.store(to + first + c, tl.load(pages + first + c, mask=inside, other=0), mask=inside)


def packed_size(batch: int, width: int) -> int:
    return HEADER + FIELDS * batch + batch * width


def prepare_decode(
    launch: Launch,
    packed: torch.Tensor,
    last: torch.Tensor,
    ids: torch.Tensor,
    kv_len: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
) -> None:
    """Fills ids, kv_len int32 [B], slots int64 [B] and table int32 [B, >= width] from ``packed`` and ``last``."""
    launch(
        prepare_decode_kernel, (ids.shape[0],), packed, last, ids, kv_len, slots, table, ids.shape[0], table.stride(0),
        PAGE=page_size, CHUNK=256, num_warps=4,
    )  # fmt: skip
