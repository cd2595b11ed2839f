"""The options that ``everwarm verify`` turns, and which combinations of them it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from replica.config import EngineConfig, ModelFacts

EXACT_KV = ("auto",)
"""KV dtypes that lose nothing; every other one is lossy."""
PAGE = 16
BATCH = 8
HOST_PAGES = 64
Case = dict[str, Any]
"""Axis -> value."""


@dataclass(frozen=True)
class Plan:
    """``axes``: exact ones, name -> values, the default first. ``lossy``: option -> values. ``left_out``: what can't be
    run on this model, and why."""

    axes: Mapping[str, tuple[Any, ...]]
    lossy: Mapping[str, tuple[Any, ...]]
    left_out: Mapping[str, str] = field(default_factory=dict)


def allowed(option: str) -> tuple[Any, ...]:
    """The values that EngineConfig admits for an option, () when there is no such option (yet)."""
    info = EngineConfig.model_fields.get(option)
    return get_args(info.annotation) if info else ()


def plan_for(model: ModelFacts, device: str) -> Plan:
    """Read off the engine's own options, so that a new value joins by itself."""
    axes: dict[str, tuple[Any, ...]] = {
        "kv_cache_paging": (True, False),
        "scheduler": allowed("scheduler"),
        "chunk_size": ("auto", PAGE),
        "prefix_caching": (True, False),
        "pool": ("roomy", "tiny"),
        "host_cache": (False, True),
        "async_scheduling": (True, False),
    }
    left_out: dict[str, str] = {}
    if device == "cpu":  # first, since each kind has weights of its own
        axes = {"cpu_kernels": ("auto", "torch"), **axes}
    if ways := list(allowed("speculative")):
        if model.num_layers < 2 and "draft" in ways:
            ways.remove("draft")
            left_out["speculative=draft"] = "the model has one layer, so no fewer can draft for it"
        axes["speculative"] = tuple(ways)
    lossy = {
        "kv_cache_dtype": tuple(value for value in allowed("kv_cache_dtype") if value not in EXACT_KV),
        "quantization": tuple(value for value in allowed("quantization") if value not in ("none", "auto")),
    }
    return Plan(axes, {name: values for name, values in lossy.items() if values}, left_out)


def sensible(case: Case) -> bool:
    """Contiguous reservations share no pages, and without a prefix cache there is nothing to keep on the host."""
    return bool(
        (case["kv_cache_paging"] or not case["prefix_caching"]) and (case["prefix_caching"] or not case["host_cache"])
    )


def every(axes: Mapping[str, tuple[Any, ...]]) -> list[Case]:
    """All sensible combinations, the default first."""
    product = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [case for case in product if sensible(case)]


def covering(axes: Mapping[str, tuple[Any, ...]]) -> list[Case]:
    """Few cases in which every sensible pair of values of two axes occurs: greedy, the default first."""
    cases = every(axes)
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = cases[0] if not chosen else max(cases, key=lambda case: len(missing.intersection(_pairs(case))))
        chosen.append(best)
        missing.difference_update(_pairs(best))
    return chosen


def _pairs(case: Case) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return itertools.combinations([(name, repr(value)) for name, value in case.items()], 2)


def name_of(case: Case, axes: Mapping[str, tuple[Any, ...]]) -> str:
    """What differs from the default; "default" if nothing does."""
    changed = [f"{name}={value}" for name, value in case.items() if value != axes[name][0]]
    return " ".join(str(part).lower() for part in changed) or "default"


def options_of(case: Case, longest: int, model: ModelFacts, dtype: str) -> dict[str, Any]:
    """EngineConfig fields for a case; ``longest`` request in tokens, output included; pages hold ``dtype``. A tiny pool
    holds the longest request and two pages more, so that requests must make room for each other."""
    pages = -(-longest // PAGE)
    options = {name: value for name, value in case.items() if name not in ("pool", "host_cache", "speculative")}
    options |= {"page_size": PAGE, "max_batch_size": BATCH, "max_model_len": longest, "watermark": 0.0}
    options["max_num_pages"] = 1 + (pages + 2 if case["pool"] == "tiny" else BATCH * (pages + 1))
    if case["host_cache"]:  # its pages are also checked while they lie there
        page_bytes = PAGE * model.kv_bytes_per_token(dtype)
        options |= {"host_cache_gb": (HOST_PAGES + 0.5) * page_bytes / 2**30, "canary": True}
    if case.get("speculative", "off") != "off":
        options["speculative"] = case["speculative"]
        if case["speculative"] == "draft":
            options["speculative_layers"] = max(1, model.num_layers // 2)
    return options
