"""Model shapes that are measured with random weights, and the bytes that bound a decode step. No torch here: the peer's
process reads this too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COPY_RATE = 4.3e12
"""Bytes per second of a device-to-device copy on an H200, reads plus writes: what floors are stated against."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder in bf16."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    tied: bool = False
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    max_position: int = 40960

    @property
    def weight_bytes(self) -> int:
        """What one decode step reads of the weights: of the embedding only a few rows."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        layer = self.hidden * (attention + 3 * self.intermediate)
        return 2 * (self.layers * layer + self.vocab * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Per token of context."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def floor_s(self, batch: int, context: float) -> float:
        """The shortest time a decode step can take, by bytes."""
        return (self.weight_bytes + batch * context * self.kv_bytes) / COPY_RATE

    def hf_config(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "attention_bias": False,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_position,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        }


SHAPES = {
    "qwen3-0.6b": Shape(layers=28, hidden=1024, heads=16, intermediate=3072, tied=True),
    "qwen3-8b": Shape(layers=36, hidden=4096, heads=32, intermediate=12288),
    "qwen3-32b": Shape(layers=64, hidden=5120, heads=64, intermediate=25600),
}
