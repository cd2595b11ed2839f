"""Rotary tables against transformers' own initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replica.rope import RopeConfig, from_transformers, inverse_frequencies, tables

transformers = pytest.importorskip("transformers")
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16,
     "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 4096, "truncate": False,
     "attention_factor": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: f"{p['rope_type']} {p.get('factor', '')}")
def test_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072, rope_parameters=parameters
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours, scale = inverse_frequencies(from_transformers(parameters, 131072), 64)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=2e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-7)
    cos, sin = tables(from_transformers(parameters, 131072), 64, 300, torch.device("cpu"))
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(cos, their_cos[0, :, :32], rtol=0, atol=1e-4)
    torch.testing.assert_close(sin, their_sin[0, :, :32], rtol=0, atol=1e-4)


def test_frequency_factors_divide() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    divided, _ = inverse_frequencies(RopeConfig(freq_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_other_scalings_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        from_transformers({"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}, 4096)


def test_partial_rotation_is_refused() -> None:
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        from_transformers({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 4096)
