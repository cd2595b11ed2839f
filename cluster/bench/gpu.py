"""``everwarm bench gpu``: our engine and a peer on one GPU, one after the other, with the same requests.

Each side is a process of its own (:mod:`cluster.bench.gpu_sides`), so it finds the GPU empty. The peer runs first: open
loops whose rate is a percentage are a percentage of what the *peer* reached in its S, for both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.gpu_loads import parse_run
from cluster.bench.shapes import SHAPES

TIMEOUT_S = 1500.0
END_S = 90.0
"""For a side to end its engine."""
POLL_S = 0.25
ROOT = Path(__file__).resolve().parents[2]
PEERS = ("vllm",)
UNITS = {
    "tokens_s": "output tokens per second",
    "ttft_p50_ms": "time to first token; open loops: from when the request was due",
    "gap_p50_ms": "between two arrivals of tokens of one request",
    "tpot_p50_ms": "mean gap of one request",
    "cached": "share of the prompt tokens found in the prefix cache",
    "share_of_floor": "(weights without the embedding + KV) / 4.3 TB/s, over the time of a step",
    "ready_s": "start to ready",
}
GOALS = {
    "S": {"tokens_s": 1.05, "ttft_p50_ms": 0.8, "ttft_p99_ms": 0.8, "gap_p99_ms": 1.0},
    "open": {"ttft_p50_ms": 0.8, "ttft_p99_ms": 0.8, "gap_p99_ms": 1.0},
    "P": {"tokens_s": 1.1},
    "decode": {"tokens_s": 1.0},
}
"""Ours over the peer's: rates at least, times at most so much."""
SHOWN = ("tokens_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "share_of_floor")


class SideFailed(RuntimeError):
    """One side's process ended without a report."""


@dataclass(frozen=True)
class Workload:
    """``options`` of EngineConfig; ``peer_path`` goes before ours in the peer's PYTHONPATH; ``http``: each engine is
    behind its own server; ``draws``: of S, P and open, each with other lengths, ids and arrivals."""

    shapes: tuple[str, ...]
    runs: tuple[str, ...]
    peer: str | None = None
    peer_path: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    peer_options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    http: bool = False
    draws: int = 1

    @classmethod
    def parse(
        cls,
        shapes: str,
        runs: str,
        peer: str | None,
        peer_path: Path | None,
        options: str,
        peer_options: str,
        limit: int | None,
        http: bool = False,
        draws: int = 1,
    ) -> Workload:
        """From a command line. Raises ValueError, naming the option and what is allowed."""
        names = tuple(part.strip() for part in shapes.split(","))
        if unknown := [name for name in names if name not in SHAPES]:
            raise ValueError(f"--shapes: {unknown[0]!r}; allowed are {', '.join(SHAPES)}")
        if peer is not None and peer not in PEERS:
            raise ValueError(f"--peer: {peer!r}; allowed are {', '.join(PEERS)}")
        if peer_path is not None and (peer is None or not peer_path.is_dir()):
            raise ValueError(f"--peer-path: {str(peer_path)!r}; a folder is needed, and --peer")
        found = tuple(part.strip() for part in runs.split(","))
        for text in found:
            try:
                parse_run(text)
            except ValueError as error:
                raise ValueError(f"--runs: {error}") from None
        read = {}
        for name, text in (("--options", options), ("--peer-options", peer_options)):
            try:
                read[name] = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{name}: {text!r} is no JSON: {error}") from None
            if not isinstance(read[name], dict):
                raise ValueError(f"{name}: {text!r}; an object is needed")
        return cls(names, found, peer, peer_path, read["--options"], read["--peer-options"], limit, http, draws)


def run(load: Workload, console: Console) -> dict[str, Any]:
    """Raises SideFailed."""
    figures: dict[str, Any] = {"sides": {}}
    for shape in load.shapes:
        sides: dict[str, Any] = {}
        if load.peer is not None:
            sides[load.peer] = _side(load, load.peer, shape, load.runs, console)
        runs = _with_rates(load.runs, sides[load.peer]) if load.peer else load.runs
        sides["everwarm"] = _side(load, "everwarm", shape, runs, console)
        # Under the names that were asked for, whatever the rate came to.
        sides["everwarm"]["runs"] = dict(zip(load.runs, sides["everwarm"]["runs"].values(), strict=True))
        figures["sides"][shape] = sides
    return figures


def _with_rates(runs: tuple[str, ...], peer: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"open:{peer['runs'][text]['rate']}" if text.endswith("%") else text for text in runs)


def _side(load: Workload, side: str, shape: str, runs: tuple[str, ...], console: Console) -> dict[str, Any]:
    theirs = side != "everwarm"
    path = [str(load.peer_path)] if theirs and load.peer_path else []
    inherited = os.environ.get("PYTHONPATH", "")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([*path, str(ROOT), *([] if path else [inherited])]))
    if theirs:  # nothing is fetched or reported while it is measured
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    console.print(f"{shape}: {side}")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "report.json", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "cluster.bench.gpu_sides",
            f"{side}-http" if load.http else side,
            "--shape",
            shape,
            "--out",
            str(out),
        ]
        command += ["--options", json.dumps(load.peer_options if theirs else load.options), "--draws", str(load.draws)]
        command += ["--limit", str(load.limit)] if load.limit else []
        command += ["--runs", *runs]
        code = _watch(command, env, out, log, console)
        report = _read(out)
        if code or "after" not in report:
            what = f"did not end within {TIMEOUT_S:.0f} s" if code is None else f"ended with {code}"
            raise SideFailed(f"{side} on {shape} {what}:\n{log.read_text(errors='replace')[-4000:]}")
    return report


def _watch(command: list[str], env: dict[str, str], out: Path, log: Path, console: Console) -> int | None:
    """Runs a side, showing each run as it is over; its exit status, None when it took too long. Whatever ends this,
    Ctrl-C and a closed terminal included, the side is told to end its engine and waited for: the GPU must be free."""
    until, shown = time.monotonic() + TIMEOUT_S, 0
    with log.open("wb") as sink, _ended_like_ctrl_c():
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, start_new_session=True)
        try:
            while True:
                code = process.poll()
                runs = list(_read(out).get("runs", {}).items())
                for text, found in runs[shown:]:
                    console.print(f"  {text}: " + ", ".join(f"{n} {found[n]:g}" for n in SHOWN if n in found))
                shown = len(runs)
                if code is not None or time.monotonic() >= until:
                    return code
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its group with it: what writes weights, and an engine that is a process of its own."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and a terminal that closes; what is ignored, as under nohup, stays so."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(out: Path) -> dict[str, Any]:
    """The report so far."""
    return dict(json.loads(out.read_text())) if out.exists() else {}


def compare(ours: dict[str, Any], theirs: dict[str, Any], text: str) -> dict[str, tuple[float, bool]]:
    """Figure with a goal -> (ours over the peer's, whether the goal is met)."""
    found = {}
    for name, least in GOALS[parse_run(text)[0]].items():
        ratio = ours[name] / theirs[name] if theirs.get(name) else 0.0
        found[name] = (round(ratio, 3), ratio <= least if name.endswith("_ms") else ratio >= least)
    return found


def holds(figures: dict[str, Any]) -> bool:
    """No request failed and every goal against the peer is met."""
    for sides in figures["sides"].values():
        ours = sides["everwarm"]["runs"]
        if any(found.get("failed") for found in ours.values()):
            return False
        for name in sides.keys() - {"everwarm"}:
            for text, found in ours.items():
                if not all(met for _, met in compare(found, sides[name]["runs"][text], text).values()):
                    return False
    return True


def show(figures: dict[str, Any], console: Console) -> None:
    for shape, sides in figures["sides"].items():
        table = Table("run", "side", *SHOWN, title=f"{shape}, bf16, random weights", title_justify="left")
        for text, ours in sides["everwarm"]["runs"].items():
            for side, report in sides.items():
                found = report["runs"][text]
                table.add_row(text, side, *(f"{found[name]:g}" if name in found else "" for name in SHOWN))
            for side in sides.keys() - {"everwarm"}:
                ratios = compare(ours, sides[side]["runs"][text], text)
                cells = (
                    f"{ratios[n][0]:.2f}x{'' if ratios[n][1] else ' missed'}" if n in ratios else "" for n in SHOWN
                )
                table.add_row("", f"everwarm / {side}", *cells, end_section=True)
        console.print(table)
