"""``everwarm bench article``: what each scheduling and memory switch is worth, alone and one after the other.

Every row is the same engine over the same requests with other options: clients that each have one request at a time,
prompts with a long tail, some of them sharing their beginning. ``ladder`` begins with the baseline (contiguous
reservations, static batches, whole prompts, nothing cached, on a GPU nothing fused) and turns the switches on in turn;
``alone`` begins with everything on and turns one off; ``prefill`` times lone prompts with fusion off and on, on a GPU.
The pool is made scarce on purpose: it holds only so many reservations of the longest request, since with memory for
everybody there is nothing for paging to win.
"""

from __future__ import annotations

import gc
import queue
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cluster.bench.gpu_loads import percentile
from cluster.bench.progress import steps
from cluster.bench.random_engine import model_config
from cluster.bench.shapes import SHAPES, Shape
from replica.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from replica.llm import LLM
from replica.model import ModelConfig, Weights, random_model
from replica.runner import ModelRunner
from router.wire import EventBatch, Sampling, Submit, TokenDelta

UNITS = {
    "ttft_ms": "from submission to the first token: median, 99th percentile",
    "gap_p99_ms": "between two arrivals of tokens of one request, 99th percentile",
    "tokens_s": "output tokens per second over the whole run",
    "tokens_cpu_s": "output tokens per second of the process's CPU time: what neighbours on the machine distort least",
    "rows": "requests per step, mean over steps",
    "held": "share of the pool's pages that requests hold, mean over steps",
    "used": "share of the pool's token slots that hold a token of a running request, mean over steps",
    "cached": "share of prompt tokens that came from the cache",
    "ttft_p99_drop": "1 - everything on / baseline",
    "prefill": "milliseconds from submission to the first token of a lone prompt, by its length; saved: 1 - on / off",
}
SMALL = Shape(layers=4, hidden=256, heads=4, intermediate=768, kv_heads=2, head_dim=64, vocab=4096, max_position=8192)
MODELS = {"small": SMALL, **SHAPES}

SWITCHES: dict[str, dict[str, Any]] = {
    "paging": {"kv_cache_paging": False},
    "continuous": {"scheduler": "static"},
    "fused": {"fused_rmsnorm": False, "fused_qkv": False, "fused_silu": False, "fused_attention": False},
    "chunked": {"chunked_prefill": False},
    "slip-in": {"prefill_priority": "high", "long_prefill_tokens": "chunk"},
    "prefix cache": {"prefix_caching": False},
}
"""Name -> the options that turn it off, in the order of the ladder. Without *slip-in* requests are served as they came:
prompts before decoding, and each may take the whole step."""
PREFILL_LENGTHS = (128, 512, 1024, 2048, 4096)
"""Of the lone prompts, times the scale."""
PREFILL_REPEATS = 7


@dataclass(frozen=True)
class Workload:
    """``scale`` multiplies prompts (128-512 tokens, log-uniform; 8 % of 2048-4096) and answers (128); ``shared`` of the
    requests begin with one of eight common prefixes; the pool holds ``reservations`` requests of the greatest length.
    """

    model: str = "small"
    device: str = "cpu"
    threads: int = 2
    requests: int = 192
    concurrency: int = 32
    scale: float = 0.25
    shared: float = 0.5
    reservations: int = 8
    rows: str = "ladder,alone"
    rounds: int = 1
    """Passes over all rows; medians of each figure are reported."""
    budget_s: float = 120.0
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        return round(4096 * self.scale) + self.answer + 1

    @property
    def answer(self) -> int:
        """Tokens of each answer."""
        return max(1, round(128 * self.scale))


def plan(load: Workload) -> list[tuple[str, dict[str, Any]]]:
    """(name of the row, options that differ from everything on). Raises ValueError."""
    names = [name for name in SWITCHES if name != "fused" or load.device == "cuda"]
    out: list[tuple[str, dict[str, Any]]] = []
    for part in load.rows.split(","):
        if part == "prefill" and load.device == "cuda":
            continue
        if part == "ladder":
            for count in range(len(names) + 1):
                label = "baseline" if count == 0 else f"+ {names[count - 1]}"
                out.append((label, _without(names[count:], load)))
        elif part == "alone":
            if not out:  # else the ladder's last row is it
                out.append(("everything on", {}))
            out += [(f"without {name}", _without([name], load)) for name in names]
        else:
            raise ValueError(f"rows: {part!r}; allowed are 'ladder', 'alone' and, on a GPU, 'prefill'")
    return out


def _without(names: list[str], load: Workload) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in names:
        options |= SWITCHES[name]
    if "long_prefill_tokens" in options:
        options["long_prefill_tokens"] = _chunk(load)
    if options.get("kv_cache_paging") is False:
        options["prefix_caching"] = False  # contiguous reservations share no pages
    return options


def _chunk(load: Workload) -> int:
    return max(load.concurrency, round(1024 * load.scale))


def prompts(load: Workload, vocab: int) -> list[list[int]]:
    """Token ids of every request's prompt; the same for a seed."""
    lengths, ids = random.Random(f"lengths {load.seed}"), random.Random(f"ids {load.seed}")
    long = set(lengths.sample(range(load.requests), round(0.08 * load.requests)))
    longest = round(4096 * load.scale)
    trunks = [[ids.randrange(vocab) for _ in range(longest)] for _ in range(8)]
    out = []
    for i in range(load.requests):
        size = lengths.randint(2048, 4096) if i in long else 128 * 4 ** lengths.random()
        count = max(2, round(size * load.scale))
        common = lengths.choice(trunks)[: count * 3 // 4] if lengths.random() < load.shared else []
        out.append(common + [ids.randrange(vocab) for _ in range(count - len(common))])
    return out


@dataclass
class _Use:
    """Sums over steps, filled on the engine's thread."""

    steps: int = 0
    rows: float = 0.0
    held: float = 0.0
    used: float = 0.0
    seen: int = 0


class Row:
    """One engine, one pass over the requests."""

    def __init__(self, load: Workload, model: ModelConfig, options: dict[str, Any]) -> None:
        self.load, self.use = load, _Use()
        config = _resolve(load, model, options)
        runner = ModelRunner(model, _weights(load, model), config)
        self.llm = LLM(config, runner, on_events=self._on_events)
        self.config = config
        self.deltas: queue.SimpleQueue[tuple[float, TokenDelta]] = queue.SimpleQueue()

    def _on_events(self, batch: EventBatch) -> None:
        llm = getattr(self, "llm", None)
        if llm is None or llm.engine.num_steps == self.use.seen:
            return
        engine, use = llm.engine, self.use
        running, pool = engine.scheduler.running, engine.pool
        if not running:
            return
        use.seen = engine.num_steps
        use.steps += 1
        use.rows += len(running)
        use.held += pool.num_held / (pool.num_pages - 1)
        shared = sum(request.num_hits for request in running) * self.config.page_size
        tokens = sum(request.num_computed for request in running)
        unique = tokens - shared + len({int(p) for r in running for p in r.table[: r.num_hits]}) * self.config.page_size
        use.used += unique / ((pool.num_pages - 1) * self.config.page_size)

    def put(self, deltas: TokenDelta) -> None:
        """The engine's thread hands over what it has for us."""
        self.deltas.put((time.perf_counter(), deltas))

    def run(self, requests: list[Submit]) -> dict[str, Any]:
        """Raises RuntimeError when a request fails."""
        sent: dict[str, float] = {}
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        gaps: list[float] = []
        waiting, done, tokens, cached = list(reversed(requests)), 0, 0, 0
        began, cpu = time.perf_counter(), time.process_time()
        while done < len(requests):
            while waiting and len(sent) - done < self.load.concurrency:
                request = waiting.pop()
                sent[request.request_id] = time.perf_counter()
                self.llm.engine.submit(self, request)
            now, delta = self.deltas.get(timeout=600)
            if delta.error:
                raise RuntimeError(f"a request failed: {delta.error}")
            if delta.ids:
                first.setdefault(delta.request_id, now)
                if delta.request_id in last:
                    gaps.append(1e3 * (now - last[delta.request_id]))
                last[delta.request_id] = now
            tokens += len(delta.ids)
            cached += delta.num_cached or 0
            done += delta.finish is not None
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        ttft = [1e3 * (first[name] - sent[name]) for name in sent]
        return {
            "ttft_p50_ms": round(percentile(ttft, 50), 1),
            "ttft_p99_ms": round(percentile(ttft, 99), 1),
            "gap_p99_ms": round(percentile(gaps, 99), 1),
            "tokens_s": round(tokens / seconds, 1),
            "tokens_cpu_s": round(tokens / cpu_s, 1),
            "requests_s": round(len(sent) / seconds, 2),
            "cached": round(cached / sum(request.num_prompt for request in requests), 4),
            **self._pages(),
        }

    def _pages(self) -> dict[str, Any]:
        use, info = self.use, self.llm.engine.info()
        count = max(1, use.steps)
        return {
            "steps": info["steps"]["count"],
            "rows": round(use.rows / count, 2),
            "held": round(use.held / count, 4),
            "used": round(use.used / count, 4),
            "preemptions": info["counters"]["preemptions"],
        }

    def close(self) -> None:
        self.llm.close()


def _resolve(load: Workload, model: ModelConfig, options: dict[str, Any]) -> ResolvedConfig:
    page = 16
    pages = 1 + load.reservations * -(-load.max_model_len // page)
    base = {
        "max_model_len": load.max_model_len, "max_num_pages": pages, "chunk_size": _chunk(load),
        "max_batch_size": load.concurrency, "device": load.device, "threads": load.threads,
    }  # fmt: skip
    if options.get("kv_cache_paging") is False:
        base["max_batch_size"] = min(load.concurrency, load.reservations)
    facts = DeviceFacts("cpu", load.threads)
    if load.device == "cuda":
        facts = DeviceFacts("cuda", load.threads, True, torch.cuda.mem_get_info()[0])
    itemsize = 2 if load.device == "cuda" else 4
    return resolve(EngineConfig(**{**base, **options}), model.facts(itemsize), facts)


def _weights(load: Workload, model: ModelConfig) -> Weights:
    if load.device == "cuda":
        from cluster.bench.random_engine import random_weights

        return random_weights(model)
    return random_model(model, load.seed)


def run(load: Workload, console: Console) -> dict[str, Any]:
    """Raises ValueError for a model or rows that there are none of."""
    if load.model not in MODELS:
        raise ValueError(f"model: {load.model!r}; allowed are {', '.join(MODELS)}")
    if load.device not in ("cpu", "cuda"):
        raise ValueError(f"device: {load.device!r}; allowed are 'cpu' and 'cuda'")
    if load.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' was asked for, and there is no GPU")
    model = model_config(MODELS[load.model])
    planned, asked = plan(load), prompts(load, model.vocab_size)
    passes: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in planned}
    began, longest = time.monotonic(), 0.0
    with steps(len(planned) * load.rounds, console) as announce:
        for _ in range(load.rounds):
            measured: dict[str, dict[str, Any]] = {}
            for name, options in planned:
                twin = next((other for other, wanted in planned if wanted == options and other in measured), None)
                started = time.monotonic()
                if twin is None and started - began + longest > load.budget_s:
                    continue
                announce(name)
                measured[name] = measured[twin] if twin else _measure(load, model, options, asked)
                passes[name].append(measured[name])
                longest = max(longest, time.monotonic() - started)
    rows = {
        name: {**_medians(passes[name]), "rounds": len(passes[name]), "options": options}
        for name, options in planned
        if passes[name]
    }
    left_out = [name for name, _ in planned if name not in rows]
    figures = {"workload": vars(load), "rows": rows, "left_out": left_out, "ttft_p99_drop": _drop(rows)}
    if "prefill" in load.rows.split(","):
        figures["prefill"] = _compare_prefill(load, model)
    return figures


def _compare_prefill(load: Workload, model: ModelConfig) -> dict[str, dict[str, float]]:
    """Lone prompts with fusion off and on; everything else is on but the cache, which would answer the second one."""
    base = {"prefix_caching": False, "chunk_size": "auto"}
    sides = {"off": _prefill_ms(load, model, base | SWITCHES["fused"]), "on": _prefill_ms(load, model, base)}
    return {
        length: {"off_ms": off, "on_ms": sides["on"][length], "saved": round(1 - sides["on"][length] / off, 4)}
        for length, off in sides["off"].items()
    }


def _prefill_ms(load: Workload, model: ModelConfig, options: dict[str, Any]) -> dict[str, float]:
    """Length -> milliseconds to the first token, the median of several prompts, two more having gone before."""
    row, ids = Row(load, model, options), random.Random(f"prefill {load.seed}")
    try:
        found = {}
        for size in PREFILL_LENGTHS:
            times = []
            for _ in range(2 + PREFILL_REPEATS):
                prompt = [ids.randrange(model.vocab_size) for _ in range(round(size * load.scale))]
                request = row.llm.request(prompt, Sampling(temperature=0, max_tokens=1))
                began = time.perf_counter()
                row.llm.engine.submit(row, request)
                at, delta = row.deltas.get(timeout=600)
                if delta.error:
                    raise RuntimeError(f"a request failed: {delta.error}")
                times.append(1e3 * (at - began))
            found[str(round(size * load.scale))] = round(statistics.median(times[2:]), 2)
        return found
    finally:
        _close(row)


def _medians(passes: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(row[name] for row in passes) for name in passes[0]}


def _measure(load: Workload, model: ModelConfig, options: dict[str, Any], asked: list[list[int]]) -> dict[str, Any]:
    row = Row(load, model, options)
    try:
        sampling = Sampling(temperature=0, max_tokens=load.answer)
        row.llm.generate(_warm_up(load, model, asked), Sampling(temperature=0, max_tokens=2))
        row.use = _Use()
        # made before the clock starts: hashing a prompt would hold the interpreter, and so the engine
        return row.run([row.llm.request(prompt, sampling) for prompt in asked])
    finally:
        _close(row)


def _warm_up(load: Workload, model: ModelConfig, asked: list[list[int]]) -> list[list[int]]:
    """Prompts before the clock starts. On a GPU as many and as long as those of the first clients, so that steps which
    are no graphs find their kernels compiled."""
    ids = random.Random("warm")
    lengths = [len(prompt) for prompt in asked[: load.concurrency]] if load.device == "cuda" else [64] * 4
    return [[ids.randrange(model.vocab_size) for _ in range(length)] for length in lengths]


def _close(row: Row) -> None:
    """Gives the device's memory back, whoever still holds the row."""
    cuda = row.load.device == "cuda"
    row.close()
    row.__dict__.clear()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def show(figures: dict[str, Any], console: Console) -> None:
    load = figures["workload"]
    table = Table(
        title=f"{load['requests']} requests, {load['concurrency']} at a time, model {load['model']} on {load['device']}"
    )
    table.add_column("", no_wrap=True)
    for name in ("TTFT p50", "p99 ms", "gap p99", "req/s", "tok/s", "tok/cpu s", "rows", "held", "used", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in figures["rows"].items():
        table.add_row(
            name, f"{row['ttft_p50_ms']:.0f}", f"{row['ttft_p99_ms']:.0f}", f"{row['gap_p99_ms']:.0f}",
            f"{row['requests_s']:.1f}", f"{row['tokens_s']:.0f}", f"{row['tokens_cpu_s']:.0f}", f"{row['rows']:.1f}",
            f"{row['held']:.0%}", f"{row['used']:.0%}", f"{row['cached']:.0%}",
        )  # fmt: skip
    console.print(table)
    if figures["ttft_p99_drop"] is not None:
        console.print(f"TTFT p99 falls by {figures['ttft_p99_drop']:.0%} from the baseline to everything on")
    for length, times in figures.get("prefill", {}).items():
        console.print(
            f"a lone prompt of {length} tokens: {times['off_ms']:.1f} ms unfused, {times['on_ms']:.1f} fused: "
            f"{times['saved']:.0%} less"
        )
    if figures["left_out"]:
        console.print(f"left out for want of time: {', '.join(figures['left_out'])}")


def _drop(rows: dict[str, dict[str, Any]]) -> float | None:
    """By how much TTFT p99 falls from the baseline to everything on; None when either was not measured."""
    steps_up = [name for name in rows if name.startswith("+ ")]
    if "baseline" not in rows or not steps_up or rows[steps_up[-1]]["options"]:
        return None
    return round(1 - rows[steps_up[-1]]["ttft_p99_ms"] / rows["baseline"]["ttft_p99_ms"], 4)
