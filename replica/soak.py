"""A day of service in small: many random requests against a tiny model, and what must not have changed by the end.

    python -m replica.soak --requests 100000

Requests share prefixes under several salts, in a pool so small that they preempt each other and push each other's pages
to the host tier and back; some are aborted, some run out of time, some fail at the door. Probes, the same few requests
again and again, must always get the same tokens. Exact audits run between steps all along.

It holds when every answer is as it should be, the audits are exact, nothing is held at the end, a follower of the
events knows exactly what is resident, memory is flat once the allocator has settled, and steps are as fast at the end
as at the start. Neighbours on the machine slow everything down, so steps count as slower only by two measures at once:
the clock, for the fastest tenth of them, and the CPU time of the engine's threads in units of a fixed piece of work
that is timed all along.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import statistics
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from replica.config import DeviceFacts, EngineConfig, resolve
from replica.llm import LLM
from replica.model import random_model, tiny_config
from replica.runner import ModelRunner
from router.pages import unpack_keys
from router.wire import EventBatch, Finish, Refusal, Sampling, Submit, TokenDelta

IN_FLIGHT = 24
AUDIT_EVERY = 250
YARDSTICK_EVERY = 20
"""Requests."""
ALLOWED_GROWTH = 1.03
"""Of the memory between the first tenth, or later, and the end; the allocator's own habits take some."""
SETTLED = 2000
"""Requests until the allocator has its arenas (150 MiB come by the 1,600th, 1 MiB more by the 8,000th); memory before
that is no measure, and a run that ends before it has none."""
ALLOWED_SLOWDOWN = 1.25
"""Of a step, last three tenths against the second to fourth; the first fills the caches."""


@dataclass
class _Open:
    """A request in flight. ``ids`` so far; ``abort_at`` tokens; ``probe``: its number among the probes."""

    ids: list[int]
    abort_at: int | None
    probe: int | None


class _Mark(NamedTuple):
    sent: int
    """Requests."""
    memory: int
    steps: int
    cpu_s: float
    """Of the threads that schedule and compute, without the driver's."""
    timed: int
    """Step times recorded."""
    yardstick_ms: float
    """Median since the last mark."""


class Follower:
    """What an observer of the event stream believes to be resident, and how long steps took."""

    def __init__(self) -> None:
        self.tiers: list[set[int]] = [set(), set()]
        self.step_ms = array("d")
        self.engine: Any = None
        self._seen = 0

    def on_events(self, batch: EventBatch) -> None:
        for _, tier, keys in batch.stored:
            self.tiers[tier].update(unpack_keys(keys))
        for tier, keys in batch.removed:
            self.tiers[tier].difference_update(unpack_keys(keys))
        if self.engine is not None and self.engine.num_steps != self._seen and self.engine.step_ms:
            self._seen = self.engine.num_steps
            self.step_ms.append(self.engine.step_ms[-1])


class Soak:
    def __init__(self, num_requests: int, seed: int = 0, **options: Any) -> None:
        self.num_requests = num_requests
        self.random = random.Random(seed)
        model = tiny_config()
        defaults: dict[str, Any] = {
            "threads": 1, "max_model_len": 256, "max_num_pages": 28, "max_batch_size": 16, "chunk_size": 128,
            "host_cache_gb": 0.002, "canary": True, "watermark": 0.0, "ageing_s": 0.5,
        }  # fmt: skip
        config = resolve(EngineConfig(**(defaults | options)), model.facts(4), DeviceFacts("cpu"))
        self.follower = Follower()
        self.llm = LLM(
            config, ModelRunner(model, random_model(model, seed), config), on_events=self.follower.on_events
        )  # fmt: skip
        self.follower.engine = self.llm.engine
        self.deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        self.open: dict[str, _Open] = {}
        self.ends: Counter[str] = Counter()
        self.probes: dict[int, list[int]] = {}
        self.wrong: list[str] = []
        self.num_audits = 0
        self.yardsticks: list[float] = []
        self._trunks = [[self.random.randrange(model.vocab_size) for _ in range(200)] for _ in range(12)]

    # --- requests

    def _draw(self) -> tuple[Submit, _Open]:
        rng = self.random
        if rng.random() < 0.02:
            number = rng.randrange(8)
            trunk = self._trunks[number]
            sampling = Sampling(temperature=number % 2, seed=number, max_tokens=12)
            request = self.llm.request([*trunk[: 9 + 20 * number], number], sampling, salt="probe")
            return request, _Open([], None, number)
        length = min(200, 1 + int(rng.paretovariate(1.1) * 12))
        prompt = [*rng.choice(self._trunks)[: rng.randrange(length)], *(rng.randrange(256) for _ in range(length))]
        sampling = Sampling(
            temperature=rng.choice((0.0, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(1000),
            max_tokens=rng.randrange(60, 120) if rng.random() < 0.1 else 1 + min(50, int(rng.paretovariate(1.2) * 3)),
            logprobs=2 if rng.random() < 0.05 else None,
            repetition_penalty=1.1 if rng.random() < 0.1 else 1.0,
            stop_token_ids=(7,),
        )
        late = rng.random() < 0.01
        request = self.llm.request(
            prompt[:240], sampling, salt=rng.choice(("", "", "a", "b")), priority=rng.choice((-1, 0, 0, 1)),
            deadline_ms=rng.randrange(1, 20) if late else None,
        )  # fmt: skip
        return request, _Open([], rng.randrange(12) if rng.random() < 0.06 else None, None)

    def _submit(self) -> None:
        request, state = self._draw()
        self.open[request.request_id] = state
        try:
            self.llm.engine.submit(self.deltas, request)
        except Refusal as refusal:
            del self.open[request.request_id]
            self.ends[f"refused: {refusal.code}"] += 1
            return
        if state.abort_at == 0:
            self.llm.engine.cancel(self.deltas, request.request_id)

    def _take(self, delta: TokenDelta) -> None:
        state = self.open[delta.request_id]
        before = len(state.ids)
        state.ids += delta.ids
        if state.abort_at is not None and before < state.abort_at <= len(state.ids):
            self.llm.engine.cancel(self.deltas, delta.request_id)
        if delta.finish is None:
            return
        del self.open[delta.request_id]
        self.ends[delta.finish] += 1
        if delta.finish == Finish.ERROR:
            self.wrong.append(f"{delta.request_id} failed: {delta.error}")
        if state.probe is not None:
            self.ends["probes"] += 1
            if self.probes.setdefault(state.probe, state.ids) != state.ids:
                self.wrong.append(f"probe {state.probe} got {state.ids}, at first {self.probes[state.probe]}")

    def run(self, progress: Any = None, seconds: float = math.inf) -> dict[str, Any]:
        """Serves all requests, or those that ``seconds`` suffice for; returns the figures, with ``problems`` empty when
        everything holds. A tenth is one of the requests, or of the time where that is given."""
        sent, began = 0, time.monotonic()
        marks = [self._mark(0)]
        while (more := sent < self.num_requests and time.monotonic() < began + seconds) or self.open:
            while more and sent < self.num_requests and len(self.open) < IN_FLIGHT:
                self._submit()
                sent += 1
                if sent % YARDSTICK_EVERY == 0:
                    self.yardsticks.append(yardstick_s())
                if sent % AUDIT_EVERY == 0:
                    self.llm.engine.check_invariants()
                    self.num_audits += 1
                passed = 10 * max(sent / self.num_requests, (time.monotonic() - began) / seconds)
                if passed >= len(marks):
                    marks.append(self._mark(sent))
                    if progress is not None:
                        progress(sent, marks[-1].memory)
            if self.open:
                self._take(self.deltas.get(timeout=60))
        if len(marks) == 1:  # no time for a single one
            marks.append(self._mark(sent))
        return self._figures(sent, time.monotonic() - began, marks)

    def _mark(self, sent: int) -> _Mark:
        yardstick_ms = 1e3 * statistics.median(self.yardsticks or [yardstick_s()])
        self.yardsticks.clear()
        steps = self.llm.engine.num_steps
        return _Mark(sent, resident_bytes(), steps, others_cpu_s(), len(self.follower.step_ms), yardstick_ms)

    def _figures(self, sent: int, seconds: float, marks: list[_Mark]) -> dict[str, Any]:
        engine, steps = self.llm.engine, self.follower.step_ms
        engine.check_invariants()
        engine.snapshot()  # what is outstanding has been emitted
        info = engine.info()
        cpu_ms = [round(1e3 * (b.cpu_s - a.cpu_s) / max(1, b.steps - a.steps), 3) for a, b in pairwise(marks)]
        relative = [round(ms / mark.yardstick_ms, 3) for ms, mark in zip(cpu_ms, marks[1:], strict=True)]
        figures = {
            "requests": sent, "seconds": round(seconds, 1), "steps": info["steps"]["count"],
            "audits": self.num_audits + 1, "ends": dict(sorted(self.ends.items())),
            "counters": info["counters"], "host": info["pages"]["host"], "canary": info["watch"]["canary"],
            "memory_mib": [round(mark.memory / 2**20, 1) for mark in marks[1:]], "cpu_ms_per_step": cpu_ms,
            "yardsticks_per_step": relative,
            "step_ms_first_tenth": quantiles(steps[: marks[1].timed]),
            "step_ms_last_tenth": quantiles(steps[marks[-2].timed :]),
        }  # fmt: skip
        fastest = [quantiles(steps[a.timed : b.timed])["p10"] for a, b in pairwise(marks)]
        slower = {"by the clock": _growth(fastest), "in CPU time": _growth(relative)}
        figures["slower"] = {name: round(ratio, 3) for name, ratio in slower.items()}
        settled = [mark.memory for mark in marks[1:] if mark.sent >= SETTLED]
        figures["memory_growth"] = round(settled[-1] / settled[0], 4) if len(settled) > 1 else None
        figures["problems"] = self._problems(info, settled, slower)
        return figures

    def _problems(self, info: dict[str, Any], memory: list[int], slower: dict[str, float]) -> list[str]:
        pages, found = info["pages"], list(self.wrong[:5])
        if pages["held"] or pages["free"] + pages["cached"] != pages["all"]:
            found.append(f"pages are held by nobody: {pages}")
        if self.follower.tiers != [set(keys) for keys in self.llm.engine.pool.residency()]:
            found.append("a follower of the events does not know what is resident")
        canary = info["watch"]["canary"]
        if canary and canary["changed"]:
            found.append(f"{canary['changed']} pages changed")
        for name, value in (
            ("preemptions", info["counters"]["preemptions"]), ("pages restored", (pages["host"] or {}).get("restored")),
            ("aborts", self.ends[Finish.ABORT]), ("probes", self.ends["probes"]),
        ):  # fmt: skip
            if not value:
                found.append(f"no {name}: the load is too light to show anything")
        if memory and memory[-1] > ALLOWED_GROWTH * memory[0]:
            found.append(f"memory grew from {memory[0] / 2**20:.0f} to {memory[-1] / 2**20:.0f} MiB")
        if min(slower.values()) > ALLOWED_SLOWDOWN:
            found.append(f"steps became slower: {slower}")
        return found

    def close(self) -> None:
        self.llm.close()


def _growth(tenths: list[float]) -> float:
    """Last three against the second to fourth."""
    return statistics.median(tenths[-3:]) / max(1e-9, statistics.median(tenths[1:4] or tenths))


def others_cpu_s() -> float:
    """CPU time of all threads of this process but the calling one."""
    return time.process_time() - time.thread_time()


def yardstick_s() -> float:
    """CPU time of a fixed piece of Python. Torch would let other threads in between, and bring threads of its own."""
    began = time.thread_time()
    sum(i * i for i in range(4000))
    return time.thread_time() - began


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quantiles(values: array) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(ordered[int(len(ordered) * share)], 3) for name, share in at.items()} | {"count": len(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no more after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the engine's")
    args = parser.parse_args()
    if args.requests < 100:
        parser.error(f"--requests: {args.requests}; at least 100 are needed to compare tenths")
    soak = Soak(args.requests, args.seed, **dict(text.split("=", 1) for text in args.option))

    def progress(sent: int, memory: int) -> None:
        print(f"{sent:8d} requests, {memory / 2**20:7.1f} MiB", file=sys.stderr, flush=True)

    try:
        figures = soak.run(progress, args.seconds)
    finally:
        soak.close()
    for problem in figures["problems"]:
        print(problem, file=sys.stderr)
    print(json.dumps({"bench": "soak", **figures}))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
