"""``everwarm bench gpu`` without a GPU: the loads, both ends of a side's process, and the verdict."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.bench import gpu, gpu_loads, gpu_sides
from cluster.bench.shapes import SHAPES
from replica.config import EngineConfig, ModelFacts, resolve
from replica.loop import Engine
from replica.stub import StubRunner
from router.pages import RootFields


@pytest.fixture
def stub_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of an engine on a GPU: the real loop over a runner that samples without a model."""

    def make(shape: Any, options: dict[str, Any], on_deltas: Any) -> tuple[Engine, Any]:
        facts = ModelFacts(max_position=8192, num_layers=1, num_kv_heads=1, head_dim=16)
        config = resolve(EngineConfig(max_num_pages=6000, max_batch_size=64, chunk_size=2048), facts)
        runner = StubRunner(num_pages=6000, max_batch_size=64, content=False, vocab_size=152000)
        runner.describe = lambda: dict.fromkeys(("device", "kernels", "graphs", "compiled_after_ready"))
        root = RootFields("bench", "none", "float32", 16)
        engine = Engine(config, runner, root=root, on_deltas=on_deltas, on_events=lambda batch: None)
        return engine, config

    monkeypatch.setattr("cluster.bench.random_engine.open_random_engine", make)


def test_loads_are_what_they_say() -> None:
    jobs, others = gpu_loads.mixed_lengths(0), gpu_loads.mixed_lengths(1)
    sizes = [len(job.prompt) for job in jobs]
    assert len(jobs) == 500 and sum(2048 <= n <= 4096 for n in sizes) == 40
    assert all(128 <= n <= 512 or n >= 2048 for n in sizes) and all(job.tokens == 128 for job in jobs)
    assert sizes == [len(job.prompt) for job in others] and jobs[0].prompt != others[0].prompt
    shared = gpu_loads.shared_prefixes(0)
    heads = [tuple(job.prompt[:2048]) for job in shared]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert len(counts) == 8 and counts[0] > 2 * counts[4] and len({tuple(job.prompt) for job in shared}) == 200
    outputs = [job.tokens for job in gpu_loads.open_jobs(0, 200)]
    assert len(outputs) == 200 and min(outputs) >= 16 and max(outputs) <= 256 and len(set(outputs)) > 50


@pytest.mark.parametrize("text", ["X", "S:x", "decode", "decode:0", "open", "open:-1", "open:0", "P:-1"])
def test_bad_runs_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="allowed are S"):
        gpu_loads.parse_run(text)
    with pytest.raises(ValueError, match="--runs"):
        gpu.Workload.parse("qwen3-8b", f"S:0,{text}", None, None, "{}", "{}", None)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"shapes": "big"}, "--shapes: 'big'"), ({"peer": "x"}, "--peer: 'x'"), ({"options": "[]"}, "--options"),
     ({"peer_options": "{"}, "--peer-options"), ({"peer_path": Path("/tmp")}, "--peer-path")],
)  # fmt: skip
def test_bad_options_are_named(change: dict[str, Any], named: str) -> None:
    good = {
        "shapes": "qwen3-8b", "runs": "S", "peer": None, "peer_path": None, "options": "{}", "peer_options": "{}",
        "limit": None,
    }  # fmt: skip
    gpu.Workload.parse(**good)
    with pytest.raises(ValueError, match=named):
        gpu.Workload.parse(**{**good, **change})


def test_a_side_measures_every_kind_of_run(stub_engine: None) -> None:
    shape = SHAPES["qwen3-0.6b"]
    side = gpu_sides.EverwarmSide(shape, {})
    report = asyncio.run(gpu_sides.measure(side, shape, ["S:0", "open:50%", "open:80%", "P", "decode:2"], limit=12))
    runs = report["runs"]
    assert report["after"]["steps"]["count"] > 100 and report["after"]["steps"]["lead_ms"] > 0
    for name in ("S:0", "open:50%", "open:80%", "P"):
        assert runs[name]["requests"] == 12 and not runs[name]["failed"] and runs[name]["tokens_s"] > 0
        assert 0 < runs[name]["ttft_p50_ms"] <= runs[name]["ttft_p99_ms"]
    assert runs["open:50%"]["rate"] == pytest.approx(runs["S:0"]["requests_s"] / 2, rel=1e-3)
    assert runs["P"]["cached"] > 0.2
    assert runs["S:0"]["cached"] == runs["open:50%"]["cached"] == runs["open:80%"]["cached"] == 0
    floor = shape.floor_s(2, 1152) * 1e3
    assert runs["decode:2"]["floor_ms"] == pytest.approx(floor, rel=1e-3)
    assert floor / runs["decode:2"]["share_of_floor"] == pytest.approx(runs["decode:2"]["step_ms"], abs=1e-4)


def test_draws_are_summed_up_together(stub_engine: None) -> None:
    shape, asked = SHAPES["qwen3-0.6b"], []
    side = gpu_sides.EverwarmSide(shape, {})
    run = side.run

    def noting(job: gpu_loads.Job) -> Any:
        asked.append(len(job.prompt))
        return run(job)

    side.run = noting  # type: ignore[method-assign]
    report = asyncio.run(gpu_sides.measure(side, shape, ["S:0", "open:80%", "P"], limit=12, draws=3))
    assert [found["requests"] for found in report["runs"].values()] == [36, 36, 36]
    assert report["runs"]["S:0"]["cached"] == report["runs"]["open:80%"]["cached"] == 0
    lengths = [len(job.prompt) for draw in range(3) for job in gpu_loads.mixed_lengths(0, draw=draw)[:12]]
    assert lengths[:12] != lengths[12:24]
    assert sorted(asked[-108:-72]) == sorted(asked[-72:-36]) == sorted(lengths)


def test_floors_of_the_shapes() -> None:
    assert SHAPES["qwen3-8b"].floor_s(1, 1152) * 1e3 == pytest.approx(3.56, abs=0.01)
    assert SHAPES["qwen3-0.6b"].floor_s(64, 1152) * 1e3 == pytest.approx(2.244, abs=0.01)


def test_summary_counts_what_a_client_sees() -> None:
    fast = gpu_loads.Trace(10.0, 100, times=[10.1, 10.2, 10.4], counts=[1, 1, 2], num_cached=50)
    slow = gpu_loads.Trace(10.0, 300, times=[10.5, 10.6], counts=[1, 1])
    broken = gpu_loads.Trace(10.0, 300, error="no")
    found = gpu_loads.summary([fast, slow, broken], 2.0)
    assert (found["requests"], found["failed"], found["first_error"]) == (2, 1, "no")
    assert found["tokens_s"] == 3.0 and found["cached"] == 0.125
    assert found["ttft_p50_ms"] == pytest.approx(300) and found["gap_p50_ms"] == pytest.approx(100)
    assert found["tpot_p99_ms"] == pytest.approx(100)
    assert gpu_loads.steady_rate([fast, gpu_loads.Trace(10.0, 1, times=[10.15, 10.3], counts=[1, 1])]) == pytest.approx(
        2 / 0.15
    )


async def _instant(job: gpu_loads.Job) -> gpu_loads.Trace:
    return gpu_loads.Trace(time.perf_counter(), len(job.prompt), [time.perf_counter()], [job.tokens])


def test_open_loop_counts_from_when_a_request_was_due() -> None:
    class Busy:
        async def run(self, job: gpu_loads.Job) -> gpu_loads.Trace:
            time.sleep(0.02)  # noqa: ASYNC251  # holds the client's loop, so that later requests are sent late
            return await _instant(job)

    jobs = [gpu_loads.Job([1], 1)] * 10
    traces, _ = asyncio.run(gpu_loads.open_loop(Busy(), jobs, 1000.0, 0))  # type: ignore[arg-type]
    waits = sorted(t.times[0] - t.start for t in traces)
    assert waits[-1] > 0.1, "a late start must not shorten the wait"


def report_of(side: str, scale: float) -> dict[str, Any]:
    times = {f"{name}_p{q}_ms": 100.0 / scale for name in ("ttft", "gap") for q in (50, 99)}
    row = {"tokens_s": 1000.0 * scale, "failed": 0, **times}
    return {
        "side": side,
        "after": {},
        "runs": {"S:0": row, "open:50%": {"rate": 5.0, **row}, "decode:1": {"tokens_s": 10.0 * scale}},
    }


@pytest.mark.parametrize(("scale", "verdict"), [(1.3, True), (1.0, False)])
def test_peer_first_and_at_its_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scale: float, verdict: bool
) -> None:
    commands: list[list[str]] = []

    def fake(command: list[str], env: dict[str, str], out: Path, *_: Any) -> int:
        commands.append(command)
        side = command[3]
        runs = command[command.index("--runs") + 1 :]
        report = report_of(side, 1.0 if side == "vllm" else scale)
        report["runs"] = dict(zip(runs, report["runs"].values(), strict=True))
        out.write_text(json.dumps(report))
        assert (env["PYTHONPATH"].split(":")[0] == str(tmp_path)) == (side == "vllm")
        return 0

    monkeypatch.setattr(gpu, "_watch", fake)
    load = gpu.Workload.parse("qwen3-8b", "S:0,open:50%,decode:1", "vllm", tmp_path, "{}", "{}", None, draws=3)
    figures = gpu.run(load, Console(quiet=True))
    assert [command[3] for command in commands] == ["vllm", "everwarm"]
    assert all(command[command.index("--draws") + 1] == "3" for command in commands)
    assert "open:50%" in commands[0] and "open:5.0" in commands[1]
    assert gpu.holds(figures) is verdict
    console = Console(record=True, width=200)
    gpu.show(figures, console)
    assert f"{scale:.2f}x" in console.export_text()


@pytest.mark.parametrize(
    ("code", "said"), [(1, "ended with 1:\nout of memory"), (0, "ended with 0"), (None, "did not end")]
)
def test_a_side_that_does_not_finish_is_an_error(monkeypatch: pytest.MonkeyPatch, code: int | None, said: str) -> None:
    def fake(command: list[str], env: dict[str, str], out: Path, log: Path, console: Console) -> int | None:
        log.write_text("out of memory")
        return code

    monkeypatch.setattr(gpu, "_watch", fake)
    with pytest.raises(gpu.SideFailed, match=said):
        gpu.run(gpu.Workload.parse("qwen3-8b", "S", None, None, "{}", "{}", None), Console(quiet=True))


SIDE = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
try:
    from cluster.bench.gpu_sides import end_with_parent
    end_with_parent()
    out.write_text(json.dumps({"runs": {"S:0": {"tokens_s": 12.5}}}))
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)
    out.with_name("ended").touch()
"""


def test_a_side_that_takes_too_long_ends_its_engine_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "TIMEOUT_S", 5.0)
    out, console = tmp_path / "report.json", Console(record=True, width=200)
    code = gpu._watch([sys.executable, "-c", SIDE, str(out)], dict(os.environ), out, tmp_path / "log", console)
    assert code is None and (tmp_path / "ended").exists()
    assert "S:0: tokens_s 12.5" in console.export_text(), "what was measured before is on the screen"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_bench_that_is_ended_ends_its_side(tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "report.json"
    program = (
        "import os, sys; from pathlib import Path; from rich.console import Console; from cluster.bench import gpu; "
        "_, _, out, log = sys.argv; side = [sys.executable, '-c', *sys.argv[1:]]; "
        "gpu._watch(side, dict(os.environ), Path(out), Path(log), Console())"
    )
    heeding = None if sent == signal.SIGKILL else partial(signal.signal, sent, signal.SIG_DFL)  # whatever we run under
    bench = subprocess.Popen([sys.executable, "-c", program, SIDE, str(out), str(tmp_path / "log")], preexec_fn=heeding)
    until = time.monotonic() + 30
    while not out.exists() and time.monotonic() < until:
        time.sleep(0.05)
    bench.send_signal(sent)
    assert bench.wait(30) != 0
    until = time.monotonic() + (30 if sent == signal.SIGKILL else 0)  # else it has waited for its side
    while not (tmp_path / "ended").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (tmp_path / "ended").exists()


FAMILY = """
import pathlib, subprocess, sys, time
sleeper = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
out = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", sleeper, str(out.with_name("begun"))])
try:
    child.wait()
except KeyboardInterrupt:
    time.sleep(60)
"""


def test_whatever_a_side_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What writes weights is told too; and a side that hangs is killed with its children."""
    monkeypatch.setattr(gpu, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(gpu, "END_S", 0.5)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda *a, **k: (started.append(popen(*a, **k)), started[0])[1])
    out = tmp_path / "report.json"
    command = [sys.executable, "-c", FAMILY, str(out)]
    assert gpu._watch(command, dict(os.environ), out, tmp_path / "log", Console(quiet=True)) is None
    assert (tmp_path / "begun").exists()
    until = time.monotonic() + 10
    while _group_lives(started[0].pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _group_lives(started[0].pid)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


IDLE_SIDE = """
import asyncio, pathlib, sys
from cluster.bench import gpu_sides

class Idle:
    def __init__(self, shape, options): ...
    async def start(self):
        pathlib.Path(sys.argv[-1]).with_name("begun").touch()
        return {}
    async def run(self, job):
        await asyncio.sleep(60)
    async def stop(self):
        pathlib.Path(sys.argv[-1]).with_name("ended").touch()
        return {}

gpu_sides.SIDES["everwarm"] = Idle
gpu_sides.main()
"""


def test_a_side_hears_ctrl_c_where_it_was_ignored_before(tmp_path: Path) -> None:
    """As in what a script starts in its background."""
    command = [sys.executable, "-c", IDLE_SIDE, "everwarm", "--out", str(tmp_path / "report.json")]
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    side = subprocess.Popen(command, preexec_fn=ignoring, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        side.send_signal(signal.SIGINT)
        assert side.wait(20) != 0 and (tmp_path / "ended").exists()
    finally:
        side.kill()
        side.wait()


def test_an_engine_is_stopped_when_its_runs_fail() -> None:
    class Broken:
        stopped = False

        async def start(self) -> dict[str, Any]:
            return {}

        async def run(self, job: gpu_loads.Job) -> gpu_loads.Trace:
            raise RuntimeError("no more")

        async def stop(self) -> dict[str, Any]:
            self.stopped = True
            return {}

    side = Broken()
    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(gpu_sides.measure(side, SHAPES["qwen3-8b"], ["S:0"], limit=4))
    assert side.stopped


def test_without_a_gpu_the_side_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from cluster.bench.random_engine import open_random_engine

    with pytest.raises(ValueError, match="device"):
        open_random_engine(SHAPES["qwen3-8b"], {}, lambda deltas: None)
