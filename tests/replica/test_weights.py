"""Checkpoints: what transformers saves is what is served; what is incomplete or not served is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_driver import Ask, Driver, make_config, prompts
from test_gguf import write_gguf

from replica import weights
from replica.runner import ModelRunner

transformers = pytest.importorskip("transformers")
LENGTHS = (1, 15, 16, 17, 33)


def _tiny(family: str, **changes: Any) -> Any:
    shape = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(7)
    shape.update(changes)
    config = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _generate(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _tiny("Llama"),
    "llama tied, llama3 rope": lambda: _tiny(
        "Llama", tie_word_embeddings=True, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "llama yarn": lambda: _tiny("Llama", rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    }),
    "llama linear": lambda: _tiny("Llama", rope_parameters={
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0,
    }),
    "llama qkv bias off, odd head": lambda: _tiny("Llama", head_dim=24, num_key_value_heads=4),
    "mistral": lambda: _tiny("Mistral", sliding_window=None),
    "qwen2": lambda: _tiny("Qwen2"),
    "qwen3": lambda: _tiny("Qwen3", head_dim=32),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    model.save_pretrained(tmp_path)
    asked = prompts(LENGTHS)
    expected = [_generate(model, p, 20) for p in asked]
    runner = ModelRunner.open(tmp_path, make_config(max_model_len=128))
    for chunk in (7, 16, 512):
        got = Driver(runner, chunk=chunk).run([Ask(p) for p in asked], 20)
        assert [g.ids for g in got] == expected, f"chunk {chunk}"
    runner.close()
    runner.check_invariants()


def test_sharded_checkpoints(tmp_path: Path) -> None:
    model = CASES["qwen3"]()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    (_, one), (_, many) = weights.load(tmp_path / "one"), weights.load(tmp_path / "many")
    for a, b in zip(one.tensors(), many.tensors(), strict=True):
        assert torch.equal(a, b)


def test_dtype_conversion(tmp_path: Path) -> None:
    CASES["llama"]().save_pretrained(tmp_path)
    (_, full), (_, half) = weights.load(tmp_path), weights.load(tmp_path, torch.bfloat16)
    for a, b in zip(full.tensors(), half.tensors(), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.to(torch.bfloat16), b)


def test_num_weights_counts_every_tensor(tmp_path: Path) -> None:
    for case in ("llama", "llama tied, llama3 rope", "qwen2", "qwen3"):
        folder = tmp_path / case.replace(" ", "_")
        CASES[case]().save_pretrained(folder)
        config, loaded = weights.load(folder)
        assert config.num_weights() == sum(t.numel() for t in loaded.tensors()), case


def _edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        (lambda t: t.update({"model.layers.2.extra": torch.zeros(1)}), r"1 unexpected tensors, .*layers\.2\.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"'model\.norm\.weight' has shape \(3,\), not"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    CASES["llama"]().save_pretrained(tmp_path)
    _edit(tmp_path, change)
    with pytest.raises(weights.CheckpointError, match=message):
        weights.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ],
)
def test_what_is_not_served_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    CASES["llama"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        weights.load(tmp_path)


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    _tiny("Mistral", sliding_window=64).save_pretrained(tmp_path)
    with pytest.raises(weights.CheckpointError, match="sliding_window 64"):
        weights.read_config(tmp_path)


def test_a_config_without_weights_needs_the_dummy_format(tmp_path: Path) -> None:
    CASES["qwen3"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(weights.CheckpointError, match="weights are missing"):
        weights.load(tmp_path)
    config, drawn = weights.load(tmp_path, load_format="dummy", seed=3)
    _, again = weights.load(tmp_path, load_format="dummy", seed=3)
    assert config.qk_norm and all(torch.equal(a, b) for a, b in zip(drawn.tensors(), again.tensors(), strict=True))
    with pytest.raises(weights.CheckpointError, match="load_format"):
        weights.load(tmp_path, load_format="nope")


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to Q and K."""
    out = torch.empty_like(tensor)
    per = tensor.shape[0] // heads
    for h in range(heads):
        for i in range(per // 2):
            out[h * per + 2 * i] = tensor[h * per + i]
            out[h * per + 2 * i + 1] = tensor[h * per + per // 2 + i]
    return out


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_and_safetensors_of_one_model_are_the_same(arch: str, tmp_path: Path) -> None:
    model = CASES[arch]()
    model.save_pretrained(tmp_path)
    names = dict(zip(weights._HF_NAMES.values(), weights._GGUF_NAMES.values(), strict=True))
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach()
        parts = name.split(".")
        if parts[1] == "layers":
            short = ".".join(parts[3:])
            stem, _, kind = short.rpartition(".")
            new = f"blk.{parts[2]}." + (names.get(short) or f"{names[stem]}.{kind}")
            if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
                value = _interleaved(value, 4 if "q_proj" in stem else 2)
        else:
            new = names[name]
        tensors[new] = (tuple(value.shape), "F32", value.numpy().astype(np.float32).tobytes())
    c = model.config
    metadata = {
        "general.architecture": arch, f"{arch}.block_count": 2, f"{arch}.context_length": 512,
        f"{arch}.embedding_length": 64, f"{arch}.feed_forward_length": 96, f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2, f"{arch}.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        f"{arch}.attention.key_length": getattr(c, "head_dim", None) or 16, f"{arch}.rope.freq_base": 10000.0,
    }  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    (one, a), (two, b) = weights.load(tmp_path), weights.load(path)
    assert (one.head_dim, one.qkv_bias, one.qk_norm, one.rope.theta) == (
        two.head_dim,
        two.qkv_bias,
        two.qk_norm,
        two.rope.theta,
    )
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(x, y)


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "mamba"}, {})
    with pytest.raises(weights.CheckpointError, match="'mamba' is not served"):
        weights.read_config(path)
