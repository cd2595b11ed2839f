"""``everwarm verify`` on tiny random models: it passes where all is well, and names the first difference where not."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cluster import cli, verify, verify_cases, verify_report, verify_sampling
from cluster.checkpoint import default_gguf
from replica.config import EngineConfig, ModelFacts, resolve
from router.wire import Logprob, Sampling

transformers = pytest.importorskip("transformers")
FACTS = ModelFacts(256, num_layers=2, num_kv_heads=2, head_dim=16)


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def save(family: str, path: Path) -> Path:
    torch.manual_seed(0)
    shape = getattr(transformers, f"{family}Config")(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(shape).save_pretrained(path)
    return path


def screen() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_exact_options_agree_and_lossy_ones_are_measured(checkpoint: Path) -> None:
    progress, out = screen(), screen()
    figures = verify.run(str(checkpoint), progress, quick=True)
    assert figures["num_failed"] == 0 and figures["first_difference"] is None, figures["first_difference"]
    assert figures["unproven"] == [] and verify.holds(figures)
    assert all(v["tokens"] == 16 * verify.COUNT and v["worst"] <= 1e-4 for v in figures["verdicts"])
    assert {effect["option"] for effect in figures["sampling"]} == {field.name for field in fields(Sampling)}
    control, *lossy = figures["lossy"]
    assert control["option"] == "default" and control["agreement"] == 1.0 and control["kl_max"] < 1e-6
    assert control["same_tokens"] == 1.0 and control["alone_as_in_a_crowd"]
    assert {loss["option"].partition("=")[0] for loss in lossy} >= {"kv_cache_dtype"}
    for loss in lossy:
        assert loss["refused"] or (loss["kl_mean"] > control["kl_mean"] and loss["positions"] == 11 * verify.COUNT)
    verify_report.show(figures, out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "all exact options agree" in shown and "kv_cache_dtype=int8" in shown and "pool=tiny" in shown
    assert "transformers on 16 requests" in progress.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.parametrize("fault", ["token", "rope"])
def test_a_planted_fault_is_found_and_named(
    fault: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save("Llama", tmp_path_factory.mktemp("faulty"))
    monkeypatch.setattr(verify, "covering", lambda axes: verify_cases.every(axes)[:2])
    result = CliRunner().invoke(cli.app, ["verify", "--model", str(path), "--quick", "--inject", fault])
    assert result.exit_code == 1, result.output
    first = json.loads(result.stdout.splitlines()[-1])["figures"]["first_difference"]
    assert first["case"] == "default" and "differs: default: request" in result.stdout
    assert "instead of" in first["what"] or "log-probability of token" in first["what"]
    assert first["position"] < verify.COUNT
    assert result.stderr.index("differs: default: request") < result.stderr.index("3/"), "said when it is found"


def test_a_smaller_dtype_is_held_to_what_transformers_loses_in_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = str(save("Qwen3", tmp_path_factory.mktemp("rounded"))), screen()
    monkeypatch.setattr(verify, "covering", lambda axes: verify_cases.every(axes)[:2])
    monkeypatch.setattr(verify, "_losses", lambda *_: ())
    figures = verify.run(path, screen(), quick=True, dtype="bfloat16", device="cpu")
    assert figures["num_failed"] == 0, figures["first_difference"]
    assert 0 < figures["own_mean"] < figures["own_worst"] == figures["tolerance"] / 4
    for verdict in figures["verdicts"]:
        assert verdict["values"] >= 6 * verdict["tokens"] > 0
        assert 0.3 * figures["own_mean"] < verdict["mean"] <= 1.5 * figures["own_mean"]
        assert verdict["worst"] <= figures["tolerance"]
    verify_report.show(figures, out)
    assert f"of transformers in bfloat16 {figures['own_mean']:.1e} on average" in out.file.getvalue()  # type: ignore[attr-defined]
    assert verify.run(path, screen(), quick=True, dtype="bfloat16", device="cpu", fault="rope")["num_failed"] == 2
    monkeypatch.setattr(verify, "limits_within", lambda worst, mean: verify.Limits(4 * worst, mean / 10, 2 * worst))
    first = verify.run(path, screen(), quick=True, dtype="bfloat16", device="cpu")["first_difference"]
    assert first["request"] is None and "on average" in first["what"]
    assert "differs: default: log-probabilities are off" in str(verify.Difference(**first))


def test_unusable_arguments_exit_2() -> None:
    for options in (["--dtype", "float16"], ["--inject", "nonsense"], ["--model", "/nowhere/at-all"]):
        result = CliRunner().invoke(cli.app, ["verify", *options])
        assert result.exit_code == 2 and options[1] in result.output


def test_the_matrix_is_read_off_the_engine() -> None:
    plan = verify_cases.plan_for(FACTS, "cpu")
    assert set(plan.axes["speculative"]) == set(verify_cases.allowed("speculative"))
    assert {*plan.lossy["kv_cache_dtype"]} == {"fp8", "int8", "int4"} and not plan.left_out
    every = verify_cases.every(plan.axes)
    assert len({json.dumps(case) for case in every}) == len(every)
    names = [verify_cases.name_of(case, plan.axes) for case in every]
    assert names[0] == "default" and len(set(names)) == len(names)
    for case in every:
        options = verify_cases.options_of(case, 100, FACTS, "float32")
        assert case["kv_cache_paging"] or not options["prefix_caching"]
        resolved = resolve(EngineConfig(**options), FACTS)
        assert resolved.num_host_pages == (verify_cases.HOST_PAGES if case["host_cache"] else 0)


def test_quick_covers_every_pair_of_values() -> None:
    axes = verify_cases.plan_for(FACTS, "cpu").axes
    few, every = verify_cases.covering(axes), verify_cases.every(axes)
    assert len(few) < len(every) / 4
    for a, b in itertools.combinations(axes, 2):
        assert {(c[a], c[b]) for c in few} == {(c[a], c[b]) for c in every}


def test_a_sampling_option_without_a_check_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Field:
        name = "invented"

    class Silent:
        ids, logprobs, prompt_logprobs, error = [1] * 24, None, None, None

    monkeypatch.setattr(verify_sampling, "fields", lambda _: [Field])
    monkeypatch.setattr(verify_sampling, "_one", lambda *_: Silent)
    llm = type("Llm", (), {"engine": type("Engine", (), {"runner": type("Runner", (), {"vocab_size": 9})})})
    with pytest.raises(LookupError, match="invented"):
        verify_sampling.effects(llm, [1], with_grammar=False)  # type: ignore[arg-type]


def test_comparison_names_what_differs() -> None:
    rows = torch.log_softmax(torch.tensor([[3.0, 2.0, 0.0], [1.0, 1.00001, 0.0]]), -1)
    expected = verify.Expected([0, 1], rows, [1.0, 1e-5])

    def compare(ids: list[int], values: list[float]) -> verify.Difference | None:
        found = [Logprob(value, 1, ()) for value in values]
        out = verify.Output(ids, "length", logprobs=found)
        return verify._compare(verify.Verdict("case"), 3, expected, out, verify.Limits(1e-4, 1e-4, 2e-4))

    first, second, other = float(rows[0, 0]), float(rows[1, 1]), float(rows[1, 0])
    assert compare([0, 1], [first, second]) is None
    assert compare([0, 0], [first, other]) is None, "transformers was undecided"
    wrong = compare([1, 1], [float(rows[0, 1]), second])
    assert wrong == verify.Difference("case", 3, 0, "token 1 instead of 0, which won by 1.000000")
    assert "log-probability of token 0" in compare([0, 1], [first - 2e-4, second]).what  # type: ignore[union-attr]
    assert "nan" in compare([0, 1], [float("nan"), second]).what  # type: ignore[union-attr]
    assert "ends after 1" in compare([0], [first]).what  # type: ignore[union-attr]
    verdict = verify.Verdict("case")
    out = verify.Output([0, 1], "length", logprobs=[Logprob(first + 0.25, 1, ()), Logprob(second - 0.75, 1, ())])
    assert verify._compare(verdict, 3, expected, out, verify.Limits(1.0, 0.0, 0.0)) is None
    assert (verdict.values, verdict.tokens) == (2, 2) and verdict.mean == pytest.approx(0.5, abs=1e-6)
    broken = verify.Output([0, 1], "length", logprobs=[Logprob(float("nan"), 1, ()), Logprob(second, 1, ())])
    assert verify._compare(verdict, 3, expected, broken, verify.Limits(1.0, 0.0, 0.0)) is not None
    assert verdict.mean == pytest.approx(0.5, abs=1e-6), "what is no number would spoil the report"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_dtype_in_which_transformers_overflows_is_no_measure(
    value: float, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of infinity everything would agree."""
    path = str(save("Llama", tmp_path_factory.mktemp("overflowing")))
    monkeypatch.setattr(verify, "own_gaps", lambda *_: torch.tensor([0.1, value]))
    with pytest.raises(verify.Unverifiable, match="in bfloat16 are not all finite"):
        verify.run(path, screen(), quick=True, dtype="bfloat16", device="cpu")


def test_divergence() -> None:
    from cluster.verify_lossy import divergence

    reference = torch.log_softmax(torch.randn(8), -1)
    same = Logprob(0.0, 1, tuple((i, float(reference[i])) for i in range(4)))
    assert divergence(reference, same) < 1e-6
    other = torch.log_softmax(torch.randn(8), -1)
    whole = Logprob(0.0, 1, tuple((i, float(other[i])) for i in range(8)))
    exact = float((reference.exp() * (reference - other)).sum())
    assert divergence(reference, whole) == pytest.approx(exact, abs=1e-5)
    part = Logprob(0.0, 1, tuple((i, float(other[i])) for i in range(4)))
    assert 0 <= divergence(reference, part) <= exact + 1e-6, "what is not told apart can only hide"


@pytest.mark.slow
def test_the_default_model() -> None:
    try:
        default_gguf()
    except ValueError:
        pytest.skip("the default model is not installed")
    figures = verify.run(None, screen(), quick=True)
    assert verify.holds(figures), (figures["first_difference"], figures["unproven"])
