"""Resolution of the engine's options: what each auto becomes, and what is refused."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from pydantic import ValidationError

from replica.config import DeviceFacts, EngineConfig, ModelFacts, ResolvedConfig, resolve

SMALL = ModelFacts(max_position=8192, num_layers=30, num_kv_heads=3, head_dim=64, weight_bytes=540_000_000)
LARGE = ModelFacts(max_position=40960, num_layers=36, num_kv_heads=8, head_dim=128, weight_bytes=16_400_000_000)
H200 = DeviceFacts(kind="cuda", cores=16, memory_bytes=140 * 2**30)


def test_cpu_defaults(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = resolve(EngineConfig(), SMALL, DeviceFacts(cores=4, alone=False))
    assert (config.dtype, config.device, config.threads) == ("float32", "cpu", 1)
    assert (config.max_batch_size, config.chunk_size, config.long_prefill_tokens) == (32, 512, 256)
    assert config.num_pages == int(2**30 / (2 * 30 * 3 * 64 * 4 * 16)) and config.max_model_len == 8192
    for name, reason in config.reasons.items():
        assert f"{name} = {reason}" in caplog.text


def test_gpu_defaults() -> None:
    config = resolve(EngineConfig(), LARGE, H200)
    assert (config.dtype, config.max_batch_size, config.itl_target_ms) == ("bfloat16", 256, None)
    assert (config.chunk_size, config.busy_chunk_size, config.long_prefill_tokens) == (4096, 640, 1024)
    assert "while few decode; 640 otherwise" in config.reasons["chunk_size"]
    wide = resolve(EngineConfig(max_batch_size=1000), LARGE, H200)
    assert wide.busy_chunk_size == 1000 and "; 1000 otherwise" in wide.reasons["chunk_size"]
    even = resolve(EngineConfig(max_batch_size=5000), LARGE, H200)
    assert even.chunk_size == even.busy_chunk_size == 5000 and "few decode" not in even.reasons["chunk_size"]
    asked = resolve(EngineConfig(chunk_size=1536), LARGE, H200)
    assert (asked.chunk_size, asked.busy_chunk_size, asked.long_prefill_tokens) == (1536, 1536, 768)
    small = resolve(EngineConfig(), SMALL, H200)
    assert (small.chunk_size, small.busy_chunk_size) == (4096, 2048)
    huge = resolve(EngineConfig(), dataclasses.replace(LARGE, weight_bytes=int(6e10)), H200)
    assert (huge.chunk_size, huge.busy_chunk_size, huge.long_prefill_tokens) == (1024, 512, 512)
    share = dataclasses.replace(H200, memory_bytes=60 * 2**30)
    assert [resolve(EngineConfig(), m, share).chunk_size for m in (SMALL, LARGE)] == [2048, 2048]
    aimed = resolve(EngineConfig(itl_target_ms=40), LARGE, H200)
    assert (aimed.chunk_size, aimed.itl_target_ms) == (2048, 40.0) and "itl_target_ms" in aimed.reasons["chunk_size"]
    page = 2 * 36 * 8 * 128 * 2 * 16
    assert config.num_pages == int((140 * 2**30 * 0.9 - LARGE.weight_bytes - 2**30) / page)
    measured = resolve(EngineConfig(), LARGE, dataclasses.replace(H200, kv_bytes=page * 1000))
    assert measured.num_pages == 1000 and measured.max_model_len == 999 * 16
    assert "what 999 pages hold" in measured.reasons["max_model_len"]


def test_explicit_values_are_kept_and_not_explained() -> None:
    config = resolve(EngineConfig(max_batch_size=4, chunk_size=100, max_num_pages=50, max_model_len=300), SMALL)
    assert (config.max_batch_size, config.chunk_size, config.num_pages, config.max_model_len) == (4, 100, 50, 300)
    assert not {"max_batch_size", "chunk_size", "max_num_pages", "max_model_len"} & config.reasons.keys()


def test_everything_of_the_options_is_resolved() -> None:
    names = {field.name for field in dataclasses.fields(ResolvedConfig)}
    assert set(EngineConfig.model_fields) - names == {"max_num_pages", "gpu_memory_utilization", "cpu_kv_gb"}


def test_words_from_a_command_line() -> None:
    config = EngineConfig(
        prefix_caching="false", fused_qkv=True, fused_silu="false", page_size="32", chunk_size="64", threads="auto"
    )
    assert config.prefix_caching is False and (config.fused_qkv, config.fused_silu) == ("true", "false")
    assert (config.page_size, config.chunk_size) == (32, 64)


@pytest.mark.parametrize(("options", "words"), [
    ({"max_model_len": 9000}, ("max_model_len", "9000", "8192")),
    ({"max_num_pages": 11, "max_model_len": 200}, ("max_model_len", "200", "160", "10 pages")),
    ({"max_num_pages": 1}, ("max_num_pages", "1", "2")),
    ({"chunk_size": 8, "max_batch_size": 16}, ("chunk_size", "8", "16")),
    ({"kv_cache_paging": False, "prefix_caching": True}, ("prefix_caching", "kv_cache_paging")),
    ({"device": "cuda"}, ("device", "cuda", "cpu")),
    ({"chunked_prefill": False, "itl_target_ms": 50}, ("itl_target_ms", "50", "chunked_prefill")),
])  # fmt: skip
def test_refusals_name_field_value_and_limit(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(EngineConfig(**options), SMALL)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("options", [
    {"chunksize": 8}, {"page_size": 17}, {"chunk_size": 0}, {"max_num_pages": -1}, {"watermark": 1.0},
    {"fused_qkv": "maybe"}, {"scheduler": "fifo"}, {"ageing_s": 0}, {"itl_target_ms": 0}, {"itl_target_ms": "low"},
])  # fmt: skip
def test_bad_options_are_refused(options: dict) -> None:
    with pytest.raises(ValidationError):
        EngineConfig(**options)


def test_baselines_follow_through() -> None:
    unpaged = resolve(EngineConfig(kv_cache_paging=False, max_num_pages=101, max_model_len=320), SMALL)
    assert not unpaged.prefix_caching and "kv_cache_paging" in unpaged.reasons["prefix_caching"]
    assert unpaged.max_batch_size == 5, "100 pages hold five reservations of 20"
    uncut = resolve(EngineConfig(chunked_prefill=False, chunk_size=64, long_prefill_tokens=8), SMALL)
    for name in ("chunk_size", "long_prefill_tokens"):
        assert getattr(uncut, name) == 8192 and "chunked_prefill is off" in uncut.reasons[name]
    small_chunk = resolve(EngineConfig(chunk_size=8), SMALL)
    assert small_chunk.max_batch_size == 8


@pytest.mark.parametrize(("options", "problem"), [
    ({"speculative_layers": 2}, "speculative_layers: needs speculative=draft, not 'off'"),
    ({"speculative": "ngram", "speculative_model": "x"}, "speculative_model: needs speculative=draft"),
    ({"speculative": "draft"}, "needs either speculative_model or speculative_layers"),
    ({"speculative": "draft", "speculative_model": "x", "speculative_layers": 2}, "needs either"),
    ({"speculative": "draft", "speculative_layers": 30}, "fewer than the model's 30"),
    ({"speculative": "ngram", "speculative_ngram_min": 5, "speculative_ngram_max": 4}, "5 exceeds"),
])  # fmt: skip
def test_speculation_that_can_not_be(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve(EngineConfig(**options), SMALL)


def test_off_is_a_word_for_yaml_too() -> None:
    assert resolve(EngineConfig(speculative=False), SMALL).speculative == "off"
    assert resolve(EngineConfig(itl_target_ms=False), SMALL).itl_target_ms is None
    assert resolve(EngineConfig(itl_target_ms="40"), SMALL).itl_target_ms == 40.0
    for tokens in (0, 16):
        with pytest.raises(ValidationError, match="speculative_tokens"):
            EngineConfig(speculative_tokens=tokens)
