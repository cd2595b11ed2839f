"""The engine bench on a tiny model: what it reports, and that its peer and we compute the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cluster.bench import app
from cluster.bench import engine as bench

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = transformers.Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    transformers.Qwen3ForCausalLM(shape).save_pretrained(path)
    return path


def test_it_compares_and_reports(checkpoint: Path) -> None:
    threads = torch.get_num_threads()
    screen = Console(file=io.StringIO(), width=120)
    load = bench.Workload(str(checkpoint), threads=1, prompt=40, context=20, batches=(1, 3), tokens=6, rounds=2)
    figures = bench.run(load, screen)
    assert torch.get_num_threads() == threads
    assert figures["same_tokens"] == 1.0
    assert set(figures["cells"]) == {"prefill", "decode_b1", "decode_b3"}
    for cell in figures["cells"].values():
        assert len(cell["ours_all"]) == len(cell["transformers_all"]) == 2
        assert cell["ours_tok_s"] > 0 and cell["transformers_tok_s"] > 0
        assert cell["ratio"] == pytest.approx(cell["ours_tok_s"] / cell["transformers_tok_s"], rel=0.05)
    assert json.loads(json.dumps(figures)) == figures
    bench.show(figures, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "prefill" in shown and "decode, batch 3" in shown and "100.0% of the sequences" in shown


def test_without_the_peer_it_only_measures(checkpoint: Path) -> None:
    screen = Console(file=io.StringIO())
    load = bench.Workload(
        str(checkpoint), threads=1, prompt=16, context=16, batches=(2,), tokens=4, rounds=1, peer=False
    )
    figures = bench.run(load, screen)
    assert figures["same_tokens"] is None and "ratio" not in figures["cells"]["decode_b2"]
    assert bench.holds(figures)
    bench.show(figures, screen)


def test_goals() -> None:
    cells = {
        "prefill": {"ratio": 1.1},
        "decode_b1": {"ratio": 1.2},
        "decode_b8": {"ratio": 1.0},
        "decode_b32": {"ratio": 0.2},
    }
    assert bench.holds({"cells": cells})
    for name in ("prefill", "decode_b1", "decode_b8"):
        assert not bench.holds({"cells": cells | {name: {"ratio": 0.99}}})


def test_the_command_ends_with_one_json_line(checkpoint: Path, tmp_path: Path) -> None:
    options = "--threads 1 --prompt 16 --context 16 --batches 2 --tokens 4 --rounds 1 --no-peer"
    result = CliRunner().invoke(
        app, ["engine", "--model", str(checkpoint), *options.split(), "--json", f"{tmp_path}/x.json"]
    )
    assert result.exit_code == 0, result.output
    line = json.loads(result.output.splitlines()[-1])
    assert line == json.loads((tmp_path / "x.json").read_text())
    assert line["figures"]["cells"]["decode_b2"]["ours_tok_s"] > 0 and "torch" in line["versions"] and line["units"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "1,x"], "--batches"),
        (["--batches", "0"], "--batches"),
        (["--model", "/nowhere/at-all"], "/nowhere/at-all"),
        (["--prompt", "999999"], "1000000 exceeds"),
    ],
)
def test_unusable_arguments_exit_2(checkpoint: Path, options: list[str], message: str) -> None:
    defaults = [] if "--model" in options else ["--model", str(checkpoint)]
    result = CliRunner().invoke(app, ["engine", *defaults, "--no-peer", *options])
    assert result.exit_code == 2 and message in result.output
