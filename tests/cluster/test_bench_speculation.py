"""The speculation bench on a tiny model: what it reports and what it judges."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import write_tiny_llama
from typer.testing import CliRunner

from cluster.bench import app
from cluster.bench import speculation as bench


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("speculative", "options"), [("ngram", ()), ("draft", (("speculative_layers", 1),))], ids=["ngram", "draft"]
)
def test_it_compares_and_reports(checkpoint: Path, speculative: str, options: tuple) -> None:
    threads = torch.get_num_threads()
    progress, screen = Console(file=io.StringIO(), width=120), Console(file=io.StringIO(), width=160)
    load = bench.Workload(str(checkpoint), 1, 48, 2, 120.0, speculative, options)
    figures = bench.run(load, progress)
    assert torch.get_num_threads() == threads
    assert figures["rounds"] == 2 and set(figures["cells"]) == {"rewrite", "free"}
    for cell in figures["cells"].values():
        assert cell["identical"] and len(cell["ratios"]) == 2 and cell["off_tok_s"] > 0 and cell["cpu_ratio"] > 0
        assert 0 <= cell["accepted"] <= 1 and cell["tokens_per_step"] > 0.9
    assert json.loads(json.dumps(figures)) == {**figures, "options": dict(options)}
    bench.show(figures, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "rewrite" in shown and f"speculation ({speculative}" in shown
    assert (">= 1.6x" in shown) is (speculative == "ngram")


def test_it_judges_tokens_and_prompt_lookup() -> None:
    good = {"ratio": 1.7, "identical": True}
    figures = {"speculative": "ngram", "cells": {"rewrite": good, "free": {**good, "ratio": 0.97}}}
    assert bench.holds(figures)
    for name, changes in (("rewrite", {"ratio": 1.59}), ("free", {"ratio": 0.96}), ("free", {"identical": False})):
        cells = {**figures["cells"], name: {**figures["cells"][name], **changes}}
        assert not bench.holds({**figures, "cells": cells})
        assert bench.holds({"speculative": "draft", "cells": cells}) is ("ratio" in changes)


def test_the_budget_cuts_rounds(checkpoint: Path) -> None:
    load = bench.Workload(str(checkpoint), 1, 32, rounds=50, budget_s=0.01)
    assert bench.run(load, Console(file=io.StringIO()))["rounds"] == 1


def test_unusable_arguments_are_named() -> None:
    result = CliRunner().invoke(app, ["speculation", "--model", "/no-such-model"])
    assert result.exit_code == 2 and "no-such-model" in result.output
