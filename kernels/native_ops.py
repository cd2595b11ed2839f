"""The operations on a CPU in fp32 with the kernels of ``native.c``; products of many rows stay torch's.

What they buy (docs/model.md has the figures): attention reads pages where they lie instead of gathering them; norm,
rotation with the KV write, and SiLU are one pass each; and where the checkpoint holds blocks of 4 or 8 bits, a step of
few rows reads those instead of the fp32 weights made from them. Nothing is rounded for it: the blocks say the same
numbers, and sums are fp32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from kernels import native
from kernels.blocks import BLOCK, Blocks
from kernels.interface import AttentionMeta, AttentionShape, LayerKV, Stream
from kernels.reference import TorchOps

FEW_ROWS = 32
"""Up to so many rows are multiplied from blocks."""
LANES = 16
MANY_ROWS = 1 << 30
MAX_HEAD_DIM = 256
MAX_GROUP = 24
"""Query heads that share a KV head."""


@dataclass(frozen=True)
class Packed:
    """Blocks in the order that ``native.c`` reads: sixteen outputs side by side, one in each lane of a vector; a lane's
    32-bit word holds 8 codes of 4 bits, or 4 of 8. codes int32 [out / 16, in / 32, bits, 16]; scale, least fp16
    [out / 16, in / 32, 16]."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    least: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0] * LANES

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scale, self.least) if t is not None)


def pack(blocks: Blocks) -> Packed | None:
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
        grouped = values.reshape(out // LANES, LANES, wide // BLOCK).transpose(0, 2, 1)
        return torch.from_numpy(np.ascontiguousarray(grouped, np.float16))

    least = None if blocks.least is None else halves(blocks.least)
    return Packed(
        blocks.bits, torch.from_numpy(np.ascontiguousarray(lanes).view(np.int32)), halves(blocks.scale), least
    )


@dataclass
class StepPlan:
    """Made once per step. cos, sin fp32 [M, head_dim / 2]; begin, kv_len, table int32 as in AttentionMeta; keys: room
    for the transposed keys of one request."""

    cos: torch.Tensor
    sin: torch.Tensor
    begin: torch.Tensor
    kv_len: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor


class NativeOps(TorchOps):
    """Implements ``kernels.interface.Ops``. Not for concurrent use: scratch is shared."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        library: ctypes.CDLL | None = None,
        *,
        quantizes: bool = False,
    ) -> None:
        """``library``: as ``native.build`` makes it; None: this process's. ``quantizes``: all products from blocks, at
        any number of rows, with activations rounded to 8 bits; only where the library has them. Raises
        native.Unavailable."""
        super().__init__(device, dtype)
        found = library or native.library()
        if isinstance(found, native.Unavailable):
            raise found
        self._native = found
        self._packed: dict[torch.Tensor, Packed] = {}
        self._quantizes = quantizes
        self._most_rows = MANY_ROWS if quantizes else FEW_ROWS
        """That are multiplied from blocks."""
        self._scratch = torch.empty(0)
        self._keys = torch.empty(0)

    def prepare_blocks(self, role: str, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """As ``prepare``; steps of few rows will read ``blocks``, which hold the same numbers."""
        ready = self.prepare(role, weight)
        if (packed := pack(blocks)) is not None:
            self._packed[ready] = packed
        return ready

    def adopt(self, blocks: Blocks) -> torch.Tensor | None:
        """Keeps the blocks alone; what is returned stands for the weight in the calls of this object. None where they
        can't be packed."""
        packed = pack(blocks)
        if packed is None:
            return None
        self._packed[packed.codes] = packed
        return packed.codes

    def __contains__(self, weight: torch.Tensor) -> bool:
        return weight in self._packed

    def choices(self) -> dict[str, str]:
        if not self._packed:
            return {"products": "oneDNN"}
        kinds = sorted({packed.bits for packed in self._packed.values()})
        bits = " and ".join(f"{kind}-bit" for kind in kinds)
        return {"products": f"up to {FEW_ROWS} rows from the checkpoint's {bits} blocks, more by oneDNN"}

    @property
    def quantized_bytes(self) -> int:
        """Of the blocks, without those that stand for their weight."""
        return sum(
            packed.num_bytes - (packed.codes.nbytes if weight is packed.codes else 0)
            for weight, packed in self._packed.items()
        )

    def norm_linear(
        self, x: Stream, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        packed = self._few(x.h, weight)
        if packed is None:
            return super().norm_linear(x, norm, eps, weight, bias)
        return self._product(packed, x.h, norm=norm, eps=eps, bias=bias)

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: Stream, next_norm: torch.Tensor) -> Stream:
        packed = self._few(x, weight)
        if packed is None:
            return super().linear_add(x, weight, residual, next_norm)
        return Stream(self._product(packed, x, residual=residual.h))

    def norm_mlp(self, x: Stream, norm: torch.Tensor, eps: float, gate_up: torch.Tensor) -> torch.Tensor:
        packed = self._few(x.h, gate_up)
        if packed is not None and packed.num_outputs % (2 * LANES) == 0:
            return self._product(packed, x.h, norm=norm, eps=eps, gated=True)
        return super().norm_mlp(x, norm, eps, gate_up)

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        rows, width = both.shape
        if width % (2 * LANES):
            return super()._gated(both)
        out = torch.empty(rows, width // 2)
        self._native.ew_gate(both.data_ptr(), rows, width // 2, out.data_ptr())
        return out

    def norm_logits(
        self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, head: torch.Tensor
    ) -> torch.Tensor:
        h = x.h if rows is None else x.h.index_select(0, rows)
        packed = self._few(h, head)
        if packed is None:
            return super().norm_logits(x, rows, norm, eps, head)
        return self._product(packed, h, norm=norm, eps=eps)

    def attention(
        self,
        qkv: torch.Tensor,
        kv: LayerKV,
        meta: AttentionMeta,
        shape: AttentionShape,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        plan = self._plan(meta, shape, cos, sin)
        heads, kv_heads, dim, tokens = shape.num_heads, shape.num_kv_heads, shape.head_dim, qkv.shape[0]
        k, v, stride = kv.k.data_ptr(), kv.v.data_ptr(), kv.k.stride(1)
        assert kv.k.stride(0) == meta.page_size * stride and kv.v.stride(1) == stride, "pages lie apart"
        at = qkv.data_ptr()
        self._native.ew_place(
            at, tokens, heads, kv_heads, dim, _at(q_norm), _at(k_norm), shape.eps, plan.cos.data_ptr(),
            plan.sin.data_ptr(), plan.slots.data_ptr(), k, v, stride,
        )  # fmt: skip
        out = torch.empty(tokens, heads * dim)
        self._native.ew_attend(
            at, heads, kv_heads, dim, k, v, stride, meta.page_size, len(plan.kv_len), plan.begin.data_ptr(),
            plan.kv_len.data_ptr(), plan.table.data_ptr(), plan.table.shape[1], shape.scale, plan.keys.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def _few(self, x: torch.Tensor, weight: torch.Tensor) -> Packed | None:
        return self._packed.get(weight) if x.shape[0] <= self._most_rows else None

    def _product(
        self,
        packed: Packed,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        rows, wide = x.shape
        out = packed.num_outputs
        if self._scratch.numel() < rows * 2 * wide:
            self._scratch = torch.empty(max(rows, FEW_ROWS) * 2 * wide)
        y = torch.empty(rows, out // 2 if gated else out)
        self._native.ew_product(
            x.data_ptr(), rows, wide, out, _at(norm), eps, packed.bits, packed.codes.data_ptr(),
            packed.scale.data_ptr(), _at(packed.least), _at(bias), _at(residual), gated, self._quantizes,
            self._scratch.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def _normed(self, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if x.normed is not None:
            return x.normed
        out = torch.empty_like(x.h)
        self._native.ew_norm(x.h.data_ptr(), norm.data_ptr(), eps, *x.h.shape, out.data_ptr())
        return out

    def _plan(self, meta: AttentionMeta, shape: AttentionShape, cos: torch.Tensor, sin: torch.Tensor) -> StepPlan:
        if meta.extra is None:
            meta.extra = {}
        plan = meta.extra.get("native")
        if plan is None:
            positions = meta.positions.long()
            begin = meta.cu_q_host
            several = [length for a, b, length in zip(begin, begin[1:], meta.kv_len_host, strict=False) if b - a > 1]
            room = -(-max(several, default=0) // LANES) * LANES * shape.num_kv_heads * shape.head_dim
            if self._keys.numel() < room:
                self._keys = torch.empty(room)
            plan = meta.extra["native"] = StepPlan(
                cos.index_select(0, positions), sin.index_select(0, positions), meta.cu_q.contiguous(),
                meta.kv_len.contiguous(), meta.block_table.contiguous(), meta.slots.long(), self._keys,
            )  # fmt: skip
        assert isinstance(plan, StepPlan)
        return plan


def declines(heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> str | None:
    """Why attention can't run here, or None."""
    if kv_dtype != torch.float32:
        return f"native attention reads float32 pages, these are {str(kv_dtype).removeprefix('torch.')}"
    if head_dim % LANES or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of {LANES} up to {MAX_HEAD_DIM}"
    if heads // kv_heads > MAX_GROUP:
        return f"{heads // kv_heads} query heads share a KV head; at most {MAX_GROUP} may"
    return None


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
