"""Narrow KV pages in the whole engine: more pages from the same memory, and the equalities among themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from runner_driver import make_runner, prompts

from kernels.quantized_kv import STORED
from replica.config import EngineConfig, ModelFacts, resolve
from replica.kv import PagedKV
from replica.llm import LLM
from replica.model import tiny_config
from router.wire import Sampling

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 130)
GREEDY = Sampling(temperature=0, max_tokens=16)
SEEDED = Sampling(temperature=1.0, seed=5, max_tokens=16)


@contextmanager
def open_llm(**options: object) -> Iterator[LLM]:
    runner = make_runner(seed=3, **options)
    with LLM(runner.config, runner) as llm:
        yield llm
        llm.engine.check_invariants()
        runner.check_invariants()


def asked() -> list[list[int]]:
    own = prompts(LENGTHS)
    return own + [[*own[-1][:100], 7 * i, 3] for i in range(8)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[list[int]]]]:
    """dtype -> greedy and seeded ids of each prompt, one at a time, nothing cached, never cut."""
    found = {}
    for dtype in ("auto", *STORED):
        with open_llm(kv_cache_dtype=dtype, prefix_caching=False, chunked_prefill=False, async_scheduling=False) as llm:
            found[dtype] = [[llm.generate([p], s)[0].ids for p in asked()] for s in (GREEDY, SEEDED)]
    return found


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("options", [
    {"chunk_size": 32},
    {"chunk_size": 48, "prefix_caching": False, "async_scheduling": False},
    {"max_num_pages": 14, "max_model_len": 192, "watermark": 0.0},
    {"page_size": 64},
], ids=["chunks", "no cache", "preemption", "pages of 64"])  # fmt: skip
def test_output_depends_on_nothing_else(alone, dtype: str, options: dict) -> None:
    with open_llm(kv_cache_dtype=dtype, max_batch_size=16, **options) as llm:
        for sampling, wanted in zip((GREEDY, SEEDED), alone[dtype], strict=True):
            assert [output.ids for output in llm.generate(asked(), sampling)] == wanted
        counters = llm.engine.info()["counters"]
        assert (counters["prefix_hits"] > 0) is options.get("prefix_caching", True)
        assert (counters["preemptions"] > 0) is ("watermark" in options)
        assert llm.engine.info()["config"]["kv_cache_dtype"] == llm.engine.info()["runner"]["kv_cache_dtype"] == dtype


def test_narrow_pages_are_near_the_model_and_not_the_same(alone) -> None:
    first = {dtype: [ids[:4] for ids in greedy] for dtype, (greedy, _) in alone.items()}
    agree = {dtype: sum(a == b for a, b in zip(first[dtype], first["auto"], strict=True)) for dtype in STORED}
    assert agree["int8"] >= 12, f"of 16 prompts, int8 keeps the first four tokens of {agree['int8']}"
    assert alone["int4"] != alone["auto"] and alone["int4"] != alone["int8"]


def test_pages_of_another_dtype_have_other_names() -> None:
    names = set()
    for dtype in ("auto", *STORED):
        with open_llm(kv_cache_dtype=dtype) as llm:
            names.add(llm.request(list(range(16)), GREEDY).hashes)
    assert len(names) == 4


@pytest.mark.parametrize(("dtype", "per_head"), [("auto", 256), ("fp8", 64), ("int8", 68), ("int4", 36)])
def test_the_same_memory_holds_more_pages(dtype: str, per_head: int) -> None:
    facts = ModelFacts(8192, num_layers=30, num_kv_heads=3, head_dim=64)
    config = resolve(EngineConfig(kv_cache_dtype=dtype, host_cache_gb=0.5), facts)
    page = 2 * 30 * 3 * per_head * 16
    assert (config.num_pages, config.num_host_pages) == (2**30 // page, 2**29 // page)
    assert config.kv_cache_dtype == ("float32" if dtype == "auto" else dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *STORED])
def test_memory_taken_is_memory_accounted(dtype: str, device: str) -> None:
    model = tiny_config(head_dim=32)
    kv = PagedKV(model, 11, 16, dtype, device)
    parts = [part for layer in kv.layers for part in vars(layer).values() if part is not None]
    assert kv.num_bytes == sum(part.numel() * part.element_size() for part in parts)
    assert kv.num_bytes == 11 * 16 * model.facts(4).kv_bytes_per_token(dtype)
    assert device == "cpu" or all(part.is_contiguous() for part in parts), "kernels want k and v contiguous"


def test_what_reads_narrow_pages_on_a_gpu_is_recorded() -> None:
    """Triton's attention where it can; where it can't, torch's with the reason, and a switch that asks is refused."""
    from kernels.dispatch import SWITCHES, Dispatch, Site

    def site(head_dim: int, dtype: torch.dtype) -> Site:
        shape = {"page_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
        return Site(torch.device("cuda"), torch.bfloat16, dtype, head_dim=head_dim, vocab_size=256, **shape)

    for dtype in STORED.values():
        assert Dispatch(site(64, dtype), {}, _fakes()).choices()["attention"] == "triton (first choice)"
    chosen = Dispatch(site(80, torch.uint8), {}, _fakes())
    assert chosen.choices()["attention"].startswith("torch (not triton: head_dim 80")
    assert "attention is torch" in (chosen.capturable or "")
    with pytest.raises(ValueError, match=r"fused_attention: 'true' can't be honoured here: .*head_dim 80"):
        Dispatch(site(80, torch.int8), dict.fromkeys(SWITCHES, "auto") | {"fused_attention": "true"}, _fakes())


def _fakes():
    """The real candidates with operations that are never run."""
    from dataclasses import replace

    from kernels.dispatch import OPERATIONS, default_candidates

    class Nothing:
        def choices(self) -> dict[str, str]:
            return {}

    for operation in OPERATIONS:
        setattr(Nothing, operation, None)
    return [replace(candidate, make=lambda site: Nothing()) for candidate in default_candidates()]


@pytest.mark.parametrize("dtype", STORED)
def test_a_page_is_copied_whole_and_a_changed_bit_shows(dtype: str) -> None:
    kv = PagedKV(tiny_config(), 9, 16, dtype, "cpu")
    generator = torch.Generator().manual_seed(0)
    for part in kv._parts:
        filled = torch.randint(0, 250, (*part.shape[:-1], part.shape[-1] * part.element_size()), generator=generator)
        part.view(torch.uint8).copy_(filled)
    pages = torch.tensor([3, 8, 1])
    sums = kv.checksums(pages)
    buffer = kv.page_buffer(5, "cpu")
    kv.read(pages, buffer)
    kv.write(torch.tensor([7, 2, 4]), buffer)
    assert kv.checksums(torch.tensor([7, 2, 4])).tolist() == sums.tolist()
    assert len(set(kv.checksums(torch.arange(9)).tolist())) == 6, "three pages are copies"
    for layer, word, bit in ((0, 0, 0), (1, 5, 7), (1, 31, 3)):
        kv.flip_bit(3, layer=layer, word=word, bit=bit)
        changed = kv.checksums(pages)
        assert (changed != sums).tolist() == [True, False, False]
        kv.flip_bit(3, layer=layer, word=word, bit=bit)
    assert torch.equal(kv.checksums(pages), sums)
