"""The loads of ``everwarm bench gpu``, the same for every engine: token ids in, token ids out, greedy, ends ignored.

    S           500 requests, 32 at a time; prompts of 128-512 tokens (log-uniform), 8 % of 2048-4096; 128 tokens out
    P           200 requests, 32 at a time; one of 8 system prompts of 2048 tokens (Zipf) and 128 of their own; 64 out
    decode:B    B prompts of 1024 tokens at once, 256 tokens out; counts the stretch in which all of them decode
    open:R      the prompts of S arriving at random, R a second; 16-256 tokens out (log-uniform). R as "50%" is half of
                the requests per second that this engine reached in the S before

``S:1`` has other token ids and the same lengths, so that nothing is found in a prefix cache of ``S:0``.
Standard library only: the peer's process runs this too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

CONCURRENCY = 32
_WORDS = (256, 151643)  # ids without bytes and special tokens


@dataclass
class Job:
    prompt: list[int]
    tokens: int
    """To generate."""


@dataclass
class Trace:
    """One request as its client saw it, seconds of ``time.perf_counter``."""

    start: float
    num_prompt: int
    times: list[float] = field(default_factory=list)
    """Arrivals of tokens; ``counts``: how many each time."""
    counts: list[int] = field(default_factory=list)
    num_cached: int = 0
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class Side(Protocol):
    """An engine under load."""

    async def start(self) -> dict[str, Any]:
        """Returns the settings in force."""
        ...

    async def run(self, job: Job) -> Trace: ...

    async def stop(self) -> dict[str, Any]:
        """Returns what is worth knowing afterwards."""
        ...


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_WORDS) for _ in range(count)]


def mixed_lengths(seed: int, count: int = 500, draw: int = 0) -> list[Job]:
    """S; another ``draw`` has other lengths."""
    lengths, ids = random.Random(20260101 + draw), random.Random(f"S{seed}")
    long = set(lengths.sample(range(count), round(0.08 * count)))
    sizes = [lengths.randint(2048, 4096) if i in long else round(128 * 4 ** lengths.random()) for i in range(count)]
    return [Job(_ids(ids, size), 128) for size in sizes]


def shared_prefixes(seed: int, count: int = 200, draw: int = 0) -> list[Job]:
    """P; another ``draw`` has its prompts in another order."""
    choice, ids = random.Random(20260102 + draw), random.Random(f"P{seed}")
    prefixes = [_ids(ids, 2048) for _ in range(8)]
    popularity = [1 / rank for rank in range(1, 9)]
    return [Job(choice.choices(prefixes, popularity)[0] + _ids(ids, 128), 64) for _ in range(count)]


def equal_prompts(seed: str, batch: int) -> list[Job]:
    """decode."""
    ids = random.Random(f"D{seed}")
    return [Job(_ids(ids, 1024), 256) for _ in range(batch)]


def open_jobs(seed: int, count: int, draw: int = 0) -> list[Job]:
    """open."""
    outputs = random.Random(20260103 + draw)
    jobs = mixed_lengths(seed, draw=draw)[:count]
    for job in jobs:
        job.tokens = round(16 * 16 ** outputs.random())
    return jobs


async def closed_loop(side: Side, jobs: list[Job], concurrency: int = CONCURRENCY) -> tuple[list[Trace], float]:
    """``concurrency`` clients, each with one request at a time; the traces and the seconds it took."""
    traces: list[Trace] = []
    queue = iter(jobs)

    async def client() -> None:
        for job in queue:
            traces.append(await side.run(job))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(concurrency, len(jobs)))))
    return traces, time.perf_counter() - began


def arrival_gaps(rate: float, seed: int) -> Iterator[float]:
    """Seconds between arrivals at random, ``rate`` a second."""
    arrivals = random.Random(f"A{seed}")
    while True:
        yield arrivals.expovariate(rate)


async def open_loop(side: Side, jobs: list[Job], rate: float, seed: int) -> tuple[list[Trace], float]:
    """Poisson arrivals; a request's clock starts when it was due."""

    async def one(job: Job, due: float) -> Trace:
        trace = await side.run(job)
        trace.start = due
        return trace

    began = due = time.perf_counter()
    tasks = []
    for job, gap in zip(jobs, arrival_gaps(rate, seed), strict=False):
        due += gap
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(job, due)))
    return list(await asyncio.gather(*tasks)), time.perf_counter() - began


def percentile(values: list[float], q: float) -> float:
    """Between the two nearest ranks; 0 of no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def summary(traces: list[Trace], seconds: float) -> dict[str, Any]:
    """Milliseconds and tokens per second. ``gap``: between arrivals of one request, all requests together."""
    good = [t for t in traces if t.error is None and t.times]
    milliseconds = {
        "ttft": [t.times[0] - t.start for t in good],
        "gap": [b - a for t in good for a, b in zip(t.times, t.times[1:], strict=False)],
        "tpot": [(t.times[-1] - t.times[0]) / (t.num_tokens - t.counts[0]) for t in good if t.num_tokens > t.counts[0]],
    }
    num_prompt = sum(t.num_prompt for t in good)
    out: dict[str, Any] = {
        "requests": len(good),
        "failed": len(traces) - len(good),
        "seconds": round(seconds, 3),
        "requests_s": round(len(good) / seconds, 3),
        "tokens_s": round(sum(t.num_tokens for t in good) / seconds, 1),
        "cached": round(sum(t.num_cached for t in good) / max(1, num_prompt), 4),
    }
    for name, values in milliseconds.items():
        out |= {f"{name}_p{q}_ms": round(percentile(values, q) * 1e3, 3) for q in (50, 90, 99)}
    if errors := [t.error for t in traces if t.error]:
        out["first_error"] = errors[0]
    return out


def steady_rate(traces: list[Trace]) -> float:
    """Tokens per second while every request decodes."""
    begin, end = max(t.times[0] for t in traces), min(t.times[-1] for t in traces)
    tokens = sum(n for t in traces for at, n in zip(t.times, t.counts, strict=True) if begin < at <= end)
    return tokens / (end - begin)


def parse_run(text: str) -> tuple[str, str]:
    """Kind and argument. Raises ValueError, naming what is allowed."""
    kind, _, argument = text.partition(":")
    number = argument.removesuffix("%") if kind == "open" else argument
    good = {
        "S": argument == "" or argument.isdecimal(),
        "P": argument == "" or argument.isdecimal(),
        "decode": argument.isdecimal() and int(argument) > 0,
        "open": number.replace(".", "", 1).isdecimal() and float(number) > 0,
    }
    if not good.get(kind):
        raise ValueError(f"{text!r}; allowed are S, S:SEED, P, P:SEED, decode:BATCH, open:RATE and open:PERCENT%")
    return kind, argument
