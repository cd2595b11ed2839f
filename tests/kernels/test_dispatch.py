"""Which implementation runs, and whether it says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.dispatch import OPERATIONS, SWITCH_OF, SWITCHES, Candidate, Dispatch, Site, default_candidates

SITE = Site(torch.device("cpu"), torch.float32, torch.float32, 16, 64, 128, 4, 2, 16, 256)


class Fake:
    """Every operation returns who ran it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, operation: str) -> Any:
        if operation not in OPERATIONS:
            raise AttributeError(operation)
        return lambda *args: (self.name, operation)

    def choices(self) -> dict[str, str]:
        return {"note": "tuned"}


def fused(declined: dict[str, str] | None = None) -> Candidate:
    declined = declined or {}
    return Candidate("fused", True, lambda site: Fake("fused"), lambda operation, site: declined.get(operation))


PLAIN = Candidate("plain", False, lambda site: Fake("plain"))


def who(dispatch: Dispatch) -> dict[str, str]:
    return {operation: getattr(dispatch, operation)()[0] for operation in OPERATIONS}


def test_the_first_that_accepts_runs() -> None:
    dispatch = Dispatch(SITE, {}, [fused({"attention": "odd head"}), PLAIN])
    assert who(dispatch) == {o: "plain" if o == "attention" else "fused" for o in OPERATIONS}
    assert dispatch.choices()["attention"] == "plain (not fused: odd head)"
    assert dispatch.choices()["norm_mlp"] == "fused (first choice)"
    assert dispatch.choices()["fused: note"] == "tuned"


@pytest.mark.parametrize("switch", SWITCHES)
def test_false_takes_the_unfused_path_and_nothing_else(switch: str) -> None:
    dispatch = Dispatch(SITE, {switch: "false"}, [fused(), PLAIN])
    assert who(dispatch) == {o: "plain" if SWITCH_OF.get(o) == switch else "fused" for o in OPERATIONS}
    assert all(f"{switch}=false" in dispatch.choices()[o] for o in OPERATIONS if SWITCH_OF.get(o) == switch)


@pytest.mark.parametrize("switch", SWITCHES)
def test_true_is_refused_where_no_fused_kernel_can_run(switch: str) -> None:
    with pytest.raises(ValueError, match=rf"{switch}: 'true' can't be honoured here: not triton: .*CUDA device"):
        Dispatch(SITE, {switch: "true"})
    assert Dispatch(SITE, {switch: "true"}, [PLAIN, fused()])


def test_unknown_switches_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown switch 'fused_everything'"):
        Dispatch(SITE, {"fused_everything": "auto"})
    with pytest.raises(ValueError, match="fused_qkv: 'yes'"):
        Dispatch(SITE, {"fused_qkv": "yes"})


def test_on_a_cpu_everything_is_torch_and_says_why() -> None:
    choices = Dispatch(replace(SITE, cpu_kernels="torch")).choices()
    assert set(choices) == set(OPERATIONS)
    assert all(text.startswith("torch (not triton: ") and "cpu" in text for text in choices.values())


def test_triton_declines_other_dtypes() -> None:
    triton = default_candidates()[0]
    cuda = replace(SITE, device=torch.device("cuda"))
    assert "float32" in (triton.decline("attention", cuda) or "")
    assert triton.decline("attention", replace(cuda, dtype=torch.bfloat16, head_dim=64)) is None
    for head_dim in (16, 80, 96):
        site = replace(cuda, dtype=torch.bfloat16, head_dim=head_dim)
        assert str(head_dim) in (triton.decline("attention", site) or "")
        assert triton.decline("norm_mlp", site) is None


def test_deterministic_on_a_gpu_is_refused_where_only_torch_can_run() -> None:
    site = replace(SITE, device=torch.device("cuda"), deterministic=True)
    with pytest.raises(ValueError, match=r"float32.*deterministic"):
        Dispatch(site)
    assert not Dispatch(replace(SITE, deterministic=True)).choices()["attention"].startswith("triton")


def test_weights_are_prepared_by_who_reads_them() -> None:
    weight = torch.randn(8, 4)
    dispatch = Dispatch(SITE)
    for role in ("qkv", "o", "gate_up", "down"):
        prepared = dispatch.prepare(role, weight)
        assert prepared.is_mkldnn and torch.equal(prepared.to_dense(), weight)
    assert dispatch.prepare("head", weight) is weight
    other = Dispatch(SITE, {}, [fused(), PLAIN])
    assert other.prepare("qkv", weight) is weight
