"""KV memory on a GPU: copies on a side stream under load, and the equalities with narrow pages that come and go."""

from __future__ import annotations

import random
import time

import pytest
import torch
from runner_driver import make_runner, prompts

from kernels.quantized_kv import STORED
from replica import host_pages
from replica.batch import Move
from replica.host_pages import HostPages
from replica.kv import PagedKV
from replica.llm import LLM
from replica.model import tiny_config
from router.wire import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODEL = tiny_config("qwen3", hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("staging_pages", [1, 3, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_copies_keep_their_place_among_the_steps(
    dtype: str, staging_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to pages, as steps would, behind long kernels and between moves; nothing is waited for until the end."""
    kv = PagedKV(MODEL, 40, 16, dtype, "cuda")
    monkeypatch.setattr(host_pages, "STAGING_BYTES", staging_pages * kv.page_bytes)
    host = HostPages(kv, 13)
    rng = random.Random(0)
    pages, slots = [0] * 40, [0] * 13
    host.move([Move(True, list(range(1, 14)), list(range(13)))])
    busy = torch.randn(3000, 3000, device="cuda")
    for step in range(1, 200):
        busy = torch.mm(busy, busy).clamp_(-1, 1)
        for page in rng.sample(range(40), 5):
            value = step % 100 + 1
            for part in kv._parts:
                part[:, page] = value
            pages[page] = value
        for _ in range(rng.randrange(3)):
            count = rng.randrange(1, 9)
            move = Move(rng.random() < 0.5, rng.sample(range(40), count), rng.sample(range(13), count))
            host.move([move])
            for page, slot in zip(move.pages, move.slots, strict=True):
                if move.to_host:
                    slots[slot] = pages[page]
                else:
                    pages[page] = slots[slot]
    torch.cuda.synchronize()
    for part in kv._parts:
        assert part.flatten(2).amax(2)[0].float().tolist() == pages
        assert part.flatten(2).amin(2)[-1].float().tolist() == pages
    for part in host._slots:
        assert part.flatten(1).amax(1).float().tolist() == slots
    assert len(set(pages)) > 10


@pytest.mark.parametrize("dtype", ["auto", *STORED])
def test_equalities_with_pages_that_come_back(dtype: str) -> None:
    own = prompts((1, 16, 33, 130, 200))
    asked = own + [[*own[-1][:100], 7 * i, 3] for i in range(8)]
    greedy, seeded = (Sampling(temperature=t, seed=5, max_tokens=24) for t in (0.0, 1.0))
    fixed = {"device": "cuda", "deterministic": True, "kv_cache_dtype": dtype}
    runner = make_runner(MODEL, seed=3, prefix_caching=False, async_scheduling=False, **fixed)
    assert runner.describe()["kernels"]["attention"].startswith("triton")
    with LLM(runner.config, runner) as llm:
        wanted = [[llm.generate([p], s)[0].ids for p in asked] for s in (greedy, seeded)]
    runner = make_runner(
        MODEL, seed=3, host_cache_gb=0.01, canary=True, max_num_pages=18, max_model_len=256, watermark=0.0,
        chunk_size=48, max_batch_size=16, **fixed,
    )  # fmt: skip
    with LLM(runner.config, runner) as llm:
        for _ in range(2):
            for sampling, ids in zip((greedy, seeded), wanted, strict=True):
                assert [output.ids for output in llm.generate(asked, sampling)] == ids
                llm.engine.check_invariants()
        until = time.monotonic() + 30  # the canary takes a share of the time, and compares when it is idle too
        while not (info := llm.engine.info())["watch"]["canary"]["compared"] and time.monotonic() < until:
            time.sleep(0.1)
        assert info["pages"]["host"]["restored"] > 20
        assert info["watch"]["canary"]["compared"] > 0 and info["watch"]["canary"]["changed"] == 0
        assert info["runner"]["compiled_after_ready"] in (0, None)
        runner.check_invariants()
