"""A checkpoint's blocks in the order that ``native_products.c`` reads, in memory that it reads fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kernels.blocks import BLOCK, Blocks
from kernels.native_structs import Matrix, at

LANES = 16
ARENA_BYTES = 64 << 20
ALIGNMENT = 64


class Arena:
    """Arrays side by side in large allocations: numpy asks for huge pages from 4 MiB on, which spares a step that reads
    all weights once an address look-up every 4 KiB. What is put in stays while a tensor over it does."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def keep(self, values: np.ndarray) -> torch.Tensor:
        """A contiguous copy."""
        size = -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._room):
            room = np.empty(max(size, ARENA_BYTES) + ALIGNMENT, np.uint8)
            self._room = room[-room.ctypes.data % ALIGNMENT :]
        kept = self._room[: values.nbytes].view(values.dtype).reshape(values.shape)
        self._room = self._room[size:]
        kept[...] = values
        return torch.from_numpy(kept)


@dataclass(frozen=True)
class Packed:
    """Blocks in the order that ``native.c`` reads: sixteen outputs side by side, one in each lane of a vector; a lane's
    32-bit word holds 8 codes of 4 bits, or 4 of 8. codes int32 [out / 16, in / 32, bits, 16]; scale, least fp16
    [out / 16, in / 32, 16]."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    least: torch.Tensor | None

    @cached_property
    def matrix(self) -> Matrix:
        wide = self.codes.shape[1] * BLOCK
        return Matrix(at(self.codes), at(self.scale), at(self.least), wide, self.num_outputs, self.bits)

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0] * LANES

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scale, self.least) if t is not None)


def pack(blocks: Blocks, arena: Arena) -> Packed | None:
    """None where outputs don't fill vectors."""
    out, wide = blocks.codes.shape
    if out % LANES or wide % BLOCK:
        return None
    per_word = 32 // blocks.bits
    words = np.zeros((out, wide // per_word), np.uint32)
    codes = blocks.codes.view(np.uint8).reshape(out, -1, per_word)
    for j in range(per_word):
        words |= codes[:, :, j].astype(np.uint32) << np.uint32(blocks.bits * j)
    lanes = words.reshape(out // LANES, LANES, wide // BLOCK, blocks.bits).transpose(0, 2, 3, 1)

    def halves(values: np.ndarray) -> torch.Tensor:
        return arena.keep(values.reshape(out // LANES, LANES, wide // BLOCK).transpose(0, 2, 1).astype(np.float16))

    least = None if blocks.least is None else halves(blocks.least)
    return Packed(blocks.bits, arena.keep(lanes.view(np.int32)), halves(blocks.scale), least)
