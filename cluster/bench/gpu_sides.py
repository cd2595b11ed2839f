"""One engine under the loads of :mod:`cluster.bench.gpu_loads`, in a process of its own: it ends with the GPU empty.

    python -m cluster.bench.gpu_sides everwarm --shape qwen3-8b --runs S:0 decode:32 --out ours.json
    PYTHONPATH=.:/where/vllm/is python -m cluster.bench.gpu_sides vllm --shape qwen3-8b --runs S:0 --out vllm.json

Both get token ids and give token ids, from the same client; weights are random. ``everwarm-http`` and ``vllm-http`` are
the same engines behind their servers (:mod:`cluster.bench.gpu_http`).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cluster.bench.gpu_http import EverwarmServer, VllmServer
from cluster.bench.gpu_loads import (
    Job,
    Side,
    Trace,
    closed_loop,
    equal_prompts,
    mixed_lengths,
    open_jobs,
    open_loop,
    parse_run,
    shared_prefixes,
    steady_rate,
    summary,
)
from cluster.bench.shapes import SHAPES, Shape


class EverwarmSide:
    """Our engine: its own thread beside the client's event loop."""

    def __init__(self, shape: Shape, options: dict[str, Any]) -> None:
        self._shape, self._options = shape, options
        self._number = 0

    async def start(self) -> dict[str, Any]:
        from cluster.bench.random_engine import open_random_engine

        self._loop = asyncio.get_running_loop()
        engine, resolved = open_random_engine(self._shape, self._options, self._on_deltas)
        self._engine = engine
        self._engine.start()
        shown = ("page_size", "num_pages", "max_model_len", "chunk_size", "max_batch_size", "prefix_caching")
        return {name: getattr(resolved, name) for name in shown}

    def _on_deltas(self, deltas: list[tuple[Any, Any]]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    @staticmethod
    def _deliver(deltas: list[tuple[Any, Any]]) -> None:
        now = time.perf_counter()
        for (trace, done), delta in deltas:
            if delta.ids:
                trace.times.append(now)
                trace.counts.append(len(delta.ids))
            if delta.num_cached is not None:
                trace.num_cached = delta.num_cached
            if delta.finish is not None:
                trace.error = delta.error
                done.set_result(trace)

    async def run(self, job: Job) -> Trace:
        from router.pages import chain, pack_tokens
        from router.wire import Sampling, Submit

        trace = Trace(time.perf_counter(), len(job.prompt))
        self._number += 1
        root, packed = self._engine.root.root(), pack_tokens(job.prompt)
        hashes = b"".join(chain(root, packed, self._engine.config.page_size))
        sampling = Sampling(temperature=0, max_tokens=job.tokens)
        done: asyncio.Future[Trace] = self._loop.create_future()
        self._engine.submit((trace, done), Submit(str(self._number), packed, len(job.prompt), root, hashes, sampling))
        return await done

    async def stop(self) -> dict[str, Any]:
        info = await asyncio.to_thread(self._engine.info)
        await asyncio.to_thread(self._engine.check_invariants)
        await asyncio.to_thread(self._engine.stop)
        self._engine.runner.close()
        shown = ("device", "kernels", "graphs", "compiled_after_ready")
        return {"steps": info["steps"], **{name: info["runner"][name] for name in shown}}


class VllmSide:
    """vLLM's AsyncLLM; its engine core is a process of its own. Detokenization is off, as we have none here."""

    def __init__(self, shape: Shape, options: dict[str, Any]) -> None:
        self._shape, self._options = shape, options
        self._number = 0

    async def start(self) -> dict[str, Any]:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._folder = tempfile.TemporaryDirectory()
        write_model_folder(self._shape, Path(self._folder.name))
        arguments = AsyncEngineArgs(model=self._folder.name, load_format="dummy", **self._options)
        self._engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        self._sampling = lambda n: SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        config = self._engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "block_size": config.cache_config.block_size,
            "gpu_blocks": config.cache_config.num_gpu_blocks,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "compilation_mode": str(config.compilation_config.mode),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    async def run(self, job: Job) -> Trace:
        self._number += 1
        trace = Trace(time.perf_counter(), len(job.prompt))
        prompt = {"prompt_token_ids": job.prompt}
        async for output in self._engine.generate(prompt, self._sampling(job.tokens), f"r{self._number}"):
            if count := len(output.outputs[0].token_ids):
                trace.times.append(time.perf_counter())
                trace.counts.append(count)
            trace.num_cached = output.num_cached_tokens or trace.num_cached
        return trace

    async def stop(self) -> dict[str, Any]:
        self._engine.shutdown()
        self._folder.cleanup()
        return {}


SIDES: dict[str, Callable[[Shape, dict[str, Any]], Side]] = {
    "everwarm": EverwarmSide,
    "vllm": VllmSide,
    "everwarm-http": EverwarmServer,
    "vllm-http": VllmServer,
}


def write_model_folder(shape: Shape, folder: Path) -> None:
    """config.json and a tokenizer of made-up words, one an id: enough for an engine that loads dummy weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"\u0120t{i}" for i in range(len(alphabet), shape.vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "config.json": shape.hf_config(),
        "generation_config.json": {"eos_token_id": 151645, "bos_token_id": 151643},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[151645]},
    }
    for name, content in named.items():
        (folder / name).write_text(json.dumps(content))


async def measure(
    side: Side,
    shape: Shape,
    runs: list[str],
    limit: int | None,
    told: Callable[[dict[str, Any]], None] = lambda report: None,
    draws: int = 1,
) -> dict[str, Any]:
    """Every run in turn, after a warm-up; of ``draws`` draws, whose requests are summed up together. ``told`` gets the
    report after each run. Raises RuntimeError when a request fails while decoding is measured. However this ends, the
    engine has ended before."""
    began = time.perf_counter()
    report: dict[str, Any] = {"settings": await side.start(), "ready_s": round(time.perf_counter() - began, 1)}
    try:
        await _measure(side, shape, runs, limit, report, told, draws)
    except BaseException:
        with suppress(Exception):
            await side.stop()
        raise
    report["after"] = await side.stop()
    return report


async def _measure(
    side: Side,
    shape: Shape,
    runs: list[str],
    limit: int | None,
    report: dict[str, Any],
    told: Callable[[dict[str, Any]], None],
    draws: int,
) -> None:
    warm = [Job(job.prompt, 48) for job in mixed_lengths(987654)[:64]]
    longest = random.Random("warm")
    await closed_loop(side, [*warm, Job([longest.randrange(1000, 9000) for _ in range(4096)], 32)])
    report["runs"] = {}
    capacity = 0.0
    for number, text in enumerate(runs):
        kind, argument = parse_run(text)
        if kind == "decode":
            found = await _decode(side, shape, int(argument))
        elif kind == "open":
            relative = argument.endswith("%")
            rate = float(argument.removesuffix("%")) * (capacity / 100 if relative else 1)
            if not rate:
                raise ValueError(f"{text}: a percentage needs a run of S before it")
            found = {"rate": round(rate, 3), **await _together(draws, partial(_open_loop, side, number, rate, limit))}
        else:
            found = await _together(draws, partial(_closed_loop, side, kind, int(argument or 0), limit))
            capacity = found["requests_s"] if kind == "S" else capacity
        report["runs"][text] = found
        told(report)


Loop = Coroutine[Any, Any, tuple[list[Trace], float]]


def _open_loop(side: Side, number: int, rate: float, limit: int | None, draw: int) -> Loop:
    seed = 1000 + number + 100 * draw  # or a second open loop would find the first one's prompts in the cache
    return open_loop(side, open_jobs(seed, limit or 500, draw), rate, seed)


def _closed_loop(side: Side, kind: str, seed: int, limit: int | None, draw: int) -> Loop:
    make = mixed_lengths if kind == "S" else shared_prefixes
    return closed_loop(side, make(seed + 100 * draw, draw=draw)[:limit])


async def _together(draws: int, loop: Callable[[int], Loop]) -> dict[str, Any]:
    """The loops of all draws, one after the other, in one summary."""
    traces, seconds = [], 0.0
    for draw in range(draws):
        found, took = await loop(draw)
        traces += found
        seconds += took
    return summary(traces, seconds)


async def _decode(side: Side, shape: Shape, batch: int) -> dict[str, Any]:
    """The better of two, against the floor at the mean context."""
    rates = []
    for repeat in range(2):
        traces, _ = await closed_loop(side, equal_prompts(f"{batch}-{repeat}", batch), batch)
        if errors := [t.error for t in traces if t.error]:
            raise RuntimeError(errors[0])
        rates.append(steady_rate(traces))
    floor = shape.floor_s(batch, 1024 + 128)
    step = batch / max(rates)
    return {
        "tokens_s": round(max(rates), 1),
        "all_tokens_s": [round(rate, 1) for rate in rates],
        "step_ms": round(step * 1e3, 4),
        "floor_ms": round(floor * 1e3, 4),
        "share_of_floor": round(floor / step, 4),
    }


def _fastest_loop() -> Any:
    """uvloop's where it is installed, as servers use it; else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def end_with_parent() -> None:
    """SIGINT for this process when its parent is gone, however that ended: the GPU must be free. On Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # prctl(2)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=sorted(SIDES))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--runs", nargs="+", default=["S:0"])
    parser.add_argument("--limit", type=int, help="only the first so many requests of S, P and open")
    parser.add_argument("--draws", type=int, default=1, help="of S, P and open")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, for the engine")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    for text in args.runs:
        parse_run(text)
    head = {
        "side": args.side, "shape": args.shape, "options": args.options, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip

    def write(report: dict[str, Any]) -> None:
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps({**head, **report}, indent=1) + "\n")
        part.replace(args.out)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script started us in its background
    end_with_parent()
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        side = SIDES[args.side](shape, args.options)
        write(runner.run(measure(side, shape, args.runs, args.limit, write, args.draws)))


if __name__ == "__main__":
    main()
