"""The bench of the switches: its rows are what they say, and a small run shows what each is for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.bench import app
from cluster.bench.article import SWITCHES, Workload, plan, prompts, run, show

TINY = Workload(threads=1, requests=14, concurrency=6, scale=0.06, reservations=2, rows="ladder", budget_s=600)


def test_rows_turn_one_switch_at_a_time() -> None:
    ladder = plan(replace(TINY, rows="ladder"))
    assert [name for name, _ in ladder][:2] == ["baseline", "+ paging"] and ladder[-1] == ("+ prefix cache", {})
    sizes = [len(options) for _, options in ladder]
    assert sizes == sorted(sizes, reverse=True) and ladder[0][1]["kv_cache_paging"] is False
    alone = dict(plan(replace(TINY, rows="alone")))
    assert alone.pop("everything on") == {} and "everything on" not in dict(plan(replace(TINY, rows="ladder,alone")))
    assert alone["without continuous"] == {"scheduler": "static"}
    assert alone["without paging"] == {"kv_cache_paging": False, "prefix_caching": False}
    on_a_gpu = dict(plan(replace(TINY, rows="alone", device="cuda"))[1:])
    assert set(on_a_gpu) - set(alone) == {"without fused"} and len(on_a_gpu) == len(SWITCHES)
    steps_up = [name for name, _ in plan(replace(TINY, rows="ladder,prefill", device="cuda"))]
    assert steps_up[:4] == ["baseline", "+ paging", "+ continuous", "+ fused"], "prefill has no row of its own"
    with pytest.raises(ValueError, match="rows: 'prefill'"):
        plan(replace(TINY, rows="prefill"))
    with pytest.raises(ValueError, match="rows: 'sideways'"):
        plan(replace(TINY, rows="sideways"))


def test_prompts_have_a_long_tail_and_shared_beginnings() -> None:
    load = Workload(requests=400)
    asked = prompts(load, 4096)
    sizes = sorted(map(len, asked))
    assert asked == prompts(load, 4096) and sizes[0] >= 32 and sizes[-1] <= 1024 < load.max_model_len
    assert sum(size >= 512 for size in sizes) == 32, "8 %"
    beginnings = [tuple(prompt[:24]) for prompt in asked]
    again = sum(beginnings.count(beginning) > 1 for beginning in beginnings)
    assert 160 < again < 240


def test_a_small_run() -> None:
    figures = run(TINY, Console(quiet=True))
    rows = figures["rows"]
    assert not figures["left_out"] and len(rows) == 6
    assert rows["baseline"]["rows"] <= 2 < rows["+ paging"]["rows"], "two reservations against six requests"
    assert rows["baseline"]["held"] > 0.5 and rows["baseline"]["used"] < rows["baseline"]["held"] / 2
    assert rows["+ paging"]["used"] > rows["+ paging"]["held"] / 2
    assert [row["cached"] > 0 for row in rows.values()] == [False] * 5 + [True]
    assert figures["ttft_p99_drop"] is not None
    json.dumps(figures)
    show(figures, Console(quiet=True))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--model", "huge"], "model: 'huge'; allowed are small"),
    (["--device", "tpu"], "device: 'tpu'"),
    (["--rows", "all"], "rows: 'all'"),
])  # fmt: skip
def test_arguments_that_are_unusable(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["article", *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())
