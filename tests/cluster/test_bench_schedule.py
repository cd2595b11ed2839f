"""``everwarm bench schedule``: what a virtual clock says is what the formula says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.bench import app, report, schedule
from cluster.bench.gpu_loads import Job

COSTS = schedule.Costs(decode=(4.0, 0.1, 1e-3), prefill=(2.0, 0.01, 1e-6), sizes=(64, 128))


def load(options: dict[str, Any] | None = None, **changes: Any) -> schedule.Workload:
    given: dict[str, Any] = {"shape": "qwen3-8b", "runs": "S:0", "costs": "{}", "draws": 0, "limit": None}
    return schedule.Workload.parse(**{**given, **changes}, options=json.dumps(options or {}))


def simulate(jobs: list[Job], dues: list[float], **options: Any) -> dict[str, Any]:
    return schedule.simulate(load(options).config, COSTS, jobs, dues)


def test_a_lone_request_takes_what_its_steps_take() -> None:
    found = simulate([Job([5] * 100, 3)], [7.0])
    assert found["ttft_p50_ms"] == pytest.approx(0.5 + 2 + 0.01 * 128 + 1e-6 * 100 * 50, abs=0.2)
    assert found["gap_p50_ms"] == pytest.approx(4 + 0.1 + 101 * 1e-3, abs=0.2)
    assert found["steps"] == 3 and found["failed"] == 0


@pytest.mark.parametrize("size", [512, 2048])
def test_a_long_prompt_is_cut_to_the_size_of_a_step(size: int) -> None:
    found = simulate([Job([5] * 4096, 1)], [0.0], chunk_size=size)
    assert found["steps"] == 4096 // size
    assert found["ttft_p50_ms"] == pytest.approx(found["steps"] * 2 + 0.01 * 4096 + 1e-6 * 4096 * 2048, abs=1)


def test_whoever_decodes_waits_for_a_long_step() -> None:
    """One gap is the long prompt's whole step where steps are long; where they are short, eight are a part of it."""
    jobs = [Job([5] * 10, 200), Job([6] * 4000, 1)]
    long, short = (simulate(jobs, [0.0, 0.3], chunk_size=size) for size in (4096, 512))
    assert long["gap_p99_ms"] == pytest.approx(4.3, abs=0.5), "one of 199 is not seen"
    assert short["gap_p99_ms"] == pytest.approx(2 + 5.1 + 1e-6 * 512 * 3700, abs=1)
    assert long["ttft_p99_ms"] < short["ttft_p99_ms"]


def test_a_whole_load_takes_no_time_to_speak_of() -> None:
    began = time.perf_counter()
    figures = schedule.run(load(runs="S:0,P,open:20", limit=60, draws=2))
    assert all(found["requests"] == 60 and not found["failed"] for found in figures["runs"].values())
    assert figures["runs"]["P"]["cached"] > 0.5
    assert sum(found["seconds"] for found in figures["runs"].values()) > (time.perf_counter() - began) / 3
    least, mean, most = figures["runs"]["S:0"]["draws"]["ttft_p99_ms"]
    assert least < mean < most
    console = Console(record=True, width=100)
    schedule.show(figures, console)
    text = console.export_text()
    assert text.count("draws: mean") == 3 and "…" not in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shape": "qwen3-9b"}, "--shape: .qwen3-9b.; allowed are .*qwen3-8b"),
        ({"runs": "decode:4"}, "--runs: .decode:4.; allowed are S"),
        ({"runs": "open:50%"}, "--runs: .open:50%.; allowed are S"),
        ({"runs": "often"}, "--runs: .often."),
        ({"shape": "qwen3-0.6b", "costs": '{"decode": [1, 1, 1]}'}, "--costs: prefill is needed for qwen3-0.6b"),
        ({"costs": "{"}, "--costs: .{. is no JSON"),
        ({"costs": "[1]"}, "an object is needed"),
        ({"costs": '{"fast": 1}'}, "--costs: .fast.; allowed are decode"),
        ({"costs": '{"decode": [1, 2]}'}, "--costs: decode: .*three numbers"),
        ({"costs": '{"prefill": [1, 2, -3]}'}, "--costs: prefill: .*three numbers"),
        ({"costs": '{"sizes": [64, 32]}'}, "--costs: sizes: .*ascending"),
        ({"options": {"chunk_size": -1}}, "--options: .*chunk_size"),
        ({"options": {"chunk": 64}}, "--options: .*chunk"),
        ({"options": {"device": "cpu"}}, "--options: device: .cpu."),
        ({"options": {"speculative": "ngram"}}, "--options: speculative: .ngram."),
        ({"options": {"canary": True}}, "--options: canary: True"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){named}"):
        load(**change)


@pytest.mark.parametrize("runs", ["S:0", "open:20"])
@pytest.mark.parametrize(
    ("options", "said"), [({"max_model_len": 3600}, "prompt: .*context of 3600"), ({"max_waiting": 1}, "at most 1 may")]
)
def test_what_the_options_refuse_is_said(runs: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"--options: {runs}: request .* is refused: .*{said}"):
        schedule.run(load(options, runs=runs))


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["schedule", "--runs", "open:13.5", "--limit", "20", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())["figures"]["runs"]["open:13.5"]
    assert figures["requests"] == 20 and figures["ttft_p50_ms"] > 0
    refused = CliRunner().invoke(app, ["schedule", "--runs", "decode:1"])
    assert refused.exit_code == 2 and "allowed are S" in refused.output
    refused = CliRunner().invoke(app, ["schedule", "--options", '{"max_waiting": 1}'])
    assert refused.exit_code == 2 and "is refused" in refused.output


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/opt/bin/everwarm", "bench", "schedule"], "everwarm bench schedule"),
        (["/src/cluster/bench/__main__.py", "schedule"], "everwarm bench schedule"),
        (["/opt/bin/everwarm", "verify", "--quick"], "everwarm verify --quick"),
    ],
)
def test_a_result_names_the_command_that_gives_it(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", arguments)
    report({}, {})
    assert json.loads(capsys.readouterr().out)["command"] == command
