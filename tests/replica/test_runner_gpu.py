"""The same runner on a GPU: in fp32 it gives the CPU's tokens, in bf16 its own, whatever the batch."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafters import Replay, assert_speculated, at_no_price
from runner_driver import GREEDY, Ask, Driver, make_runner, prompts

from replica.batch import FROM_DEVICE, Batch, Row
from replica.llm import LLM
from replica.model import tiny_config
from router.wire import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RANDOM = Sampling(temperature=1.0, seed=5)
OPTIONS = [
    GREEDY,
    RANDOM,
    replace(RANDOM, top_p=0.7, seed=1),
    replace(RANDOM, top_k=5, seed=2),
    replace(RANDOM, top_k=40, top_p=0.9, min_p=0.02, logprobs=3),
    replace(GREEDY, repetition_penalty=1.4, prompt_logprobs=1),
    replace(RANDOM, frequency_penalty=0.8, presence_penalty=-0.3),
    replace(GREEDY, bad_words=((5, 6), (9,), (17, 3, 5))),
    replace(GREEDY, stop_token_ids=tuple(range(0, 256, 2)), min_tokens=9),
    replace(GREEDY, logit_bias=((4, 3.0), (9, -3.0)), logprobs=0),
]


def test_fp32_gives_the_cpus_tokens() -> None:
    asks = [Ask(p, s) for p, s in zip(prompts(tuple(range(3, 3 + 7 * len(OPTIONS), 7))), OPTIONS, strict=True)]
    cpu = Driver(make_runner()).run(asks, 24)
    runner = make_runner(device="cuda", dtype="float32")
    for chunk in (16, 512):
        gpu = Driver(runner, chunk=chunk).run(asks, 24)
        for a, b in zip(gpu, cpu, strict=True):
            assert a.ids == b.ids and a.fault is None
            for x, y in zip([*a.logprobs, *a.prompt_logprobs[1:]], [*b.logprobs, *b.prompt_logprobs[1:]], strict=True):
                assert x is not None and y is not None and x.token == pytest.approx(y.token, abs=1e-3)
    assert runner.describe()["kernels"]["attention"].startswith("torch (not triton: ")
    runner.close()
    runner.check_invariants()


def test_bf16_runs_on_triton_and_repeats() -> None:
    model = tiny_config("qwen3", hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)
    runner = make_runner(model, device="cuda")
    assert runner.describe()["kernels"]["attention"].startswith("triton")
    asks = [Ask(p, s) for p, s in zip(prompts((1, 40, 64, 200)), OPTIONS, strict=False)]
    first, again = Driver(runner, chunk=64).run(asks, 16), Driver(runner, chunk=64, seed=3).run(asks, 16)
    assert [g.ids for g in first] == [g.ids for g in again]
    assert all(len(g.ids) == 16 and g.fault is None for g in first)
    runner.close()


def test_launch_enqueues_without_waiting() -> None:
    model = tiny_config(
        hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=16, num_kv_heads=8, head_dim=128
    )
    runner = make_runner(model, device="cuda", max_num_pages=512, max_model_len=4096)
    prompt = np.array(prompts((4000,))[0], np.int32)
    pages = np.arange(1, 260, dtype=np.int32)
    Driver(runner).run([Ask(prompt.tolist())], 3)  # compiles
    launched = time.perf_counter()
    steps = [runner.launch(Batch(0, [Row(0, 0, prompt, pages, 1, GREEDY, True, prompt, 4000, 4000)]))]
    for i in range(3):
        row = Row(0, 4000 + i, np.array([FROM_DEVICE], np.int32), pages, 1, GREEDY, False, None, 4000, 4001 + i)
        steps.append(runner.launch(Batch(1 + i, [row])))
    assert not steps[-1].wait(0.0), "four steps were over before the host had launched them"
    launched = time.perf_counter() - launched
    assert steps[-1].wait(60) and all(step.wait(0.0) for step in steps)
    assert len({step.result().ids[0][0] for step in steps}) >= 1 and launched < 5
    runner.close()


def test_guesses_verified_from_graphs_change_no_token() -> None:
    """Bit for bit, alone and in a crowd, with ids chosen inside the graph and from its logits."""
    model = tiny_config("qwen3", hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)
    fixed = {"device": "cuda", "deterministic": True, "max_batch_size": 16, "max_model_len": 512, "chunk_size": 64}
    plain = [GREEDY, RANDOM, replace(RANDOM, seed=9)]
    asked = prompts((3, 40, 64, 130, 17, 33))
    runner = make_runner(model, **fixed)
    known = []
    with LLM(runner.config, runner) as llm:
        for options in (plain, OPTIONS[2:5]):
            sampling = [replace(options[i % len(options)], max_tokens=48) for i in range(len(asked))]
            known.append((sampling, [llm.generate([a], s)[0].ids for a, s in zip(asked, sampling, strict=True)]))
    runner = make_runner(model, speculative="ngram", speculative_tokens=7, **fixed)
    with LLM(runner.config, runner) as llm:
        at_no_price(llm.engine)
        for sampling, wanted in known:
            sequences = [a + ids for a, ids in zip(asked, wanted, strict=True)]
            llm.engine.speculation.drafter = Replay(sequences, model.vocab_size, wrong_every=6)
            assert [llm.generate([a], s)[0].ids for a, s in zip(asked, sampling, strict=True)] == wanted
            assert [output.ids for output in llm.generate(asked, sampling)] == wanted
        info = llm.engine.info()
        assert_speculated(info)
        replays, steps = info["runner"]["graphs"]["replays"], info["runner"]["steps"]
        assert replays["verify"] > 50 and replays["decode"] + replays["verify"] + replays["mixed"] == steps
        assert info["runner"]["compiled_after_ready"] == 0
        runner.check_invariants()


def test_what_a_former_engine_left_does_not_spoil_the_next_ones_capture() -> None:
    model = tiny_config("qwen3", hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)
    before = gc.get_threshold()
    gc.set_threshold(20)  # so that garbage is collected in the middle of a capture, were there any
    try:
        outputs = []
        for _ in range(3):
            runner = make_runner(model, device="cuda")
            asks = [Ask(p, GREEDY) for p in prompts((1, 40))]
            outputs.append([g.ids for g in Driver(runner).run(asks, 8)])
            runner.close()
            runner.itself = runner  # type: ignore[attr-defined]  # only the collector can free it
            del runner
    finally:
        gc.set_threshold(*before)
    assert outputs[0] == outputs[1] == outputs[2]
