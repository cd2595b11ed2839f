"""``everwarm bench serve``: what serving costs beside the engine.

A private cluster with HAProxy, one router and one replica whose engine is a stub (one token per 10 ms and stream),
so that all CPU time is the serving path's: HTTP, text, placement, token plane, Serve, Ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.load import StreamRecord, lateness, percentile, stream_once
from cluster.environment import busy_seconds, cpu_seconds, processes
from cluster.private import PrivateCluster

GOAL_TOTAL_MS = 0.10
GOAL_REPLICA_MS = 0.02
UNITS = {
    "cpu_ms_per_token": "CPU milliseconds per output token, all server processes",
    "replica_cpu_ms_per_token": "the same in the replica's process",
    "idle_cpu_ms_per_s": "CPU milliseconds per second of the idle cluster, all server processes",
    "ttft": "milliseconds from sending to the first event",
    "others_cpu_share": "share of the machine that other processes used; shared cores and caches inflate CPU times",
    "load_average": "of the last minute, at the end",
    "chunk_late": "milliseconds an event came after the stream's own best pace",
}


@dataclass(frozen=True)
class Workload:
    """``rounds`` times ``streams`` streams at once, each of ``tokens`` tokens at one per ``step_ms``."""

    streams: int = 32
    tokens: int = 128
    rounds: int = 2
    step_ms: float = 10.0
    prompt_words: int = 100
    haproxy: bool = True
    replicas: int = 1
    routers: int = 1


def role(command: str) -> str:
    """Which part of the cluster a process is, by its command line."""
    if command.startswith("ray::ServeReplica:"):
        return command.rpartition(":")[2].split(".")[0].lower()
    if command.startswith("ray::"):
        return command.removeprefix("ray::").split(".")[0]
    for name in ("haproxy", "gcs_server", "raylet", "monitor.py", "dashboard.py", "log_monitor.py"):
        if name in command.split(" -", 1)[0]:
            return name
    return "other"


def run(load: Workload, console: Console) -> dict[str, Any]:
    """Starts the cluster, drives it, ends it. Raises RuntimeError when a stream fails."""
    with console.status("starting a private cluster ..."), PrivateCluster(haproxy=load.haproxy) as cluster:
        options = {"model": f"stub:{load.step_ms:g}ms", "replicas": load.replicas, "routers": load.routers}
        url = cluster.deploy({**options, "max_batch_size": max(64, load.streams)})
        time.sleep(3.0)
        names = {pid: role(command) for pid, command in processes(cluster.marker).items()}
        idle = _cpu(names)
        time.sleep(5.0)
        idle_ms_per_s = {name: 1e3 * value / 5.0 for name, value in _spent(names, idle).items()}
        asyncio.run(_round(url, load, 4))
        before, others = _cpu(names), busy_seconds() - time.process_time()
        started = time.perf_counter()
        records: list[StreamRecord] = []
        for _ in range(load.rounds):
            records += asyncio.run(_round(url, load, load.streams))
        seconds = time.perf_counter() - started
        spent = _spent(names, before)
        others = busy_seconds() - time.process_time() - others - sum(spent.values())
    figures = _figures(load, records, spent, seconds, idle_ms_per_s)
    share = others / seconds / len(os.sched_getaffinity(0))
    return {**figures, "others_cpu_share": round(max(0.0, share), 2), "load_average": round(os.getloadavg()[0], 1)}


async def _round(url: str, load: Workload, streams: int) -> list[StreamRecord]:
    text = "The quick brown fox jumps over the lazy dog. " * (load.prompt_words // 9)
    bodies = [
        {
            "model": "stub",
            "messages": [{"role": "user", "content": f"{index}. {text}"}],
            "max_tokens": load.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index in range(streams)
    ]
    return list(await asyncio.gather(*(stream_once(url, "/v1/chat/completions", body) for body in bodies)))


def _cpu(names: dict[int, str]) -> dict[int, float]:
    return {pid: cpu_seconds(pid) for pid in names}


def _spent(names: dict[int, str], before: dict[int, float]) -> dict[str, float]:
    spent: defaultdict[str, float] = defaultdict(float)
    for pid, name in names.items():
        spent[name] += max(0.0, cpu_seconds(pid) - before[pid])
    return dict(spent)


def _figures(
    load: Workload, records: list[StreamRecord], spent: dict[str, float], seconds: float, idle: dict[str, float]
) -> dict[str, Any]:
    failures = [record.failure for record in records if record.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(records)} streams failed; the first: {failures[0]}")
    tokens = sum(record.tokens for record in records)
    ttft = [1e3 * (record.arrivals[0] - record.sent) for record in records]
    late = [1e3 * value for record in records for value in lateness(record, load.step_ms / 1e3)]
    per_token = {name: round(1e3 * value / tokens, 4) for name, value in sorted(spent.items(), key=lambda i: -i[1])}
    return {
        "streams": load.streams,
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "cpu_ms_per_token": round(1e3 * sum(spent.values()) / tokens, 4),
        "replica_cpu_ms_per_token": round(1e3 * spent.get("replica", 0.0) / tokens, 4),
        "ttft_p50_ms": round(percentile(ttft, 0.5), 2),
        "ttft_p99_ms": round(percentile(ttft, 0.99), 2),
        "chunk_late_p50_ms": round(percentile(late, 0.5), 2),
        "chunk_late_p99_ms": round(percentile(late, 0.99), 2),
        "idle_cpu_ms_per_s": round(sum(idle.values()), 1),
        "idle_by_process_ms_per_s": {name: round(value, 1) for name, value in idle.items() if value > 0},
        "by_process_ms_per_token": {name: value for name, value in per_token.items() if value > 0},
        "haproxy": load.haproxy,
    }


def holds(figures: dict[str, Any]) -> bool:
    """Both goals are met."""
    return bool(figures["cpu_ms_per_token"] <= GOAL_TOTAL_MS and figures["replica_cpu_ms_per_token"] <= GOAL_REPLICA_MS)


def show(figures: dict[str, Any], console: Console) -> None:
    edge = "HAProxy" if figures["haproxy"] else "the Python proxy"
    title = f"{figures['streams']} streams through {edge}, stub engine, {figures['tokens']} tokens"
    table = Table("figure", "measured", "goal", title=title, title_justify="left")
    table.add_row("server CPU per token", f"{figures['cpu_ms_per_token']} ms", f"<= {GOAL_TOTAL_MS}")
    table.add_row("  of it in the replica", f"{figures['replica_cpu_ms_per_token']} ms", f"<= {GOAL_REPLICA_MS}")
    for name, value in figures["by_process_ms_per_token"].items():
        table.add_row(f"    {name}", f"{value} ms", "")
    table.add_row("TTFT p50 / p99", f"{figures['ttft_p50_ms']} / {figures['ttft_p99_ms']} ms", "")
    table.add_row("chunk lateness p50 / p99", f"{figures['chunk_late_p50_ms']} / {figures['chunk_late_p99_ms']} ms", "")
    table.add_row("tokens per second", f"{figures['tokens_per_s']}", "")
    others = f"{figures['others_cpu_share']:.0%} of the CPU, load average {figures['load_average']}"
    table.add_row("others on this machine", others, "")
    table.add_row("idle cluster", f"{figures['idle_cpu_ms_per_s']} CPU ms per s", "")
    console.print(table)
