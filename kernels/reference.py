"""The operations in plain torch: what every other implementation is compared with, and the CPU path.

On a CPU in fp32 three things matter (2 threads, AVX-512, SmolLM2-135M): products read weights stored [in, out],
which at 8 to 32 rows takes half the time of [out, in]; the head has a second, oneDNN-packed copy; and decode gathers
pages into one buffer per step size, with query heads grouped by KV head so that no key is read twice.
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
        self._attention = TorchAttention()
        self._packed_heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, role: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight in the memory order this implementation reads fastest; same shape, same values."""
        if not self._cpu_fp32:
            return weight
        if role in _LINEAR_ROLES:
            return weight.t().contiguous().t()
        if role == "head" and torch.backends.mkldnn.is_available():
            # The plain table stays: embedding reads it, and it is the faster one for a single row.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._packed_heads[weight.data_ptr()] = (weight, packed)
        return weight

    def embed(self, ids: torch.Tensor, table: torch.Tensor, next_norm: torch.Tensor, eps: float) -> Stream:
        return Stream(F.embedding(ids, table))

    def norm_linear(
        self, x: Stream, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        normed = _normed(x, norm, eps)
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
        return Stream(torch.addmm(residual.h, x, weight.t()))

    def norm_mlp(self, x: Stream, norm: torch.Tensor, eps: float, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = torch.mm(_normed(x, norm, eps), gate_up.t()).chunk(2, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)

    def norm_logits(
        self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, head: torch.Tensor
    ) -> torch.Tensor:
        if rows is not None:
            x = Stream(x.h.index_select(0, rows))
        normed = _normed(x, norm, eps)
        packed = self._packed_heads.get(head.data_ptr())
        if packed is not None and normed.shape[0] > 1:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(normed, packed[1], None, "none", [], "")
            return out
        return F.linear(normed, head).float()

    def choices(self) -> dict[str, str]:
        return {}


def _normed(x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
    if x.normed is not None:
        return x.normed
    if x.h.dtype != torch.float32:
        return F.rms_norm(x.h, (x.h.shape[-1],), norm, eps)
    # On a CPU rms_norm is ten small operations; this is seven, and one pass over x less.
    size = x.h.shape[-1]
    scale = torch.linalg.vector_norm(x.h, 2, -1, True).square_().add_(size * eps).rsqrt_().mul_(size**0.5)
    return torch.mul(x.h, scale).mul_(norm)
