"""``everwarm bench schedule``: the real scheduler and loop under the loads of ``bench gpu``, on a virtual clock.

Nothing is computed: a step takes what a formula says, and the clock jumps. So hundreds of requests take a second on a
CPU, and what step sizes do to the time to the first token and to gaps is seen before a GPU is asked for, also on other
draws of the load. Pages come back from the host in no time. Milliseconds of a step:

    all rows decode    decode[0] + decode[1] * rows + decode[2] * context
    with a prefill     prefill[0] + prefill[1] * tokens + prefill[2] * pairs + decode[2] * context

``context``: tokens that decoding rows attend to. ``tokens``: of all rows, padded to the sizes of captured steps.
``pairs``: sum of u * (c + u / 2) over chunks of u tokens after c. The defaults are fits to Qwen3-8B on an H200
(docs/performance.md).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.gpu_loads import (
    CONCURRENCY,
    Job,
    Trace,
    arrival_gaps,
    mixed_lengths,
    open_jobs,
    parse_run,
    shared_prefixes,
    summary,
)
from cluster.bench.random_engine import model_config
from cluster.bench.shapes import SHAPES
from replica.batch import Batch, Move, StepResult, Sums
from replica.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from replica.loop import Engine
from router.pages import RootFields, chain, pack_tokens
from router.wire import Refusal, Sampling, Submit, TokenDelta

MEASURED = "qwen3-8b"
"""What the default costs are of."""
HOST_S = 5e-4
"""That a launch takes the loop's thread; an idle device starts after it."""
TURN_S = 5e-5
"""Of the loop's thread, a turn."""
H200 = DeviceFacts(kind="cuda", memory_bytes=139 * 2**30)
SHOWN = ("tokens_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "steps")
HEADINGS = ("tokens/s", "TTFT p50", "p99", "gap p50", "p99", "steps")
UNITS = {
    "tokens_s": "output tokens per second of the virtual clock",
    "ttft_p50_ms": "time to first token; open loops: from when the request was due",
    "gap_p50_ms": "between two arrivals of tokens of one request",
    "steps": "steps of the engine",
    "late": "of them, launched after the one before was over",
    "draws": "the same with other lengths, ids and arrivals: least, mean, most",
}


@dataclass(frozen=True)
class Costs:
    """What a step takes, see above."""

    decode: tuple[float, float, float] = (4.05, 0.022, 4.5e-5)
    prefill: tuple[float, float, float] = (1.5, 0.021, 1.4e-6)
    sizes: tuple[int, ...] = (32, 64, 128, 160, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)

    @classmethod
    def parse(cls, text: str, shape: str) -> Costs:
        """From JSON. Raises ValueError, naming what is wrong or missing."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--costs: {text!r} is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"--costs: {text!r}; an object is needed")
        if shape != MEASURED and (missing := {"decode", "prefill"} - given.keys()):
            raise ValueError(f"--costs: {sorted(missing)[0]} is needed for {shape}; the defaults are of {MEASURED}")
        for name, values in given.items():
            if name not in ("decode", "prefill", "sizes"):
                raise ValueError(f"--costs: {name!r}; allowed are decode, prefill and sizes")
            good = isinstance(values, list) and all(type(v) in (int, float) and 0 <= v < inf for v in values)
            if name == "sizes" and not (good and values == sorted(values)):
                raise ValueError(f"--costs: sizes: {values!r}; numbers of tokens, ascending, are needed")
            if name != "sizes" and not (good and len(values) == 3):
                raise ValueError(f"--costs: {name}: {values!r}; three numbers of at least 0 are needed")
        return cls(**{name: tuple(values) for name, values in given.items()})

    def ms(self, batch: Batch) -> float:
        decoding = [row for row in batch.rows if len(row.token_ids) == 1]
        context = sum(row.start + 1 for row in decoding)
        if len(decoding) == len(batch.rows):
            return self.decode[0] + self.decode[1] * len(decoding) + self.decode[2] * context
        pairs = sum(
            len(row.token_ids) * (row.start + len(row.token_ids) / 2) for row in batch.rows if len(row.token_ids) > 1
        )
        tokens = batch.num_tokens
        if (place := bisect_left(self.sizes, tokens)) < len(self.sizes):
            tokens = self.sizes[place]
        return self.prefill[0] + self.prefill[1] * tokens + self.prefill[2] * pairs + self.decode[2] * context


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def reach(self, until: float) -> None:
        self.now = max(self.now, until)


class _Step:
    """Implements replica.batch.Step."""

    def __init__(self, clock: Clock, end: float, result: StepResult) -> None:
        self._clock, self._end, self._result = clock, end, result

    def wait(self, timeout: float) -> bool:
        self._clock.reach(min(self._clock.now + timeout, self._end))
        return self._clock.now >= self._end

    def result(self) -> StepResult:
        self._clock.reach(self._end)
        return self._result


class VirtualRunner:
    """Implements replica.batch.Runner: a device that is busy for as long as ``costs`` say."""

    def __init__(self, clock: Clock, costs: Costs, config: ResolvedConfig, vocab_size: int) -> None:
        self.vocab_size, self.max_model_len, self.num_pages = vocab_size, config.max_model_len, config.num_pages
        self.num_steps = 0
        self._clock, self._costs, self._free = clock, costs, 0.0

    def launch(self, batch: Batch) -> _Step:
        self.num_steps += 1
        self._clock.now += HOST_S
        self._free = max(self._free, self._clock.now) + self._costs.ms(batch) / 1e3
        return _Step(self._clock, self._free, StepResult([[0] * row.num_samples for row in batch.rows]))

    def move(self, moves: list[Move]) -> None: ...

    def checksums(self, pages: list[int]) -> Sums:
        raise NotImplementedError("there is nothing in the pages; canary must be off")

    def release(self, slot: int) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {"device": "virtual", "steps": self.num_steps}

    def close(self) -> None: ...


@dataclass
class _Client:
    """Hands jobs to an engine, each when it is due, or, without ``dues``, one for one that is over."""

    engine: Engine
    clock: Clock
    jobs: list[Job]
    dues: list[float]
    traces: list[Trace] = field(default_factory=list)
    num_done: int = 0
    refused: str | None = None
    """Why a job was not taken."""

    def submit_due(self) -> None:
        while self.num_submitted < len(self.dues) and self.dues[self.num_submitted] <= self.clock.now:
            self._submit(self.dues[self.num_submitted])

    @property
    def num_submitted(self) -> int:
        return len(self.traces)

    def _submit(self, due: float) -> None:
        job, name = self.jobs[self.num_submitted], str(self.num_submitted)
        trace = Trace(due, len(job.prompt))
        self.traces.append(trace)
        root, packed = self.engine.root.root(), pack_tokens(job.prompt)
        hashes = b"".join(chain(root, packed, self.engine.config.page_size))
        sampling = Sampling(temperature=0, max_tokens=job.tokens)
        try:
            self.engine.submit(trace, Submit(name, packed, len(job.prompt), root, hashes, sampling))
        except Refusal as error:  # not raised: an engine logs what its callbacks raise, and goes on
            self.refused = f"request {name} is refused: {error}"

    def take(self, deltas: list[tuple[Any, TokenDelta]]) -> None:
        for trace, delta in deltas:
            if delta.ids:
                trace.times.append(self.clock.now)
                trace.counts.append(len(delta.ids))
            trace.num_cached = delta.num_cached or trace.num_cached
            if delta.finish is not None:
                trace.error = delta.error
                self.num_done += 1
                if not self.dues and self.num_submitted < len(self.jobs):
                    self._submit(self.clock.now)

    def begin(self) -> None:
        for _ in range(0 if self.dues else min(CONCURRENCY, len(self.jobs))):
            self._submit(self.clock.now)


def simulate(config: ResolvedConfig, costs: Costs, jobs: list[Job], dues: list[float]) -> dict[str, Any]:
    """The summary of a load. ``dues``: when each job arrives, seconds, ascending; empty: 32 clients, each with one
    request at a time. Raises ValueError when a request is refused."""
    clock = Clock()
    runner = VirtualRunner(clock, costs, config, vocab_size=1 + max(max(job.prompt) for job in jobs))
    root = RootFields("bench", "none", config.kv_cache_dtype, config.page_size)
    client: _Client
    engine = Engine(
        config,
        runner,
        root=root,
        on_deltas=lambda deltas: client.take(deltas),
        on_events=lambda batch: None,
        clock=clock,
    )
    client = _Client(engine, clock, jobs, dues)
    client.begin()
    while client.num_done < len(jobs):
        client.submit_due()
        if client.refused is not None:
            raise ValueError(client.refused)
        if engine.idle():
            clock.reach(dues[client.num_submitted])
            continue
        engine.iterate()
        clock.now += TURN_S
    engine.check_invariants()
    return {**summary(client.traces, clock.now), "steps": runner.num_steps, "late": engine.lead.num_late}


@dataclass(frozen=True)
class Workload:
    shape: str
    runs: tuple[str, ...]
    config: ResolvedConfig
    costs: Costs
    draws: int
    limit: int | None

    @classmethod
    def parse(cls, shape: str, runs: str, options: str, costs: str, draws: int, limit: int | None) -> Workload:
        """From a command line. Raises ValueError, naming the option and what is allowed."""
        if shape not in SHAPES:
            raise ValueError(f"--shape: {shape!r}; allowed are {', '.join(SHAPES)}")
        found = tuple(part.strip() for part in runs.split(","))
        for text in found:
            try:
                kind, argument = parse_run(text)
            except ValueError as error:
                raise ValueError(f"--runs: {error}") from None
            if kind == "decode" or argument.endswith("%"):
                raise ValueError(f"--runs: {text!r}; allowed are S, S:SEED, P, P:SEED and open:RATE")
        try:
            given = json.loads(options)
            config = EngineConfig.model_validate({"max_model_len": 8192, **given})
            for name in ("speculative", "canary"):
                if (value := getattr(config, name)) not in ("off", False):
                    raise ValueError(f"{name}: {value!r}; nothing is computed, so there is nothing to guess or sum")
            resolved = resolve(config, model_config(SHAPES[shape]).facts(2), H200)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--options: {error}") from None
        return cls(shape, found, resolved, Costs.parse(costs, shape), draws, limit)


def run(load: Workload) -> dict[str, Any]:
    """Raises ValueError, naming the run, when the options refuse a request of it."""
    figures: dict[str, Any] = {"runs": {}}
    for number, text in enumerate(load.runs):
        found = _one(load, text, number, 0)
        others = [_one(load, text, number, draw) for draw in range(1, load.draws + 1)]
        if others:
            columns = {name: [other[name] for other in others] for name in SHOWN}
            found["draws"] = {n: [min(v), round(sum(v) / len(v), 3), max(v)] for n, v in columns.items()}
        figures["runs"][text] = found
    return figures


def _one(load: Workload, text: str, number: int, draw: int) -> dict[str, Any]:
    kind, argument = parse_run(text)
    if kind == "open":  # as bench gpu numbers them, so that draw 0 is what it measures
        seed = 1000 + number + 100 * draw
        jobs = open_jobs(seed, load.limit or 500, draw)
        gaps = arrival_gaps(float(argument), seed)
        dues = list(accumulate(gap for gap, _ in zip(gaps, jobs, strict=False)))
    else:
        seed = int(argument or 0) + 100 * draw
        jobs, dues = (mixed_lengths if kind == "S" else shared_prefixes)(seed, draw=draw)[: load.limit], []
    try:
        return simulate(load.config, load.costs, jobs, dues)
    except ValueError as error:
        raise ValueError(f"--options: {text}: {error}") from None


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("run", *HEADINGS, title="on a virtual clock; times in ms", title_justify="left")
    for text, found in figures["runs"].items():
        table.add_row(text, *(f"{found[name]:.5g}" for name in SHOWN), end_section="draws" not in found)
        for place, name in enumerate(("least", "mean", "most") if "draws" in found else ()):
            cells = (f"{found['draws'][column][place]:.5g}" for column in SHOWN)
            table.add_row(f"draws: {name}", *cells, end_section=name == "most")
    console.print(table)
