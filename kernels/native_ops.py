"""The operations on a CPU in fp32 with the kernels of ``native*.c``; products of many rows stay torch's.

What they buy (docs/model.md has the figures): attention reads pages where they lie instead of gathering them; norm,
rotation with the KV write, and SiLU are one pass each; and where the checkpoint holds blocks of 4 or 8 bits, a step of
few rows reads those instead of the fp32 weights made from them. Nothing is rounded for it: the blocks say the same
numbers, and sums are fp32. Such a step goes through all layers in one call, where its threads meet without sleeping:
the same as operation by operation, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch

from kernels import native
from kernels.blocks import Blocks
from kernels.interface import AttentionMeta, AttentionShape, LayerKV, LayerWeights, Stream
from kernels.native_blocks import LANES, Arena, Packed, pack
from kernels.native_structs import Layer, Plan, Product, Rows, Shape, at
from kernels.reference import TorchOps

FEW_ROWS = 32
"""Up to so many rows are multiplied from blocks."""
MANY_ROWS = 1 << 30
SPLIT = 64
"""Keys per split of a single token's context, as in ``native_attention.c``."""
MAX_HEAD_DIM = 256
MAX_GROUP = 24
"""Query heads that share a KV head."""


@dataclass
class StepPlan:
    """Made once per step: what ``native.h`` calls so, and the tensors that it points to."""

    plan: Plan
    held: tuple[torch.Tensor, ...]


@dataclass
class Stack:
    """A decoder's layers over its pages, as ``native.c`` reads them (None: they can't be), and columns of what
    they hand on."""

    weights: Sequence[LayerWeights]
    kv: Sequence[LayerKV]
    layers: Any
    qkv: int = 0
    mixed: int = 0
    gated: int = 0


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
        self._arena = Arena()
        self._quantizes = quantizes
        self._most_rows = MANY_ROWS if quantizes else FEW_ROWS
        """That are multiplied from blocks."""
        self._rooms: dict[str, torch.Tensor] = {}
        self._stacks: deque[Stack] = deque(maxlen=2)
        """Of the last callers: a decoder and one that drafts for it take turns."""

    def prepare_blocks(self, role: str, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """As ``prepare``; steps of few rows will read ``blocks``, which hold the same numbers."""
        ready = self.prepare(role, weight)
        if (packed := pack(blocks, self._arena)) is not None:
            self._packed[ready] = packed
        return ready

    def adopt(self, blocks: Blocks) -> torch.Tensor | None:
        """Keeps the blocks alone; what is returned stands for the weight in the calls of this object. None where they
        can't be packed."""
        packed = pack(blocks, self._arena)
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

    def largest(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row of x fp32 [S, V]: where the first of its largest elements is, int64 [S], and whether all are finite,
        bool [S]; where they are not, the index is any."""
        x = x.contiguous()
        where, finite = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x), dtype=torch.bool)
        self._native.ew_largest(at(x), *x.shape, at(where), at(finite))
        return where, finite

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
        tokens = qkv.shape[0]
        out = torch.empty(tokens, shape.num_heads * shape.head_dim)
        if not tokens:
            return out
        plan, sizes = self._plan(tokens, meta, shape, cos, sin), _shape(shape, kv, meta.page_size)
        self._native.ew_attention(
            byref(sizes), byref(plan), at(q_norm), at(k_norm), at(qkv), at(kv.k), at(kv.v), at(out)
        )
        return out

    def layers_with(self, attention: Any) -> Callable[..., Stream | None] | None:
        """``layers``, where the operation ``attention`` would be done as it does it."""
        return self.layers if isinstance(attention, NativeOps) else None

    def layers(
        self,
        x: Stream,
        weights: Sequence[LayerWeights],
        kv: Sequence[LayerKV],
        meta: AttentionMeta,
        shape: AttentionShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Stream | None:
        """Implements ``kernels.interface.WholeLayers``; None where a product is not multiplied from blocks."""
        tokens, hidden = x.h.shape
        num_rows = tokens if rows is None else len(rows)
        stack = self._stacked(weights, kv) if 0 < tokens <= self._most_rows and num_rows <= tokens else None
        if stack is None:
            return None
        out = x.h if rows is None else torch.empty(num_rows, hidden)
        longest = max(hidden, stack.mixed, stack.gated)
        step = Rows(
            at(x.h), at(self._room("qkv", tokens * stack.qkv)), at(self._room("mixed", tokens * stack.mixed)),
            at(self._room("gated", tokens * stack.gated)), at(self._room("scratch", tokens * 2 * longest)), at(rows),
            num_rows, at(out), self._quantizes,
        )  # fmt: skip
        plan, sizes = self._plan(tokens, meta, shape, cos, sin), _shape(shape, kv[0], meta.page_size)
        self._native.ew_layers(stack.layers, len(weights), byref(sizes), byref(plan), byref(step))
        return Stream(out)

    def _stacked(self, weights: Sequence[LayerWeights], kv: Sequence[LayerKV]) -> Stack | None:
        """None where a product is not multiplied from blocks."""
        for stack in self._stacks:
            if stack.weights is weights and stack.kv is kv:
                break
        else:
            stack = self._stack(weights, kv)
            self._stacks.append(stack)
        return stack if stack.layers is not None else None

    def _stack(self, weights: Sequence[LayerWeights], kv: Sequence[LayerKV]) -> Stack:
        layers = (Layer * len(weights))()
        for to, w, pages in zip(layers, weights, kv, strict=True):
            for name in ("qkv", "o", "gate_up", "down"):
                packed = self._packed.get(getattr(w, name))
                if packed is None or (name == "gate_up" and packed.num_outputs % (2 * LANES)):
                    return Stack(weights, kv, None)
                setattr(to, name, packed.matrix)
            for name in ("input_norm", "post_norm", "q_norm", "k_norm", "qkv_bias"):
                setattr(to, name, at(getattr(w, name)))
            to.k, to.v = at(pages.k), at(pages.v)
        first = layers[0]
        return Stack(weights, kv, layers, first.qkv.out, first.o.wide, first.down.wide)

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
        y = torch.empty(rows, packed.num_outputs // 2 if gated else packed.num_outputs)
        scratch = self._room("scratch", rows * 2 * wide)
        product = Product(
            ctypes.addressof(packed.matrix), at(x), at(norm), at(bias), at(residual), at(y), at(scratch), rows, eps,
            gated, self._quantizes,
        )  # fmt: skip
        self._native.ew_product(byref(product))
        return y

    def _room(self, name: str, size: int) -> torch.Tensor:
        """Scratch of at least ``size`` floats, for one call."""
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = torch.empty(size)
        return room

    def _normed(self, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if x.normed is not None:
            return x.normed
        out = torch.empty_like(x.h)
        self._native.ew_norm(x.h.data_ptr(), norm.data_ptr(), eps, *x.h.shape, out.data_ptr())
        return out

    def _plan(
        self, tokens: int, meta: AttentionMeta, shape: AttentionShape, cos: torch.Tensor, sin: torch.Tensor
    ) -> Plan:
        if meta.extra is None:
            meta.extra = {}
        made = meta.extra.get("native")
        if made is None:
            made = meta.extra["native"] = self._make_plan(tokens, meta, shape, cos, sin)
        assert isinstance(made, StepPlan)
        return made.plan

    def _make_plan(
        self, tokens: int, meta: AttentionMeta, shape: AttentionShape, cos: torch.Tensor, sin: torch.Tensor
    ) -> StepPlan:
        heads, dim = shape.num_heads, shape.head_dim
        splits, longest = [0], 0
        for first, end, length in zip(meta.cu_q_host, meta.cu_q_host[1:], meta.kv_len_host, strict=False):
            splits.append(splits[-1] + (-(-length // SPLIT) if end - first == 1 else 0))
            longest = max(longest, length if end - first > 1 else 0)
        keys = self._room("keys", -(-longest // LANES) * LANES * shape.num_kv_heads * dim)
        partials = self._room("partials", splits[-1] * heads * (dim + 2))
        held = (
            meta.cu_q.contiguous(), meta.kv_len.contiguous(), meta.block_table.contiguous(),
            meta.positions.to(torch.int32), meta.slots.long(), torch.tensor(splits, dtype=torch.int32), cos, sin, keys,
            partials,
        )  # fmt: skip
        return StepPlan(Plan(tokens, len(meta.kv_len), meta.block_table.shape[1], *map(at, held)), held)


def _shape(shape: AttentionShape, kv: LayerKV, page_size: int) -> Shape:
    stride = kv.k.stride(1)
    assert kv.k.stride(0) == page_size * stride and kv.v.stride(1) == stride, "pages lie apart"
    return Shape(shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size, stride, shape.eps, shape.scale)


def declines(heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> str | None:
    """Why attention can't run here, or None."""
    if kv_dtype != torch.float32:
        return f"native attention reads float32 pages, these are {str(kv_dtype).removeprefix('torch.')}"
    if head_dim % LANES or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of {LANES} up to {MAX_HEAD_DIM}"
    if heads // kv_heads > MAX_GROUP:
        return f"{heads // kv_heads} query heads share a KV head; at most {MAX_GROUP} may"
    return None
