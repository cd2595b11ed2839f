"""What the HTTP layer knows of the model it serves: names, text pipeline, limits, defaults."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.text.tokenizer import Tokenizer, from_gguf_metadata, from_hf

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of generation_config.json that become a request's defaults, as in vLLM."""


@dataclass(frozen=True)
class ModelCard:
    """One served model. ``names[0]`` is what responses say; all of them are accepted."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    vocab_size: int
    """Ids the engine can take and sample: the model's, which may exceed the tokenizer's."""
    max_model_len: int
    """Longest prompt + output in tokens."""
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    owned_by: str = "everwarm"

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("a model needs at least one served name")
        if unknown := set(self.default_sampling) - set(SAMPLING_DEFAULTS):
            raise ValueError(f"default_sampling has {sorted(unknown)}; allowed are {list(SAMPLING_DEFAULTS)}")

    @property
    def name(self) -> str:
        return self.names[0]


def card_from_directory(directory: str | Path, names: Sequence[str], *, max_model_len: int | None = None) -> ModelCard:
    """Card of a Hugging Face checkpoint. Raises TokenizerError, or ValueError naming a missing config key."""
    root = Path(directory)
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    config = {**config, **config.get("text_config", {})}
    tokenizer = from_hf(root)
    generation = root / "generation_config.json"
    raw = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    defaults = {key: raw[key] for key in SAMPLING_DEFAULTS if raw.get(key) is not None}
    if raw.get("do_sample") is False:
        defaults.pop("temperature", None)
    for key in ("vocab_size", "max_position_embeddings"):
        if key not in config:
            raise ValueError(f"{root / 'config.json'} has no {key}")
    limit = int(config["max_position_embeddings"])
    return ModelCard(
        tuple(names),
        tokenizer,
        int(config["vocab_size"]),
        limit if max_model_len is None else min(limit, max_model_len),
        tokenizer.eos_token_ids,
        defaults,
    )


def card_from_gguf(metadata: Mapping[str, Any], names: Sequence[str], *, max_model_len: int | None = None) -> ModelCard:
    """Card of a GGUF file, out of its metadata. Raises TokenizerError for tokenizers not known here."""
    tokenizer = from_gguf_metadata(metadata)
    limit = int(metadata[f"{metadata['general.architecture']}.context_length"])
    return ModelCard(
        tuple(names),
        tokenizer,
        len(metadata["tokenizer.ggml.tokens"]),
        limit if max_model_len is None else min(limit, max_model_len),
        tokenizer.eos_token_ids,
    )
