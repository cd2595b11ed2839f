"""Weights as blocks of 32 codes with a scale, the way GGUF files hold them. numpy only.

weight[o, i] = scale[o, i // 32] * code[o, i] + least[o, i // 32]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 32


@dataclass(frozen=True)
class Blocks:
    """codes [out, in]: uint8 in 0..15 when ``bits`` is 4, int8 when it is 8; scale fp16 [out, in / 32]; least alike,
    None with 8 bits."""

    bits: int
    codes: np.ndarray
    scale: np.ndarray
    least: np.ndarray | None

    @staticmethod
    def stack(parts: Sequence[Blocks | None]) -> Blocks | None:
        """Along the outputs; None where a part is missing or the kinds differ."""
        found = [part for part in parts if part is not None]
        if len(found) != len(parts) or len({part.bits for part in found}) != 1:
            return None
        least = [part.least for part in found if part.least is not None]
        return Blocks(
            found[0].bits,
            np.concatenate([part.codes for part in found]),
            np.concatenate([part.scale for part in found]),
            np.concatenate(least) if least else None,
        )

    def select(self, outputs: np.ndarray) -> Blocks:
        """The given outputs, in that order."""
        least = None if self.least is None else self.least[outputs]
        return Blocks(self.bits, self.codes[outputs], self.scale[outputs], least)
