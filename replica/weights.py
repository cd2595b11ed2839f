"""Checkpoints -> :class:`~replica.model.Weights`: GGUF files and local directories of safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from kernels.blocks import Blocks
from replica import gguf
from replica.model import Family, LayerWeights, ModelConfig, Weights, random_model
from replica.rope import RopeConfig, from_transformers

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
Prepare = Callable[[str, torch.Tensor, Blocks | None], torch.Tensor]
"""Role, weight, and the blocks it was decoded from where the file holds such."""
GGUF_ARCHITECTURES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class CheckpointError(ValueError):
    """The checkpoint is incomplete, inconsistent, or of a kind that is not served."""


class Source:
    """Named tensors of a checkpoint; keeps count of which were asked for."""

    def __init__(
        self,
        where: str,
        names: set[str],
        read: Callable[[str], torch.Tensor],
        blocks: Callable[[str], Blocks | None] = lambda name: None,
    ) -> None:
        self._where = where
        self._names = names
        self._read = read
        self.blocks = blocks
        """The quantized blocks of a tensor that was taken, None where it has none."""
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises CheckpointError when the tensor is missing or has another shape."""
        if name not in self._names:
            raise CheckpointError(f"{self._where}: tensor {name!r} is missing")
        self._taken.add(name)
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self._where}: tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Raises CheckpointError when a tensor was left over: the model would not be what the checkpoint says."""
        left = sorted(name for name in self._names - self._taken if not ignorable(name))
        if left:
            raise CheckpointError(f"{self._where}: {len(left)} unexpected tensors, the first {left[:3]}")


def is_gguf(path: str | Path) -> bool:
    return Path(path).is_file() and Path(path).suffix == ".gguf"


def read_config(path: str | Path) -> ModelConfig:
    """The model's shape, without its weights. Raises CheckpointError, gguf.GGUFError or OSError."""
    return _gguf_config(gguf.open(path)) if is_gguf(path) else _transformers_config(Path(path))


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    load_format: str = "auto",
    seed: int = 0,
    prepare: Prepare | None = None,
) -> tuple[ModelConfig, Weights]:
    """Reads a GGUF file or a directory with config.json and safetensors; q, k, v and gate, up come out stacked.

    ``load_format="dummy"`` draws random weights for the directory's config and reads none. ``prepare`` (Ops.prepare)
    sees each product's weight as soon as it is there, so that no second copy of the model ever exists. Raises
    CheckpointError, gguf.GGUFError or OSError.
    """
    device = torch.device(device)
    if load_format not in ("auto", "dummy"):
        raise CheckpointError(f"load_format: {load_format!r}; allowed are 'auto' and 'dummy'")
    config = read_config(path)
    if load_format == "dummy":
        return config, random_model(config, seed, dtype, device)
    with _gguf_source(gguf.open(path), config) if is_gguf(path) else _safetensors_source(Path(path)) as source:
        names = _GGUF_NAMES if is_gguf(path) else _HF_NAMES
        weights = _assemble(source, config, names, dtype, device, prepare or (lambda role, weight, blocks: weight))
    weights.prepared = prepare is not None
    return config, weights


# --- names -----------------------------------------------------------------------------------------------------------

_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layer": "model.layers.{}.",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "layer": "blk.{}.",
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def _assemble(
    source: Source, c: ModelConfig, names: dict[str, str], dtype: torch.dtype, device: torch.device, prepare: Prepare
) -> Weights:
    """Stacks and converts tensor by tensor, so that the host holds little more than the result."""
    q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size

    def whole(name: str, *shape: int) -> torch.Tensor:
        return source.take(name, *shape).to(device=device, dtype=dtype, copy=True)

    def stacked(parts: list[tuple[str, int]], *rest: int) -> torch.Tensor:
        out = torch.empty(sum(size for _, size in parts), *rest, dtype=dtype, device=device)
        at = 0
        for name, size in parts:
            out[at : at + size] = source.take(name, size, *rest)
            at += size
        return out

    def product(role: str, parts: list[tuple[str, int]], wide: int) -> torch.Tensor:
        weight = stacked(parts, wide)
        return prepare(role, weight, Blocks.stack([source.blocks(name) for name, _ in parts]))

    def layer(prefix: str) -> LayerWeights:
        heads = [("q", q), ("k", kv), ("v", kv)]
        return LayerWeights(
            input_norm=whole(prefix + names["input_norm"], c.hidden_size),
            qkv=product("qkv", [(f"{prefix}{names[n]}.weight", size) for n, size in heads], c.hidden_size),
            o=product("o", [(prefix + names["o"], c.hidden_size)], q),
            post_norm=whole(prefix + names["post_norm"], c.hidden_size),
            gate_up=product("gate_up", [(prefix + names[n], inner) for n in ("gate", "up")], c.hidden_size),
            down=product("down", [(prefix + names["down"], c.hidden_size)], inner),
            qkv_bias=stacked([(f"{prefix}{names[n]}.bias", size) for n, size in heads]) if c.qkv_bias else None,
            q_norm=whole(prefix + names["q_norm"], c.head_dim) if c.qk_norm else None,
            k_norm=whole(prefix + names["k_norm"], c.head_dim) if c.qk_norm else None,
        )

    embed = whole(names["embed"], c.vocab_size, c.hidden_size)
    layers = [layer(names["layer"].format(i)) for i in range(c.num_layers)]
    norm = whole(names["norm"], c.hidden_size)
    head = embed if c.tied_embeddings else whole(names["head"], c.vocab_size, c.hidden_size)
    tied_copy = {names["head"]} if c.tied_embeddings else set()
    source.finish(lambda name: name in tied_copy or name.endswith("rotary_emb.inv_freq") or name == "rope_freqs.weight")
    head_blocks = source.blocks(names["embed" if c.tied_embeddings else "head"])
    return Weights(embed, layers, norm, prepare("head", head, head_blocks))


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _gguf_config(file: gguf.GGUFFile) -> ModelConfig:
    meta, where = file.metadata, file.path.name
    arch = meta.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{where}: architecture {arch!r} is not served; served are {', '.join(GGUF_ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        value = meta.get(f"{arch}.{key}")
        if not isinstance(value, (int, float)):
            raise CheckpointError(f"{where}: metadata {arch}.{key} is {value!r}; one number is needed")
        return value

    if meta.get(f"{arch}.expert_count"):
        raise CheckpointError(f"{where}: a mixture of experts is not served")
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(meta.get(f"{arch}.attention.key_length", hidden // heads))
    if meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{where}: {arch}.rope.dimension_count differs from the head's {head_dim} dimensions")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{where}: tensor 'token_embd.weight' is missing")
    return ModelConfig(
        family=GGUF_ARCHITECTURES[arch],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=int(need("feed_forward_length")),
        num_layers=int(need("block_count")),
        num_heads=heads,
        num_kv_heads=int(meta.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        max_position=int(need("context_length")),
        rope=_gguf_rope(file, arch),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _gguf_rope(file: gguf.GGUFFile, arch: str) -> RopeConfig:
    meta = file.metadata
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{file.path.name}: rope scaling {kind!r}; supported are none, linear and yarn")
    factors = file.load("rope_freqs.weight").tolist() if "rope_freqs.weight" in file.tensors else None
    return RopeConfig(
        theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else kind,
        factor=float(meta.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_max_position=int(
            meta.get(f"{arch}.rope.scaling.original_context_length", meta[f"{arch}.context_length"])
        ),
        freq_factors=None if factors is None else tuple(factors),
    )


@contextmanager
def _gguf_source(file: gguf.GGUFFile, config: ModelConfig) -> Iterator[Source]:
    interleaved = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if config.family == "llama" else {}

    def read(name: str) -> torch.Tensor:
        tensor = torch.from_numpy(file.load(name))
        heads = heads_of(name)
        return tensor if heads is None else _rotate_half_order(tensor, heads)

    def heads_of(name: str) -> int | None:
        return interleaved.get(name.split(".")[-2]) if "." in name else None

    def blocks(name: str) -> Blocks | None:
        found, heads = file.blocks(name), heads_of(name)
        if found is None or heads is None:
            return found
        order = _rotate_half_order(torch.arange(len(found.codes)), heads)
        return found.select(order.numpy())

    yield Source(file.path.name, set(file.tensors), read, blocks)


def _rotate_half_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp stores the rows of Q and K (llama only) with rotary pairs side by side; we rotate halves."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


# --- safetensors -----------------------------------------------------------------------------------------------------


def _transformers_config(path: Path) -> ModelConfig:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: neither a .gguf file nor a directory with config.json")
    from transformers import AutoConfig

    raw = AutoConfig.from_pretrained(path)
    names = list(getattr(raw, "architectures", None) or [])
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(f"{path}: architectures {names}; served are {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[names[0]]
    _refuse_what_is_not_served(raw, family, path)
    parameters = getattr(raw, "rope_parameters", None) or {"rope_theta": getattr(raw, "rope_theta", 10000.0)}
    heads = raw.num_attention_heads
    return ModelConfig(
        family=family,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(raw, "num_key_value_heads", None) or heads,
        head_dim=getattr(raw, "head_dim", None) or raw.hidden_size // heads,
        norm_eps=raw.rms_norm_eps,
        max_position=raw.max_position_embeddings,
        rope=from_transformers(parameters, raw.max_position_embeddings),
        tied_embeddings=bool(raw.tie_word_embeddings),
        qkv_bias=family == "qwen2" or bool(getattr(raw, "attention_bias", False)),
        qk_norm=family == "qwen3",
    )


def _refuse_what_is_not_served(raw: Any, family: Family, path: Path) -> None:
    """Raises CheckpointError for options that would change the arithmetic."""
    if raw.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {raw.hidden_act!r}; only 'silu' is served")
    for name in ("quantization_config", "mlp_bias"):
        if getattr(raw, name, None):
            raise CheckpointError(f"{path}: {name} {getattr(raw, name)!r} is not served")
    window = getattr(raw, "sliding_window", None)
    if family.startswith("qwen") and not getattr(raw, "use_sliding_window", False):
        window = None
    if window and window < raw.max_position_embeddings:
        raise CheckpointError(f"{path}: sliding_window {window} is not served")


@contextmanager
def _safetensors_source(path: Path) -> Iterator[Source]:
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise CheckpointError(f"{path}: weights are missing: {missing[:3]}")
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for shard in shards:
            opened = stack.enter_context(safe_open(path / shard, framework="pt"))
            where.update(dict.fromkeys(opened.keys(), opened))
        yield Source(str(path), set(where), lambda name: where[name].get_tensor(name))
