"""A whole engine over random weights on the GPU: for speed, where no checkpoint is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from cluster.bench.shapes import Shape
from replica.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from replica.loop import Engine
from replica.model import LayerWeights, ModelConfig, Weights
from replica.rope import RopeConfig
from replica.runner import ModelRunner
from router.pages import RootFields


def model_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norm_eps=1e-6,
        max_position=shape.max_position,
        rope=RopeConfig(theta=1e6),
        tied_embeddings=shape.tied,
        qk_norm=True,
    )


def random_weights(c: ModelConfig, device: str = "cuda") -> Weights:
    """Drawn on the device, in bf16: on a GPU seconds instead of minutes for 8 B parameters."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, columns**-0.5)

    def near_one(n: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(n, dtype=torch.bfloat16, device=device)

    layers = [
        LayerWeights(
            input_norm=near_one(c.hidden_size),
            qkv=normal(q + 2 * kv, c.hidden_size),
            o=normal(c.hidden_size, q),
            post_norm=near_one(c.hidden_size),
            gate_up=normal(2 * c.intermediate_size, c.hidden_size),
            down=normal(c.hidden_size, c.intermediate_size),
            q_norm=near_one(c.head_dim),
            k_norm=near_one(c.head_dim),
        )
        for _ in range(c.num_layers)
    ]
    head = normal(c.vocab_size, c.hidden_size)
    embed = head if c.tied_embeddings else normal(c.vocab_size, c.hidden_size)
    return Weights(embed, layers, near_one(c.hidden_size), head)


def open_random_engine(
    shape: Shape, options: dict[str, Any], on_deltas: Callable[[list[tuple[Any, Any]]], None]
) -> tuple[Engine, ResolvedConfig]:
    """An engine that is not started. ``options`` of EngineConfig; contexts up to 8192 tokens unless they say otherwise.
    Raises ValueError, also where there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("device: random weights are drawn on a GPU, and there is none")
    model = model_config(shape)
    facts = DeviceFacts("cuda", torch.get_num_threads(), True, torch.cuda.mem_get_info()[0])
    config = resolve(EngineConfig(**{"max_model_len": 8192, **options}), model.facts(2), facts)
    runner = ModelRunner(model, random_weights(model), config)
    root = RootFields("bench", "none", config.dtype, config.page_size)
    engine = Engine(config, runner, root=root, on_deltas=on_deltas, on_events=lambda batch: None)
    gc.freeze()  # as a replica does: full collections over the libraries' objects would show as long steps
    return engine, config
