"""The five operations a decoder layer is made of, and what they are given.

A layer is ``norm_linear -> attention -> linear_add -> norm_mlp -> linear_add``. Every implementation (torch
reference, Triton fused, Triton unfused) offers these five plus ``embed`` and ``norm_logits``, so the model is written
once and each ``fused_*`` switch only chooses an implementation. The seam is cut so that RMSNorm can be fused
with its *consumer*: the residual stream is a :class:`Stream`, whose producer may already have written
``h * g`` and partial sums of squares for the next norm, and whose consumer then only scales rows by
``rsqrt(mean(h^2) + eps)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class Stream:
    """The residual stream: ``h`` [M, hidden]. ``scaled`` = h * g of the next norm and ``sumsq`` [M, tiles] fp32 are
    there when a fused producer wrote them; both are None otherwise and the consumer norms ``h`` itself, unless the
    producer left ``normed`` = rms_norm(h, next norm), which cuBLAS consumers want."""

    h: torch.Tensor
    scaled: torch.Tensor | None = None
    sumsq: torch.Tensor | None = None
    normed: torch.Tensor | None = None


@dataclass
class LayerKV:
    """One layer's pages: k and v [num_pages, page_size, kv_heads, head_dim] in the KV dtype. Page 0 is the null page.
    On a CPU they are the halves of one tensor [num_pages, page_size, 2 kv_heads, head_dim], elsewhere contiguous.
    ``k_scale``, ``v_scale`` [num_pages, page_size, kv_heads] fp32 exist for int8 and int4 KV, whose codes are described
    in ``quantized_kv``."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass
class SharedSplits:
    """Splits of the context that several requests with one new token have in common, to be read once for all of them.

    items int32 [I, 1 + members]: index of the split, then the requests (-1: none); index -1: no item. covered int32
    [R]: leading tokens of each request that items cover, whole splits of ``split`` tokens."""

    items: torch.Tensor
    covered: torch.Tensor
    split: int


@dataclass
class AttentionMeta:
    """Where each of M packed tokens sits. R requests; all int32 on the device; ``slots`` int64 or int32.

    cu_q [R+1]: prefix sums of new tokens per request. kv_len [R]: context including the new tokens.
    block_table [R, P]: padded with the null page. positions [M]. slots [M]: page * page_size + offset of each new
    token, -1 for padding, which only captured steps have. max_q, max_kv: host ints. decode_only: every request has one
    new token. cu_q_host, kv_len_host: host copies (lists) for code that must not sync. uneven: contexts differ so much
    that the longest is worth splitting. chained: requests of a decode_only batch may continue one another's context, so
    every new key and value must be in the cache before any request attends."""

    cu_q: torch.Tensor
    kv_len: torch.Tensor
    block_table: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_size: int
    max_q: int
    max_kv: int
    decode_only: bool
    cu_q_host: list[int]
    kv_len_host: list[int]
    uneven: bool = False
    chained: bool = False
    shared: SharedSplits | None = None
    extra: dict[str, Any] | None = None
    """An implementation's own per-batch preparation, made once per step."""


@dataclass
class AttentionShape:
    """num_heads query heads, num_kv_heads, head_dim; q_norm/k_norm weights [head_dim] or None; rope tables
    cos, sin [max_position, head_dim / 2] fp32 (rotate-half convention)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass
class Draw:
    """How to choose each of S ids. ``temperature`` fp32 [S] (0: greedy) and ``keys`` int32 [S, 2] of the counter-based
    noise; both None: all greedy. With ``last`` (int64, one per engine slot) and ``slots`` int32 [S], id i is also
    stored at last[slots[i]], where the next step finds it."""

    temperature: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    last: torch.Tensor | None = None
    slots: torch.Tensor | None = None


class LayerWeights(Protocol):
    """What ``prepare`` made of a layer's weights, and the rest as in checkpoints."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


class Ops(Protocol):
    """Weights are [out, in] as in checkpoints; M is the number of packed tokens."""

    def prepare(self, role: str, weight: torch.Tensor) -> torch.Tensor:
        """Called once per weight at load, role in qkv, o, gate_up, down, head: the same matrix, in whatever memory
        order this implementation reads fastest."""
        ...

    def embed(self, ids: torch.Tensor, table: torch.Tensor, next_norm: torch.Tensor, eps: float) -> Stream: ...

    def norm_linear(
        self, x: Stream, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """rms_norm(h, norm) @ weight.T + bias -> [M, out]."""
        ...

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
        """Optional QK-norm, RoPE, KV write at ``meta.slots``, then causal paged attention. May overwrite ``qkv``.

        qkv [M, (num_heads + 2 num_kv_heads) * head_dim] -> [M, num_heads * head_dim]."""
        ...

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: Stream, next_norm: torch.Tensor) -> Stream:
        """residual.h + x @ weight.T; may overwrite x. A fused implementation also writes ``scaled`` and ``sumsq`` for
        next_norm."""
        ...

    def norm_mlp(self, x: Stream, norm: torch.Tensor, eps: float, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(n @ gate.T) * (n @ up.T), n = rms_norm(h, norm); gate_up [2I, hidden] = [gate; up] -> [M, I]."""
        ...

    def norm_logits(
        self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, head: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the given rows (int64 [S], None: all) -> [S, vocab] fp32."""
        ...

    def choices(self) -> dict[str, str]:
        """op -> implementation in force and the reason, for the log and ``/v1/engine``."""
        ...


class WholeLayers(Protocol):
    """What an implementation may offer beside the operations: ``layers``, asked before they are."""

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
        """All layers of a step, as operation by operation, bit for bit; may overwrite x. After the last layer's
        attention only ``rows`` (int64 [S], None: all) go on -> [S, hidden]. None: not a step for it, nothing is done.
        The lists themselves are remembered: what is in them may not change."""
        ...
