"""W8A8 products on a CPU: weights int8 with one scale per output channel, activations int8 with one scale per token.

    y[m, n] = xs[m] * ws[n] * sum_k xq[m, k] wq[n, k],    xq = round(x / xs), xs = max|x[m]| / 127, ws alike

The sum is an exact int32, so a row's result has the same bits whatever else is in the batch. Where the CPU has the
instructions for it (VNNI), oneDNN multiplies packed weights and scales by ws while it writes; few rows, and other
CPUs, take ``torch._int_mm`` on plain ones, which starts quicker. Both give the same bits.

A checkpoint that has blocks of 4 or 8 bits (GGUF) keeps them: ``native.c`` multiplies their codes by the rounded
activations, so that only those lose anything, at 0.63 bytes a weight instead of 1 or 2. Sums of a block are exact and
the blocks' order is fixed, so here too a row has the same bits in every batch.

Constant factors of the rows' scales (1 / 127, and the square root of the width after a norm) are kept in ws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.blocks import Blocks
from kernels.interface import Stream
from kernels.native_ops import NativeOps
from kernels.reference import TorchOps

ROLES = frozenset(("qkv", "o", "gate_up", "down", "head"))
"""Every product. On the default model this costs 4 % of perplexity, of which the head 1 % and ``down`` 1.5 %."""
_NORMED = ("qkv", "gate_up", "head")
"""Roles whose input is normed first."""
_STEPS = torch.tensor(127.0)
"""As a tensor: a Python number on the left of a division costs two operations more."""
LEAST = 1e-12
"""Under the largest magnitude of a row, so that a row of zeros divides by something."""
MAX_DOT = 1 << 17
"""Longest sum that int32 holds: 127 * 128 * 2^17 < 2^31."""
FEW_ROWS = 16
"""Up to so many, a packed product's start (35 us) outweighs what it saves."""
FEW_OUT = 16384
"""Wider weights (heads) are faster packed at any number of rows, and need no plain copy."""


@dataclass(frozen=True)
class Int8Linear:
    """``scales`` fp32 [out]: ws and the constant factors; ``plain`` int8 [out, in]; ``packed`` by oneDNN. Either may be
    missing, not both."""

    scales: torch.Tensor
    plain: torch.Tensor | None
    packed: torch.Tensor | None

    @classmethod
    def of(cls, weight: torch.Tensor, *, factor: float = 1.0, pack: bool = True) -> Int8Linear:
        """weight fp32 [out, in]; ``factor`` of the scales. Raises ValueError for rows that int32 can't sum."""
        out, wide = weight.shape
        if wide > MAX_DOT:
            raise ValueError(f"quantization: w8a8 sums at most {MAX_DOT} products, this layer has {wide}")
        scales = weight.abs().amax(1).clamp_min_(LEAST).div_(127)
        codes = weight.div(scales[:, None]).round_().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(codes, None) if pack else None
        return cls(scales.mul_(factor / 127), codes if out < FEW_OUT or not pack else None, packed)

    @property
    def num_bytes(self) -> int:
        """Of the codes."""
        return sum(codes.numel() for codes in (self.plain, self.packed) if codes is not None)

    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        """int8 [M, in], overwritten -> fp32 [M, out], still without the rows' own scales."""
        if self.packed is None or (self.plain is not None and codes.shape[0] <= FEW_ROWS):
            assert self.plain is not None
            return torch._int_mm(codes, self.plain.t()).to(torch.float32).mul_(self.scales)
        # oneDNN wants unsigned activations; the sign bit flipped adds 128, which it takes back as the zero point.
        shifted = codes.view(torch.uint8).bitwise_xor_(128)
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            shifted, 1.0, 128, self.packed, self.scales, None, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out


def packs() -> bool:
    """Whether oneDNN has exact packed int8 products here: without VNNI its sums saturate at 16 bits."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return bool(torch.backends.mkldnn.is_available() and vnni() and hasattr(torch.ops.onednn, "qlinear_pointwise"))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x fp32 [M, K], overwritten -> (codes int8 [M, K], largest magnitudes fp32 [M, 1]). What is not finite makes its
    row's magnitude so too."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(LEAST)
    return x.mul_(torch.div(_STEPS, largest)).round_().to(torch.int8), largest


def _quantize_normed(x: Stream, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_rows(rms_norm(h, norm)), magnitudes without the factor sqrt(hidden). The norm's own factor is a row's,
    so it goes into the scale: one pass less."""
    codes, largest = quantize_rows(torch.mul(x.h, norm))
    length = torch.linalg.vector_norm(x.h, 2, -1, True)
    return codes, largest.mul_(length.mul_(length).add_(x.h.shape[-1] * eps).rsqrt_())


class Int8Ops(TorchOps):
    """The four products of a layer and the head in W8A8; everything else as in TorchOps, fp32."""

    def __init__(self, device: torch.device, roles: frozenset[str], blocks: NativeOps | None = None) -> None:
        """``roles``: which weights are quantized, of qkv, o, gate_up, down and head; the others stay fp32. ``blocks``:
        who multiplies a checkpoint's own codes, where the processor can; it quantizes activations."""
        super().__init__(device, torch.float32)
        self._roles = roles
        self._packs = packs()
        self._blocks = blocks
        self._linears: dict[torch.Tensor, Int8Linear] = {}

    def prepare(self, role: str, weight: torch.Tensor) -> torch.Tensor:
        """A quantized weight's scales [out], by which this implementation finds the rest."""
        if role not in self._roles:
            return super().prepare(role, weight)
        factor = weight.shape[1] ** 0.5 if role in _NORMED else 1.0
        linear = Int8Linear.of(weight, factor=factor, pack=self._packs)
        self._linears[linear.scales] = linear
        return linear.scales

    def prepare_blocks(self, role: str, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """As ``prepare``, but a quantized weight that has blocks stays what they are."""
        kept = self._blocks.adopt(blocks) if self._blocks is not None and role in self._roles else None
        return self.prepare(role, weight) if kept is None else kept

    def _reads(self, weight: torch.Tensor) -> NativeOps | None:
        """Who holds the weight's blocks."""
        return self._blocks if self._blocks is not None and weight in self._blocks else None

    def norm_linear(
        self, x: Stream, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if (blocks := self._reads(weight)) is not None:
            return blocks.norm_linear(x, norm, eps, weight, bias)
        linear = self._linears.get(weight)
        if linear is None:
            return super().norm_linear(x, norm, eps, weight, bias)
        codes, scales = _quantize_normed(x, norm, eps)
        out = linear(codes)
        return out.mul_(scales) if bias is None else torch.addcmul(bias, out, scales)

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: Stream, next_norm: torch.Tensor) -> Stream:
        if (blocks := self._reads(weight)) is not None:
            return blocks.linear_add(x, weight, residual, next_norm)
        linear = self._linears.get(weight)
        if linear is None:
            return super().linear_add(x, weight, residual, next_norm)
        codes, scales = quantize_rows(x)
        return Stream(torch.addcmul(residual.h, linear(codes), scales))

    def norm_mlp(self, x: Stream, norm: torch.Tensor, eps: float, gate_up: torch.Tensor) -> torch.Tensor:
        if (blocks := self._reads(gate_up)) is not None:
            return blocks.norm_mlp(x, norm, eps, gate_up)
        linear = self._linears.get(gate_up)
        if linear is None:
            return super().norm_mlp(x, norm, eps, gate_up)
        codes, scales = _quantize_normed(x, norm, eps)
        return self._gated(linear(codes).mul_(scales))

    def norm_logits(
        self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, head: torch.Tensor
    ) -> torch.Tensor:
        if (blocks := self._reads(head)) is not None:
            return blocks.norm_logits(x, rows, norm, eps, head)
        linear = self._linears.get(head)
        if linear is None:
            return super().norm_logits(x, rows, norm, eps, head)
        if rows is not None:
            x = Stream(x.h.index_select(0, rows))
        codes, scales = _quantize_normed(x, norm, eps)
        return linear(codes).mul_(scales)

    @property
    def largest(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
        """Of NativeOps, where there is one."""
        return None if self._blocks is None else self._blocks.largest

    def layers_with(self, attention: Any) -> Callable[..., Stream | None] | None:
        """Who multiplies blocks also goes through whole layers."""
        return None if self._blocks is None else self._blocks.layers_with(attention)

    @property
    def quantized_bytes(self) -> int:
        """Of the codes; the scales are what the decoder holds."""
        kept = 0 if self._blocks is None else self._blocks.quantized_bytes
        return kept + sum(linear.num_bytes for linear in self._linears.values())

    def choices(self) -> dict[str, str]:
        how = f"oneDNN, packed; torch._int_mm up to {FEW_ROWS} rows" if self._packs else "torch._int_mm: no VNNI here"
        if self._blocks is not None and not self._linears:
            how = "the checkpoint's own blocks, native"
        return {"products": how, "kept fp32": ", ".join(sorted(ROLES - self._roles)) or "none"}
