"""Pages narrower than the model: the bound of each format, and attention over them against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference import BATCHES, CPU, PAGE, make_meta, naive_attention

from kernels import torch_attention
from kernels.interface import AttentionShape, LayerKV
from kernels.quantized_kv import STORED, dequantize, quantize, stored_dim
from kernels.reference import TorchOps

LEVELS = {"int8": 127, "int4": 7}
FLOATS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)


@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(FLOATS, min_size=8, max_size=8), min_size=1, max_size=5),
)
def test_a_value_is_off_by_half_a_step_at_most(name: str, rows: list[list[float]]) -> None:
    x = torch.tensor(rows, dtype=torch.float32)
    codes, scale = quantize(x, STORED[name])
    assert codes.dtype == STORED[name] and codes.shape == (len(rows), stored_dim(name, 8))
    got = dequantize(codes, scale, torch.float32).double()
    step = x.double().abs().amax(-1, keepdim=True) / LEVELS[name]
    assert ((got - x.double()).abs() <= step * 0.5001 + 1e-37).all()
    top = x.abs().argmax(-1)
    for row, at in enumerate(top.tolist()):
        assert got[row, at].item() == pytest.approx(x[row, at].item(), rel=1e-5, abs=1e-37)


@pytest.mark.parametrize("name", STORED)
def test_a_token_is_stored_the_same_in_any_company(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 4, 16)
    codes, scale = quantize(x.clone(), STORED[name])
    for t in (0, 7, 32):
        alone, alone_scale = quantize(x[t : t + 1].clone(), STORED[name])
        assert torch.equal(alone.view(torch.uint8), codes[t : t + 1].view(torch.uint8))
        assert scale is None or torch.equal(alone_scale, scale[t : t + 1])


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    got = dequantize(*quantize(x, STORED[name]), torch.float32)
    assert got[0].isfinite().all() and not got[1].isfinite().all()


def test_fp8_saturates() -> None:
    codes, scale = quantize(torch.tensor([[1e4, -1e9, 448.0, 0.5]]), STORED["fp8"])
    assert scale is None and codes.float().tolist() == [[448.0, -448.0, 448.0, 0.5]]


def test_int4_needs_pairs() -> None:
    with pytest.raises(ValueError, match="head_dim 15 is odd"):
        stored_dim("int4", 15)


def quantized_pages(num_pages: int, heads: int, dim: int, name: str, joined: bool) -> LayerKV:
    codes, scale = quantize(torch.randn(num_pages, PAGE, 2 * heads, dim), STORED[name])
    parts = [codes[:, :, :heads], codes[:, :, heads:]]
    parts += [None, None] if scale is None else [scale[:, :, :heads], scale[:, :, heads:]]
    return LayerKV(*(part if joined or part is None else part.contiguous() for part in parts))


def opened(kv: LayerKV) -> LayerKV:
    return LayerKV(
        dequantize(kv.k, kv.k_scale, torch.float32).clone(), dequantize(kv.v, kv.v_scale, torch.float32).clone()
    )


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_reads_what_the_pages_hold(batch: str, joined: bool, name: str) -> None:
    """New keys and values are first rounded as stored, then attended to in float64: nothing else may differ."""
    if not joined and "very different" in batch:
        pytest.skip("the slow reference has seen these lengths")
    torch.manual_seed(1)
    meta, num_pages = make_meta(BATCHES[batch])
    shape = AttentionShape(6, 2, 16, 1e-6, 16**-0.5)
    kv = quantized_pages(num_pages, 2, 16, name, joined)
    assert (torch_attention._joined(kv.k, kv.v) is not None) == joined
    before = opened(kv)
    cos, sin = torch.randn(800, 8), torch.randn(800, 8)
    qkv = torch.randn(meta.cu_q_host[-1], 10 * 16)
    got = TorchOps(CPU, torch.float32).attention(qkv.clone(), kv, meta, shape, None, None, cos, sin)

    exact = LayerKV(before.k.clone(), before.v.clone())
    naive_attention(qkv, exact, meta, shape, None, cos, sin)  # writes the new tokens as they are
    after = opened(kv)
    slots = meta.slots
    for was, now, raw in ((before.k, after.k, exact.k), (before.v, after.v, exact.v)):
        new, old = raw.flatten(0, 1)[slots], now.flatten(0, 1)[slots]
        step = new.abs().amax(-1, keepdim=True) / LEVELS.get(name, 8)
        assert ((new - old).abs() <= step * 0.51 + 1e-6).all(), "a new token is not within its bound"
        untouched = torch.ones(len(was.flatten(0, 1)), dtype=torch.bool)
        untouched[slots] = False
        assert torch.equal(was.flatten(0, 1)[untouched], now.flatten(0, 1)[untouched])
    expected = attend(qkv, after, meta, shape, cos, sin)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def attend(qkv, kv: LayerKV, meta, shape: AttentionShape, cos, sin) -> torch.Tensor:
    """float64 attention that takes every key and value from the pages, the new tokens' too."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    x = qkv.double().view(-1, heads + 2 * kv_heads, dim)
    out = torch.zeros(len(x), heads, dim, dtype=torch.float64)
    for r in range(len(meta.kv_len_host)):
        table = meta.block_table[r].long()
        for t in range(meta.cu_q_host[r], meta.cu_q_host[r + 1]):
            seen = int(meta.positions[t]) + 1
            c, s = cos[seen - 1].double(), sin[seen - 1].double()
            for h in range(heads):
                a, b = x[t, h, : dim // 2], x[t, h, dim // 2 :]
                q = torch.cat((a * c - b * s, b * c + a * s))
                keys, values = (
                    pages[table].flatten(0, 1)[:seen, h * kv_heads // heads].double() for pages in (kv.k, kv.v)
                )
                out[t, h] = torch.softmax(keys @ q * shape.scale, 0) @ values
    return out.flatten(1).float()


@pytest.mark.parametrize("name", STORED)
def test_chunks_write_and_read_the_same_bits(name: str) -> None:
    """A prompt in one pass and in pieces: the pages are equal byte for byte."""
    torch.manual_seed(2)
    shape = AttentionShape(4, 2, 16, 1e-6, 0.25)
    qkv, cos, sin = torch.randn(40, 8 * 16), torch.randn(64, 8), torch.randn(64, 8)
    stores = []
    for cuts in ([40], [7, 16, 1, 16], [1] * 40):
        kv = quantized_pages(4, 2, 16, name, True)
        for pool in (kv.k, kv.v):
            pool.view(torch.uint8).zero_()
        ops, at = TorchOps(CPU, torch.float32), 0
        for n in cuts:
            meta, _ = make_meta([(at, n)])
            meta.block_table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
            meta.slots = PAGE + torch.arange(at, at + n)
            ops.attention(qkv[at : at + n].clone(), kv, meta, shape, None, None, cos, sin)
            at += n
        stores.append([part[1:].clone().view(torch.uint8) for part in (kv.k, kv.v)])
    for other in stores[1:]:
        assert all(torch.equal(a[:2], b[:2]) for a, b in zip(stores[0], other, strict=True))
