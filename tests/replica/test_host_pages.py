"""Copies between device and host: the memory itself, and a real decoder whose pages come back."""

from __future__ import annotations

import random

import pytest
import torch
from runner_driver import make_runner, prompts

from kernels.quantized_kv import STORED
from replica import host_pages
from replica.batch import Move
from replica.host_pages import HostPages
from replica.kv import PagedKV
from replica.llm import LLM, EngineStopped
from replica.model import tiny_config
from router.wire import Sampling


@pytest.mark.parametrize("staging_pages", [1, 3, 100])
@pytest.mark.parametrize("dtype", ["float32", *STORED])
def test_pages_arrive_as_they_left(dtype: str, staging_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random moves in any mixture, against lists of what each page and slot must hold."""
    kv = PagedKV(tiny_config(), 20, 16, dtype, "cpu")
    monkeypatch.setattr(host_pages, "STAGING_BYTES", staging_pages * kv.page_bytes)
    host = HostPages(kv, 9)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    slots: list[int | None] = [None] * 9
    for _ in range(25):
        for part in kv._parts:  # as steps would, between moves
            data, written = part.view(torch.uint8), rng.sample(range(20), 6)
            data[:, written] = torch.randint_like(data[:, written], 120, generator=generator)
        pages: list[int] = kv.checksums(torch.arange(20)).tolist()
        moves = []
        for _ in range(rng.randrange(4)):
            to_host = rng.random() < 0.5 or None in slots
            count = rng.randrange(1, 9)
            move = Move(to_host, rng.sample(range(1, 20), count), rng.sample(range(9), count))
            moves.append(move)
            for page, slot in zip(move.pages, move.slots, strict=True):
                if to_host:
                    slots[slot] = pages[page]
                else:
                    assert slots[slot] is not None
                    pages[page] = slots[slot]
        host.move(moves)
        assert kv.checksums(torch.arange(20)).tolist() == pages
    assert len(set(pages)) > 10


LENGTHS = (1, 16, 33, 130, 200)


AHEAD: dict[str, object] = {"chunk_size": 48}
NOTHING_STAYS: dict[str, object] = {"async_scheduling": False, "prefix_cache_max_pages": 0}


@pytest.mark.parametrize(("dtype", "options"), [
    ("auto", AHEAD), ("auto", NOTHING_STAYS), ("int8", AHEAD), ("int4", NOTHING_STAYS),
])  # fmt: skip
def test_output_is_the_same_when_pages_come_back(dtype: str, options: dict) -> None:
    own = prompts(LENGTHS)
    asked = own + [[*own[-1][:100], 7 * i, 3] for i in range(8)]
    greedy, seeded = (Sampling(temperature=t, seed=5, max_tokens=16) for t in (0.0, 1.0))
    runner = make_runner(seed=3, kv_cache_dtype=dtype, prefix_caching=False, async_scheduling=False)
    with LLM(runner.config, runner) as llm:
        wanted = [[llm.generate([p], s)[0].ids for p in asked] for s in (greedy, seeded)]
    runner = make_runner(
        seed=3, kv_cache_dtype=dtype, host_cache_gb=0.01, max_num_pages=18, max_model_len=256, watermark=0.0, **options
    )
    with LLM(runner.config, runner) as llm:
        for _ in range(2):
            for sampling, ids in zip((greedy, seeded), wanted, strict=True):
                assert [output.ids for output in llm.generate(asked, sampling)] == ids
                llm.engine.check_invariants()
        info = llm.engine.info()
        assert info["pages"]["host"]["restored"] > 20 and info["counters"]["preemptions"] > 0
        assert info["runner"]["host_bytes"] == info["config"]["num_host_pages"] * runner.kv.page_bytes
        runner.check_invariants()


def test_a_copy_that_fails_ends_the_replica_and_gives_no_wrong_token() -> None:
    runner = make_runner(host_cache_gb=0.01, max_num_pages=18, max_model_len=256)
    sampling = Sampling(temperature=0, max_tokens=4)
    with LLM(runner.config, runner) as llm:
        asked = prompts((200, 200, 200))
        assert llm.generate(asked[:1], sampling)[0].error is None
        runner._host.move = lambda moves: 1 // 0
        outputs = []
        for _ in range(4):
            try:
                outputs += llm.generate(asked[1:], sampling)
            except EngineStopped:
                break
        assert outputs and all("copying pages between device and host failed" in (o.error or "") for o in outputs)
        assert not llm.engine.health().ok


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host_cache_gb: 10000\.0 GiB were asked for; [\d.]+ GiB are available"):
        make_runner(host_cache_gb=10_000)
