"""W8A8 products: what they are, that both ways of computing them give the same bits, and that rows are independent."""

from __future__ import annotations

import pytest
import torch
from test_native import random_blocks

from kernels import quantized
from kernels.dispatch import OPERATIONS, Dispatch, Site
from kernels.interface import Stream
from kernels.quantized import Int8Linear, Int8Ops, packs, quantize_rows
from kernels.reference import TorchOps

CPU = torch.device("cpu")
PACKED = pytest.param(
    True, marks=pytest.mark.skipif(not packs(), reason="no VNNI, so oneDNN's sums would not be exact")
)


def site(quantization: str) -> Site:
    return Site(CPU, torch.float32, torch.float32, 16, 64, 96, 4, 2, 16, 128, quantization=quantization)


@pytest.mark.parametrize("packed", [False, PACKED])
@pytest.mark.parametrize(
    ("rows", "wide", "out"), [(1, 64, 96), (5, 576, 960), (130, 1536, 64), (3, 17, 5), (2, 64, quantized.FEW_OUT)]
)
def test_it_is_the_exact_product_of_the_codes(packed: bool, rows: int, wide: int, out: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(out, wide), torch.randn(rows, wide)
    linear, plain = Int8Linear.of(weight, pack=packed), Int8Linear.of(weight, pack=False).plain
    codes, scales = quantize_rows(x.clone())
    assert plain is not None
    exact = (codes.long() @ plain.t().long()).to(torch.float32) * linear.scales
    assert torch.equal(linear(codes.clone()), exact)
    alone = torch.cat([linear(codes[i : i + 1].clone()) for i in range(rows)])
    assert torch.equal(alone, exact), "a row does not depend on the others"
    true = x @ weight.t()
    assert (exact * scales - true).norm() < 0.02 * true.norm()


def test_rounding_stays_within_half_a_step() -> None:
    x = torch.randn(6, 40) * torch.tensor([1e-9, 1e-3, 1.0, 1e3, 1e9, 1.0])[:, None]
    codes, largest = quantize_rows(x.clone())
    scales = largest / 127
    assert codes.abs().amax(-1).tolist() == [127] * 6
    assert ((codes * scales - x).abs() <= 0.501 * scales).all()
    zeros, scale = quantize_rows(torch.zeros(2, 8))
    assert not zeros.any() and scale.isfinite().all()


def test_what_is_not_finite_stays_so() -> None:
    x = torch.randn(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    ops = Int8Ops(CPU, quantized.ROLES)
    weight = ops.prepare("down", torch.randn(32, 64))
    out = ops.linear_add(x, weight, Stream(torch.zeros(4, 32)), torch.ones(32)).h
    assert out.isfinite().all(1).tolist() == [True, False, False, True]


def test_sums_that_overflow_are_refused() -> None:
    assert quantized.MAX_DOT * 127 * 128 < 2**31
    with pytest.raises(ValueError, match="at most 131072"):
        Int8Linear.of(torch.zeros(1, quantized.MAX_DOT + 1))


@pytest.mark.parametrize("kept", [frozenset[str](), frozenset({"down", "head"})])
def test_operations_are_close_to_fp32_and_kept_roles_are_fp32(kept: frozenset[str]) -> None:
    torch.manual_seed(1)
    ours, exact = Int8Ops(CPU, quantized.ROLES - kept), TorchOps(CPU, torch.float32)
    x, norm, bias = Stream(torch.randn(9, 64)), torch.rand(64) + 0.5, torch.randn(128)
    made = {
        "qkv": torch.randn(128, 64), "o": torch.randn(64, 64), "gate_up": torch.randn(192, 64),
        "down": torch.randn(64, 96), "head": torch.randn(128, 64),
    }  # fmt: skip
    both = [{role: ops.prepare(role, weight) for role, weight in made.items()} for ops in (ours, exact)]
    inner, rows = torch.randn(9, 96), torch.tensor([0, 8])
    results = [
        (
            ops.norm_linear(x, norm, 1e-5, w["qkv"], bias), ops.norm_linear(x, norm, 1e-5, w["qkv"], None),
            ops.linear_add(x.h.clone(), w["o"], x, norm).h, ops.norm_mlp(x, norm, 1e-5, w["gate_up"]),
            ops.linear_add(inner.clone(), w["down"], x, norm).h, ops.norm_logits(x, rows, norm, 1e-5, w["head"]),
            ops.norm_logits(x, None, norm, 1e-5, w["head"]),
        )
        for ops, w in zip((ours, exact), both, strict=True)
    ]  # fmt: skip
    for index, (got, want) in enumerate(zip(*results, strict=True)):
        assert got.shape == want.shape and got.dtype == torch.float32
        same = torch.equal(got, want)
        assert same == (index >= 4 and bool(kept)), index
        assert (got - want).norm() < 0.03 * want.norm(), index
    assert ours.quantized_bytes == (1 + packs()) * sum(w.numel() for role, w in made.items() if role not in kept)
    assert ours.choices()["kept fp32"] == (", ".join(sorted(kept)) or "none")


def test_dispatch_gives_it_the_products_only_when_asked() -> None:
    chosen = Dispatch(site("w8a8")).choices()
    assert {op for op in OPERATIONS if chosen[op].startswith("w8a8")} == set(OPERATIONS) - {"embed", "attention"}
    assert "only products are quantized" in chosen["attention"] and "w8a8: products" in chosen
    assert not any("w8a8" in text for text in Dispatch(site("none")).choices().values())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoints_own_codes_are_multiplied_as_they_are(bits: int) -> None:
    ops = Dispatch(site("w8a8"))._chosen["norm_linear"][0]
    if ops._blocks is None:
        pytest.skip("no compiler or no VNNI here")
    torch.manual_seed(bits)
    blocks, weight = random_blocks(bits, 96, 64)
    for rows in (1, 3, 9, 70):
        x, residual, norm, bias = torch.randn(rows, 64), torch.randn(rows, 96), torch.rand(64) + 0.5, torch.randn(96)
        w = ops.prepare_blocks("down", weight, blocks)
        steps = x.abs().amax(-1, keepdim=True) / 127
        exact = (x / steps).round().double() @ weight.double().t() * steps + residual
        got = ops.linear_add(x.clone(), w, Stream(residual), norm).h
        torch.testing.assert_close(got.double(), exact, atol=1e-5 * float(exact.abs().max()), rtol=1e-4)
        alone = [ops.linear_add(x[i : i + 1], w, Stream(residual[i : i + 1]), norm).h for i in range(rows)]
        assert torch.equal(torch.cat(alone), got), "a row does not depend on the others"
        plain = TorchOps(CPU, torch.float32)
        for got, want in (
            (ops.norm_linear(Stream(x), norm, 1e-5, w, bias), plain.norm_linear(Stream(x), norm, 1e-5, weight, bias)),
            (ops.norm_mlp(Stream(x), norm, 1e-5, w), plain.norm_mlp(Stream(x), norm, 1e-5, weight)),
            (ops.norm_logits(Stream(x), None, norm, 1e-5, w), plain.norm_logits(Stream(x), None, norm, 1e-5, weight)),
        ):
            assert got.shape == want.shape and 0 < (got - want).norm() < 0.03 * want.norm()
    x = torch.randn(40, 64)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    finite = ops.linear_add(x, w, Stream(torch.zeros(40, 96)), norm).h.isfinite().all(1)
    assert finite.tolist() == [True, False, False] + [True] * 37
    zeros = ops.linear_add(torch.zeros(2, 64), w, Stream(torch.ones(2, 96)), norm).h
    assert torch.equal(zeros, torch.ones(2, 96))
