"""The engine bench on a tiny model: what it reports, and that its peer and we compute the same."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cluster.bench import app, llama_cpp
from cluster.bench import engine as bench
from cluster.bench.perplexity import perplexity, text_ids
from cluster.bench.sides import Room
from cluster.checkpoint import locate

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
    progress, screen = Console(file=io.StringIO(), width=120), Console(file=io.StringIO(), width=120)
    load = bench.Workload(str(checkpoint), threads=1, prompt=40, context=20, batches=(1, 3), tokens=6, rounds=2)
    figures = bench.run(load, progress)
    assert torch.get_num_threads() == threads
    assert figures["same_tokens"] == {"transformers": 1.0} and figures["rounds"] == 2
    assert set(figures["cells"]) == {"prefill", "decode_b1", "decode_b3"}
    for cell in figures["cells"].values():
        ours, theirs = cell["fp32"], cell["transformers"]
        assert len(ours["all"]) == len(theirs["all"]) == 2
        assert ours["tok_s"] > 0 and theirs["tok_s"] > 0
        assert cell["ratios"]["fp32/transformers"] == pytest.approx(ours["tok_s"] / theirs["tok_s"], rel=0.05)
    assert json.loads(json.dumps(figures)) == figures
    bench.show(figures, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "prefill" in shown and "decode, batch 3" in shown and "100.0% of the sequences" in shown
    lines = progress.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 1 + 3 * 3, "where there is no terminal, one line per step"
    assert lines[-1].endswith("10/10 round 2 of 2, decode_b3")


def test_the_budget_ends_the_rounds_and_says_so(checkpoint: Path) -> None:
    progress = Console(file=io.StringIO(), width=120)
    load = bench.Workload(
        str(checkpoint), threads=1, prompt=16, context=16, batches=(1,), tokens=4, rounds=9, peer="none", budget_s=0.0
    )
    figures = bench.run(load, progress)
    assert figures["rounds"] == 1 and len(figures["cells"]["prefill"]["fp32"]["all"]) == 1
    assert "ends the measurement after 1 rounds" in progress.file.getvalue()  # type: ignore[attr-defined]


def test_without_the_peer_it_only_measures(checkpoint: Path) -> None:
    screen = Console(file=io.StringIO())
    load = bench.Workload(
        str(checkpoint), threads=1, prompt=16, context=16, batches=(2,), tokens=4, rounds=1, peer="none"
    )
    figures = bench.run(load, screen)
    assert figures["same_tokens"] == {} and figures["cells"]["decode_b2"]["ratios"] == {}
    assert bench.holds(figures)
    bench.show(figures, screen)


def test_a_quantization_is_compared_with_fp32_in_the_same_rounds(checkpoint: Path) -> None:
    screen = Console(file=io.StringIO(), width=120)
    load = bench.Workload(
        str(checkpoint), threads=1, prompt=16, context=16, batches=(1,), tokens=4, rounds=1, quantization="w8a8"
    )
    figures = bench.run(load, Console(file=io.StringIO()))
    assert set(figures["cells"]["prefill"]["ratios"]) == {"w8a8/fp32"}, "no peer unless asked for"
    assert figures["sides"]["w8a8"]["kernels"]["norm_mlp"].startswith("w8a8") and "w8a8" in figures["same_tokens"]
    assert figures["perplexity"] is None and "0 tokens" in figures["perplexity_missing"]
    bench.show(figures, screen)
    assert "w8a8/fp32" in screen.file.getvalue() and "no perplexity" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_perplexity_is_that_of_transformers(checkpoint: Path) -> None:
    ids = [i * 37 % 128 for i in range(90)]
    side = bench.Ours(checkpoint, Room(1, 64, 1))
    got = perplexity(side.engine, ids, 40)
    side.close()
    model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    total = count = 0.0
    for at in range(0, 90, 40):
        window = torch.tensor([ids[at : at + 40]])
        with torch.inference_mode():
            loss = model(window, labels=window).loss
        total, count = total + float(loss) * (window.shape[1] - 1), count + window.shape[1] - 1
    assert got == pytest.approx(math.exp(total / count), rel=1e-4)


def test_perplexity_text_is_long_enough_and_refused_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = locate(None, weights=False)
    ids = text_ids(checkpoint, 5120)
    assert len(ids) == 5120 and len(set(ids)) > 800
    monkeypatch.setattr("pydoc_data.topics.topics", {"short": "One line."})
    with pytest.raises(ValueError, match="were asked for"):
        text_ids(checkpoint, 5120)


def test_perplexity_has_a_limit() -> None:
    figures = {"quick": False, "cells": {}, "perplexity": {"fp32": 10.0, "w8a8": 11.0}}
    assert bench.holds(figures)
    figures["perplexity"]["w8a8"] = 11.01  # type: ignore[index]
    assert not bench.holds(figures)


def test_a_side_in_another_process_is_spoken_to_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol with a child that answers as llama.cpp does; the real one is a slow test."""
    fake = tmp_path / "child.py"
    fake.write_text(
        "import json, sys\n"
        "print(json.dumps({'version': '1', 'system': json.loads(sys.argv[1])}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    if asked['count'] == 13: sys.exit(3)\n"
        "    one = {'prompt_n': len(asked['prompts'][0]), 'prompt_ms': 10, 'predicted_n': asked['count'], "
        "'predicted_ms': 100}\n"
        "    print(json.dumps({'timings': [one] * len(asked['prompts'])}), flush=True)\n"
    )
    monkeypatch.setattr(llama_cpp, "CHILD", fake)
    monkeypatch.setattr(llama_cpp, "_python", lambda scratch: sys.executable)
    side = llama_cpp.XLlamaCpp(tmp_path / "x.gguf", Room(4, 64, 2))
    assert side.describe()["system"] == {"model": f"{tmp_path}/x.gguf", "parallel": 4, "context": 80, "threads": 2}
    assert side.run([[1] * 30], 1) == (3000.0, [])
    assert side.run([[1], [2], [3]], 20) == (600.0, [])
    with pytest.raises(RuntimeError, match="exit code 3"):
        side.run([[1]], 13)
    side.close()
    with pytest.raises(ValueError, match="GGUF files only"):
        llama_cpp.XLlamaCpp(tmp_path, Room(1, 64, 1))


@pytest.mark.slow
def test_the_real_peer() -> None:
    load = bench.quick(bench.Workload(batches=(2,), peer="xllamacpp"))
    try:
        figures = bench.run(load, Console(file=io.StringIO()))
    except RuntimeError as error:
        pytest.skip(str(error))
    assert figures["cells"]["decode_b2"]["xllamacpp"]["tok_s"] > 0 and "AVX2" in figures["sides"]["xllamacpp"]["system"]


def test_quick_is_small_and_is_not_judged() -> None:
    small = bench.quick(bench.Workload())
    assert small.rounds == 1 and small.prompt <= 256 and small.tokens <= 12
    slow = {"prefill": {"ratios": {"fp32/transformers": 0.1}}}
    assert bench.holds({"quick": True, "cells": slow}) and not bench.holds({"quick": False, "cells": slow})


def test_goals() -> None:
    good = {"prefill": 1.1, "decode_b1": 1.2, "decode_b8": 1.0, "decode_b32": 0.2}
    cells = {name: {"ratios": {"fp32/transformers": ratio}} for name, ratio in good.items()}
    assert bench.holds({"quick": False, "cells": cells})
    for name in ("prefill", "decode_b1", "decode_b8"):
        worse = cells | {name: {"ratios": {"fp32/transformers": 0.99}}}
        assert not bench.holds({"quick": False, "cells": worse})


def test_the_command_ends_with_one_json_line(checkpoint: Path, tmp_path: Path) -> None:
    options = "--threads 1 --prompt 16 --context 16 --batches 2 --tokens 4 --rounds 1 --peer none"
    result = CliRunner().invoke(
        app, ["engine", "--model", str(checkpoint), *options.split(), "--json", f"{tmp_path}/x.json"]
    )
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line == json.loads((tmp_path / "x.json").read_text())
    assert line["figures"]["cells"]["decode_b2"]["fp32"]["tok_s"] > 0 and "torch" in line["versions"] and line["units"]
    assert "warm-up, prefill" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "1,x"], "--batches"),
        (["--batches", "0"], "--batches"),
        (["--model", "/nowhere/at-all"], "/nowhere/at-all"),
        (["--prompt", "999999"], "1000000 exceeds"),
        (["--peer", "nobody"], "auto, transformers, xllamacpp, none"),
        (["--quantization", "fp3"], "none, w8a8"),
    ],
)
def test_unusable_arguments_exit_2(checkpoint: Path, options: list[str], message: str) -> None:
    defaults = [] if "--model" in options else ["--model", str(checkpoint)]
    result = CliRunner().invoke(app, ["engine", *defaults, "--peer", "none", *options])
    assert result.exit_code == 2 and message in result.output


def test_overhead_command_judges_the_best_window() -> None:
    result = CliRunner().invoke(app, ["overhead", "--batch", "4", "--steps", "120"])
    line = json.loads(result.stdout.splitlines()[-1])
    runs = line["figures"]["runs"]
    assert runs["one step ahead"]["tokens"] == runs["no step ahead"]["tokens"] == 4 * 120
    assert result.exit_code == (0 if runs["one step ahead"]["best_us"] <= 300 else 1)
    assert "async_scheduling=true" in result.stderr and "best <= 300" in result.stdout
