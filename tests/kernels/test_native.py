"""The C kernels: each against torch, on this processor and as a processor without AVX-512 would run them."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_dispatch import SITE
from test_reference import EPS, make_meta, random_pages

from kernels import native, native_ops
from kernels.blocks import Blocks
from kernels.dispatch import OPERATIONS, Dispatch
from kernels.interface import AttentionShape, LayerKV, Stream
from kernels.native_blocks import Arena, pack
from kernels.native_ops import NativeOps
from kernels.reference import TorchOps

CPU = torch.device("cpu")
HERE = not isinstance(native.library(), native.Unavailable)
pytestmark = pytest.mark.skipif(not HERE, reason=f"{native.library()}")
BATCHES = {
    "one token": [(0, 1)],
    "decode": [(5, 1), (300, 1), (127, 1), (128, 1)],
    "prompt": [(0, 70)],
    "mixed": [(130, 37), (5, 1), (33, 2), (0, 17), (255, 1)],
}


@pytest.fixture(scope="module", params=["native", "x86-64-v3"])
def ops(request: pytest.FixtureRequest) -> NativeOps:
    if request.param == "native":
        return NativeOps(CPU, torch.float32)
    if platform.machine() != "x86_64":
        pytest.skip("another architecture's name")
    return NativeOps(CPU, torch.float32, native.build(request.param))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 128), (6, 2, 16), (16, 2, 80), (24, 1, 32)])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_attention(ops: NativeOps, batch: str, heads: int, kv_heads: int, dim: int, joined: bool) -> None:
    torch.manual_seed(1)
    meta, num_pages = make_meta(BATCHES[batch])
    shape = AttentionShape(heads, kv_heads, dim, 1e-6, dim**-0.5)
    kv = random_pages(num_pages, kv_heads, dim, joined)
    before = LayerKV(kv.k.clone(), kv.v.clone())
    cos, sin = torch.randn(800, dim // 2), torch.randn(800, dim // 2)
    norms = [torch.rand(dim) + 0.5, torch.rand(dim) + 0.5] if joined else None
    qkv = torch.randn(meta.cu_q_host[-1], (heads + 2 * kv_heads) * dim)
    got = ops.attention(qkv.clone(), kv, meta, shape, *(norms or (None, None)), cos, sin)
    plain = TorchOps(CPU, torch.float32)
    expected = plain.attention(qkv.clone(), before, meta, shape, *(norms or (None, None)), cos, sin)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kv.k, before.k, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv.v, before.v)


def test_a_token_attends_alike_whoever_else_is_in_the_step(ops: NativeOps) -> None:
    torch.manual_seed(2)
    shape = AttentionShape(9, 3, 64, 1e-6, 64**-0.5)
    meta, num_pages = make_meta([(200, 1), (40, 1), (90, 7)])
    kv, qkv = random_pages(num_pages, 3, 64, True), torch.randn(9, 15 * 64)
    table = torch.randn(400, 32)
    whole = ops.attention(qkv.clone(), kv, meta, shape, None, None, table, table)
    alone, _ = make_meta([(200, 1)])
    alone.block_table, alone.slots = meta.block_table[:1].clone(), meta.slots[:1]
    got = ops.attention(qkv[:1].clone(), kv, alone, shape, None, None, table, table)
    assert torch.equal(got[0], whole[0])


def random_blocks(bits: int, out: int, wide: int) -> tuple[Blocks, torch.Tensor]:
    rng = np.random.default_rng(out + wide)
    scale = (0.001 + 0.01 * rng.random((out, wide // 32))).astype(np.float16)
    least = (-0.1 * rng.random((out, wide // 32))).astype(np.float16) if bits == 4 else None
    low, high, kind = (0, 16, np.uint8) if bits == 4 else (-128, 128, np.int8)
    codes = rng.integers(low, high, (out, wide)).astype(kind)
    values = codes.astype(np.float32) * np.repeat(scale.astype(np.float32), 32, 1)
    if least is not None:
        values += np.repeat(least.astype(np.float32), 32, 1)
    return Blocks(bits, codes, scale, least), torch.from_numpy(values)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "wide"), [(96, 64), (32, 576), (64, 32)])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 21, 33])
def test_products_from_blocks(ops: NativeOps, bits: int, out: int, wide: int, rows: int) -> None:
    torch.manual_seed(rows)
    plain = TorchOps(CPU, torch.float32)
    blocks, weight = random_blocks(bits, out, wide)
    ready, head = ops.prepare_blocks("qkv", weight, blocks), ops.prepare_blocks("head", weight, blocks)
    exact = weight.double()
    h, norm, bias, residual = torch.randn(rows, wide), torch.rand(wide) + 0.5, torch.randn(out), torch.randn(rows, out)
    normed = h.double() * (h.double().pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    gate, up = (normed @ exact.t()).chunk(2, -1)
    results = {
        "norm_linear": (ops.norm_linear(Stream(h), norm, EPS, ready, bias), normed @ exact.t() + bias),
        "linear_add": (ops.linear_add(h.clone(), ready, Stream(residual), norm).h, h.double() @ exact.t() + residual),
        "norm_mlp": (ops.norm_mlp(Stream(h), norm, EPS, ready), torch.nn.functional.silu(gate) * up),
        "norm_logits": (ops.norm_logits(Stream(h), None, norm, EPS, head), normed @ exact.t()),
        "a row": (
            ops.norm_logits(Stream(h), torch.tensor([rows - 1]), norm, EPS, head), normed[-1:] @ exact.t()
        ),
    }  # fmt: skip
    for name, (got, want) in results.items():
        torch.testing.assert_close(got.double(), want, atol=2e-5 * float(want.abs().max()), rtol=1e-4, msg=name)
    if rows <= native_ops.FEW_ROWS:
        assert not torch.equal(results["norm_logits"][0], plain.norm_logits(Stream(h), None, norm, EPS, weight))
        assert f"{bits}-bit" in ops.choices()["products"]


def test_blocks_that_do_not_fill_vectors_are_left_to_torch(ops: NativeOps) -> None:
    blocks, weight = random_blocks(4, 24, 64)
    assert pack(blocks, Arena()) is None
    got = ops.linear_add(torch.ones(2, 64), ops.prepare_blocks("o", weight, blocks), Stream(torch.zeros(2, 24)), weight)
    torch.testing.assert_close(got.h[0], weight.sum(1), atol=1e-4, rtol=1e-4)


def test_what_is_not_finite_stays_so_and_stays_in_its_row(ops: NativeOps) -> None:
    blocks, weight = random_blocks(4, 32, 64)
    ready = ops.prepare_blocks("gate_up", weight, blocks)
    for rows in (4, 40):
        h = torch.randn(rows, 64)
        h[1, 3], h[2, 5] = float("nan"), float("inf")
        out = ops.norm_mlp(Stream(h), torch.ones(64), EPS, ready)
        assert out.isfinite().all(1).tolist() == [True, False, False] + [True] * (rows - 3)
    shape = AttentionShape(2, 1, 64, 1e-6, 0.125)
    for requests in ([(40, 1), (30, 1)], [(0, 9), (0, 6)]):
        meta, num_pages = make_meta(requests)
        kv = random_pages(num_pages, 1, 64, True)
        qkv = torch.randn(meta.cu_q_host[-1], 4 * 64)
        qkv[0, 10] = float("nan")
        out = ops.attention(qkv, kv, meta, shape, None, None, torch.ones(99, 32), torch.ones(99, 32))
        assert not out[0].isfinite().all() and out[meta.cu_q_host[1] :].isfinite().all()


@pytest.mark.parametrize(("rows", "wide"), [(1, 64), (3, 20), (200, 576)])
def test_norm_and_gate(ops: NativeOps, rows: int, wide: int) -> None:
    torch.manual_seed(3)
    x, norm = torch.randn(rows, wide) * 5, torch.rand(wide) + 0.5
    plain = TorchOps(CPU, torch.float32)
    torch.testing.assert_close(ops._normed(Stream(x), norm, EPS), plain._normed(Stream(x), norm, EPS))
    both = torch.randn(rows, 2 * wide) * 60
    torch.testing.assert_close(ops._gated(both.clone()), plain._gated(both.clone()), atol=1e-6, rtol=1e-5)


def test_dispatch_says_what_runs_and_refuses_what_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Dispatch(SITE).choices()
    assert all(chosen[operation].startswith("native (not triton: ") for operation in OPERATIONS)
    assert all(
        Dispatch(replace(SITE, cpu_kernels="torch")).choices()[o].startswith("torch (not triton: ") for o in OPERATIONS
    )
    narrow = Dispatch(replace(SITE, kv_dtype=torch.int8)).choices()
    assert narrow["attention"].startswith("torch (") and "these are int8" in narrow["attention"]
    assert narrow["norm_mlp"].startswith("native (")
    assert "at most 24" in Dispatch(replace(SITE, num_heads=50)).choices()["attention"]
    assert "head_dim 24" in Dispatch(replace(SITE, head_dim=24)).choices()["attention"]
    monkeypatch.setattr(native, "library", lambda: native.Unavailable("there is no gcc"))
    assert "not native: there is no gcc" in Dispatch(SITE).choices()["norm_linear"]
    with pytest.raises(ValueError, match=r"cpu_kernels: 'native' .*there is no gcc"):
        Dispatch(replace(SITE, cpu_kernels="native"))


def test_why_it_can_not_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int main(void) { return nonsense; }")
    with pytest.raises(native.Unavailable, match=r"failed: .*nonsense"):
        native.build(sources=[broken])
    with pytest.raises(native.Unavailable, match="failed"):
        native.build("no-such-machine")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.Unavailable, match="no gcc"):
        native.build()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "read-only root"))
    with pytest.raises(native.Unavailable, match="no temporary directory"):
        native.build()


@pytest.mark.parametrize("width", [1, 15, 16, 100, 49152])
def test_the_first_of_the_largest(ops: NativeOps, width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(40, width).round()  # many are equal
    x[0], x[1] = float("-inf"), -1.5
    x[2:6, width // 2] = torch.tensor([float("inf"), float("-inf"), float("nan"), 9.0])
    where, finite = ops.largest(x)
    assert torch.equal(finite, x.isfinite().all(1))
    expected = x.numpy().argmax(1)
    assert all(int(where[i]) == expected[i] for i in range(40) if not x[i].isnan().any())
    assert torch.equal(ops.largest(x[:, : width // 2 + 1])[0], ops.largest(x[:, : width // 2 + 1].clone())[0])


def test_an_arena_keeps_arrays_apart() -> None:
    arena, rng = Arena(), np.random.default_rng(1)
    arrays = [
        rng.integers(0, 99, size).astype(kind)
        for size, kind in [(7, "i4"), ((3, 5), "f2"), (70 << 20, "i1"), (9, "i4")]
    ]
    kept = [arena.keep(array) for array in arrays]
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(arrays, kept, strict=True))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)
