"""The peer of ``everwarm bench engine``: transformers' own model with the very weights that we serve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replica import weights
from replica.model import ModelConfig, Weights


def as_transformers(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as a transformers model with sdpa attention, ready to generate.

    A directory goes through ``from_pretrained``. A GGUF file is read by our reader (transformers' takes 15 CPU
    seconds for the default model) and its tensors are assigned to transformers' modules. Raises ValueError for a GGUF
    file with scaled rope.
    """
    if not weights.is_gguf(path):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return _from_weights(*weights.load(path, dtype))


def _from_weights(c: ModelConfig, loaded: Weights) -> Any:
    import transformers

    if c.rope.kind != "default" or c.rope.freq_factors is not None:
        raise ValueError(f"model: only GGUF files without rope scaling can be compared; this has {c.rope.kind!r}")
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[c.family]
    shape = config_class(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("meta"):
        model = model_class(shape)
    model.load_state_dict(_state_dict(c, loaded), assign=True)
    # The rotary buffer is no parameter, so nothing has filled it yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(shape)
    return model.eval()


def _state_dict(c: ModelConfig, loaded: Weights) -> dict[str, torch.Tensor]:
    state = {
        "model.embed_tokens.weight": loaded.embed,
        "model.norm.weight": loaded.norm,
        "lm_head.weight": loaded.head,
    }
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i, layer in enumerate(loaded.layers):
        at = f"model.layers.{i}."
        for name, part in zip("qkv", layer.qkv.split((q, kv, kv)), strict=True):
            state[f"{at}self_attn.{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", layer.qkv_bias.split((q, kv, kv)), strict=True):
                state[f"{at}self_attn.{name}_proj.bias"] = part
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if norm is not None:
                state[f"{at}self_attn.{name}.weight"] = norm
        state[f"{at}mlp.gate_proj.weight"], state[f"{at}mlp.up_proj.weight"] = layer.gate_up.chunk(2)
        state[f"{at}self_attn.o_proj.weight"] = layer.o
        state[f"{at}mlp.down_proj.weight"] = layer.down
        state[f"{at}input_layernorm.weight"] = layer.input_norm
        state[f"{at}post_attention_layernorm.weight"] = layer.post_norm
    return state


@dataclass(frozen=True)
class Generated:
    """ids per prompt; seconds from the call to the first token; token steps per second after it."""

    ids: list[list[int]]
    first_s: float
    steps_per_s: float


def generate(model: Any, prompts: Sequence[Sequence[int]], count: int) -> Generated:
    """Greedy ``model.generate`` on prompts of one length, with a time stamp per step."""
    stamps: list[float] = []

    def stamp(*_: Any, **__: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(len(prompts), dtype=torch.bool)

    ids = torch.tensor([list(prompt) for prompt in prompts])
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            stopping_criteria=[stamp],
            pad_token_id=0,
        )
    rate = (len(stamps) - 1) / (stamps[-1] - stamps[0]) if len(stamps) > 1 else 0.0
    return Generated(out[:, ids.shape[1] :].tolist(), stamps[0] - started, rate)
