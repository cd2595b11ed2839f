"""The last step of input preparation, on the device: what a captured step reads at fixed addresses.

The host sends one packed array; most of it is read in place. Two parts need work: ids that were sampled by the step
before exist on the device only, and the page table travels as wide as this step needs while its rows are read at a
fixed stride.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_common import Launch


@triton.jit(
    do_not_specialize=["tokens", "rows", "table_stride"],
    do_not_specialize_on_alignment=["ids_in_ptr", "width_ptr", "pages_ptr", "ids_ptr", "table_ptr"],
)
def unpack_inputs_kernel(ids_in_ptr, width_ptr, pages_ptr, last_ptr, ids_ptr, table_ptr, tokens, rows, table_stride,
                         CHUNK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (max(rows, ceil(tokens / CHUNK)),). An id of -1 - s stands for last[s]."""
    i = tl.program_id(0)
    c = tl.arange(0, CHUNK)
    token = i * CHUNK + c
    inside = token < tokens
    given = tl.load(ids_in_ptr + token, mask=inside, other=0)
    newest = tl.load(last_ptr - 1 - given, mask=inside & (given < 0), other=0).to(tl.int32)
    tl.store(ids_ptr + token, tl.where(given < 0, newest, given), mask=inside)
    if i < rows:
        width = tl.load(width_ptr)
        source = pages_ptr + i.to(tl.int64) * width
        to = table_ptr + i.to(tl.int64) * table_stride
        for first in range(0, width, CHUNK):
            within = first + c < width
            tl.store(to + first + c, tl.load(source + first + c, mask=within, other=0), mask=within)


def unpack_inputs(
    launch: Launch,
    ids_in: torch.Tensor,
    width: torch.Tensor,
    pages: torch.Tensor,
    last: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """ids_in int32 [M] -> ids int32 [M]; pages, int32 rows of ``width`` [1] entries one after the other -> table int32
    [R, >= width]. last int64, by engine slot."""
    tokens, rows, chunk = ids.shape[0], table.shape[0], 256
    launch(
        unpack_inputs_kernel, (max(rows, triton.cdiv(tokens, chunk)),), ids_in, width, pages, last, ids, table, tokens,
        rows, table.stride(0), CHUNK=chunk, num_warps=4,
    )  # fmt: skip
