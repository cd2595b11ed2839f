"""Llama-shaped decoders (Llama, Mistral, Qwen2, Qwen3) written once over the operations of ``kernels``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from kernels.interface import AttentionMeta, AttentionShape, Draw, LayerKV, Ops, Stream
from replica.config import ModelFacts
from replica.rope import RopeConfig, tables

Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    def num_weights(self) -> int:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
        layer += (q + 2 * kv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        tables = 1 if self.tied_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size

    def facts(self, itemsize: int) -> ModelFacts:
        """What config resolution asks, for weights of ``itemsize`` bytes."""
        return ModelFacts(
            self.max_position, self.num_layers, self.num_kv_heads, self.head_dim, self.num_weights() * itemsize
        )


@dataclass
class LayerWeights:
    """qkv [(heads + 2 kv) * head_dim, hidden]; o [hidden, heads * head_dim]; gate_up [2 * intermediate, hidden];
    down [hidden, intermediate]; norms [hidden]; q_norm, k_norm [head_dim] with Qwen3."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass
class Weights:
    """embed, head [vocab, hidden] (the same tensor when tied); norm [hidden]."""

    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor
    prepared: bool = False
    """Ops.prepare has seen every product's weight."""

    def prepare(self, ops: Ops) -> None:
        """Replaces each product's weight by what ``ops`` prefers to read; does nothing the second time."""
        if self.prepared:
            return
        for layer in self.layers:
            for role in ("qkv", "o", "gate_up", "down"):
                setattr(layer, role, ops.prepare(role, getattr(layer, role)))
        self.head = ops.prepare("head", self.head)
        self.prepared = True

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        yield self.embed
        yield self.norm
        if self.head is not self.embed:
            yield self.head
        for layer in self.layers:
            for field in fields(layer):
                if (tensor := getattr(layer, field.name)) is not None:
                    yield tensor


class Decoder:
    """The forward pass. Takes the weights over and prepares them for ``ops``."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self.ops = ops
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.weights = weights
        weights.prepare(ops)
        self.shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, config.head_dim**-0.5
        )
        self.cos, self.sin = tables(config.rope, config.head_dim, max_model_len, self.device)

    def forward(
        self, ids: torch.Tensor, kv: list[LayerKV], meta: AttentionMeta, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Writes KV of M packed tokens; logits fp32 of the given rows (int64 [S]; None: all) -> [S, vocab]."""
        x = self.hidden(ids, kv, meta, rows)
        return self.logits(x, None)

    def hidden(self, ids: torch.Tensor, kv: list[LayerKV], meta: AttentionMeta, rows: torch.Tensor | None) -> Stream:
        """The residual stream after the last layer, of ``rows`` only: the others end with their last KV write."""
        ops, w, eps = self.ops, self.weights, self.config.norm_eps
        x = ops.embed(ids, w.embed, w.layers[0].input_norm, eps)
        if (layers := getattr(ops, "layers", None)) is not None:
            done: Stream | None = layers(x, w.layers, kv, meta, self.shape, self.cos, self.sin, rows)
            if done is not None:
                return done
        last = len(w.layers) - 1
        for i, layer in enumerate(w.layers):
            qkv = ops.norm_linear(x, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
            mixed = ops.attention(qkv, kv[i], meta, self.shape, layer.q_norm, layer.k_norm, self.cos, self.sin)
            if i == last and rows is not None:
                mixed, x = mixed.index_select(0, rows), Stream(x.h.index_select(0, rows))
            x = ops.linear_add(mixed, layer.o, x, layer.post_norm)
            gated = ops.norm_mlp(x, layer.post_norm, eps, layer.gate_up)
            x = ops.linear_add(gated, layer.down, x, w.norm if i == last else w.layers[i + 1].input_norm)
        return x

    def logits(self, x: Stream, rows: torch.Tensor | None) -> torch.Tensor:
        """fp32 [S, vocab] of the given rows of ``x``."""
        return self.ops.norm_logits(x, rows, self.weights.norm, self.config.norm_eps, self.weights.head)

    def sample(self, x: Stream, draw: Draw) -> torch.Tensor:
        """Ids int32 [M] of all rows of ``x``, chosen without logits; -1 where one is not finite. Only where ``ops`` has
        ``norm_sample``."""
        choose: Callable[..., torch.Tensor] = self.ops.norm_sample  # type: ignore[attr-defined]
        return choose(x, None, self.weights.norm, self.config.norm_eps, self.weights.head, draw)


def random_model(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Weights:
    """Weights drawn so that activations keep their scale through the layers; the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator).mul_(scale * columns**-0.5)
        return drawn.to(dtype).to(device)

    def near_one(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype).to(device)

    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layers = [
        LayerWeights(
            input_norm=near_one(c.hidden_size),
            qkv=normal(q + 2 * kv, c.hidden_size),
            o=normal(c.hidden_size, q),
            post_norm=near_one(c.hidden_size),
            gate_up=normal(2 * c.intermediate_size, c.hidden_size),
            down=normal(c.hidden_size, c.intermediate_size),
            qkv_bias=normal(1, q + 2 * kv)[0] if c.qkv_bias else None,
            q_norm=near_one(c.head_dim) if c.qk_norm else None,
            k_norm=near_one(c.head_dim) if c.qk_norm else None,
        )
        for _ in range(c.num_layers)
    ]
    embed = normal(c.vocab_size, c.hidden_size, c.hidden_size**0.5)
    head = embed if c.tied_embeddings else normal(c.vocab_size, c.hidden_size)
    return Weights(embed, layers, near_one(c.hidden_size), head)


def tiny_config(family: Family = "llama", **changes: object) -> ModelConfig:
    """A two-layer shape for tests and checks."""
    config = ModelConfig(
        family=family,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_position=4096,
        rope=RopeConfig(),
        tied_embeddings=False,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    return replace(config, **changes)  # type: ignore[arg-type]
