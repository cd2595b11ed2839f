"""Rotary position tables: plain, linear, llama3 and yarn scaling, under the names of transformers' configs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions rotate. Fields beyond ``theta`` matter only to the kinds that use them."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    """Scale of cos and sin; None: 1, or 0.1 ln(factor) + 1 with yarn (Peng et al. 2023, eq. 22)."""
    freq_factors: tuple[float, ...] | None = None
    """Divides each frequency (GGUF's rope_freqs); [head_dim / 2]."""


def from_transformers(parameters: Mapping[str, Any], max_position: int) -> RopeConfig:
    """From a config's ``rope_parameters``. Raises ValueError for a scaling that is not supported."""
    kind = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    if kind not in KINDS:
        raise ValueError(f"rope_type: {kind!r} is not supported; supported are {', '.join(KINDS)}")
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor: {parameters['partial_rotary_factor']}; only 1.0 is supported")
    known: dict[str, Any] = {"theta": float(parameters.get("rope_theta", 10000.0)), "kind": kind}
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"):
        if parameters.get(name) is not None:
            known[name] = parameters[name]
    known["original_max_position"] = parameters.get("original_max_position_embeddings") or max_position
    known["attention_factor"] = _yarn_attention_factor(parameters) if kind == "yarn" else None
    return RopeConfig(**known)


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float | None:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        factor = parameters["factor"]
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return None


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, fp32 [head_dim / 2], and the factor on cos and sin."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponent)
    scale = 1.0 if rope.attention_factor is None else rope.attention_factor
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif rope.kind == "yarn":
        inverse = _yarn(inverse, rope, head_dim)
        scale = _mscale(rope.factor) if rope.attention_factor is None else rope.attention_factor
    if rope.freq_factors is not None:
        inverse = inverse / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inverse, scale


def _llama3(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inverse
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inverse / rope.factor + smooth * inverse
    return torch.where(wavelength > low, inverse / rope.factor, torch.where(wavelength < high, inverse, between))


def _yarn(inverse: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Peng et al. 2023, section 3.2: a ramp over dimensions between full interpolation and none."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def tables(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [length, head_dim / 2], computed on the CPU so that every device has the same."""
    inverse, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse[None]
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)
