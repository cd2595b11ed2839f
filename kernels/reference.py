"""The operations in plain torch: what every other implementation is compared with, and the CPU path without a compiler.

On a CPU in fp32 products read weights packed by oneDNN, which at 2 to 32 rows takes half the time of plain ones or less
(docs/model.md); decode gathers pages into one buffer per step size, with query heads grouped by KV head so that no key
is read twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.interface import AttentionMeta, AttentionShape, LayerKV, Stream
from kernels.torch_attention import TorchAttention

_LINEAR_ROLES = ("qkv", "o", "gate_up", "down")


class TorchOps:
    """Implements ``kernels.interface.Ops`` on any device. Not for concurrent use: gather buffers are shared."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._cpu_fp32 = device.type == "cpu" and dtype == torch.float32
        self._packs = self._cpu_fp32 and torch.backends.mkldnn.is_available()
        self._attention = TorchAttention()
        self._packed_heads: dict[torch.Tensor, torch.Tensor] = {}

    def prepare(self, role: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight in the memory order this implementation reads fastest; same shape, same values."""
        if not self._cpu_fp32:
            return weight
        if not self._packs:
            return weight.t().contiguous().t() if role in _LINEAR_ROLES else weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        if role == "head":
            # The plain table stays: embedding may read it.
            self._packed_heads[weight] = packed
            return weight
        return packed

    def embed(self, ids: torch.Tensor, table: torch.Tensor, next_norm: torch.Tensor, eps: float) -> Stream:
        return Stream(F.embedding(ids, table))

    def norm_linear(
        self, x: Stream, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        normed = self._normed(x, norm, eps)
        if weight.is_mkldnn:
            return _packed_product(normed, weight, bias)
        return torch.mm(normed, weight.t()) if bias is None else torch.addmm(bias, normed, weight.t())

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
        return self._attention(qkv, kv, meta, shape, q_norm, k_norm, cos, sin)

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: Stream, next_norm: torch.Tensor) -> Stream:
        if weight.is_mkldnn:
            return Stream(torch.ops.mkldnn._linear_pointwise(x, residual.h, weight, None, "add"))
        return Stream(torch.addmm(residual.h, x, weight.t()))

    def norm_mlp(self, x: Stream, norm: torch.Tensor, eps: float, gate_up: torch.Tensor) -> torch.Tensor:
        normed = self._normed(x, norm, eps)
        both = _packed_product(normed, gate_up) if gate_up.is_mkldnn else torch.mm(normed, gate_up.t())
        return self._gated(both)

    def norm_logits(
        self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, head: torch.Tensor
    ) -> torch.Tensor:
        if rows is not None:
            x = Stream(x.h.index_select(0, rows))
        normed = self._normed(x, norm, eps)
        packed = self._packed_heads.get(head)
        return F.linear(normed, head).float() if packed is None else _packed_product(normed, packed)

    def choices(self) -> dict[str, str]:
        return {}

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        """both [M, 2 I], overwritten -> silu(first half) * second half."""
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)

    def _normed(self, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if x.normed is not None:
            return x.normed
        if x.h.dtype != torch.float32:
            return F.rms_norm(x.h, (x.h.shape[-1],), norm, eps)
        # On a CPU rms_norm is ten small operations; this is seven, and one pass over x less.
        size = x.h.shape[-1]
        scale = torch.linalg.vector_norm(x.h, 2, -1, True).square_().add_(size * eps).rsqrt_().mul_(size**0.5)
        return torch.mul(x.h, scale).mul_(norm)


def _packed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias; ``weight`` packed by oneDNN."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
