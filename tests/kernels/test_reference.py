"""The torch operations against definitions written the slow way."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from kernels import torch_attention
from kernels.interface import AttentionMeta, AttentionShape, LayerKV, Stream
from kernels.reference import TorchOps

CPU = torch.device("cpu")
PAGE = 16
EPS = 1e-5


def make_meta(requests: list[tuple[int, int]], seed: int = 0) -> tuple[AttentionMeta, int]:
    """requests: (context, new tokens) each, on pages in random order. Also returns how many pages the pool needs."""
    rng = random.Random(seed)
    needed = [-(-(c + n) // PAGE) for c, n in requests]
    pages = list(range(1, sum(needed) + 1))
    rng.shuffle(pages)
    table = torch.zeros(len(requests), max(needed), dtype=torch.int32)
    cu_q, positions, slots = [0], [], []
    for i, (context, new) in enumerate(requests):
        mine = torch.tensor([pages.pop() for _ in range(needed[i])])
        table[i, : needed[i]] = mine
        at = torch.arange(context, context + new)
        positions.append(at)
        slots.append(mine[at // PAGE] * PAGE + at % PAGE)
        cu_q.append(cu_q[-1] + new)
    kv_len = [c + n for c, n in requests]
    meta = AttentionMeta(
        cu_q=torch.tensor(cu_q, dtype=torch.int32), kv_len=torch.tensor(kv_len, dtype=torch.int32), block_table=table,
        positions=torch.cat(positions).to(torch.int32), slots=torch.cat(slots), page_size=PAGE,
        max_q=max(n for _, n in requests), max_kv=max(kv_len), decode_only=all(n == 1 for _, n in requests),
        cu_q_host=cu_q, kv_len_host=kv_len,
    )  # fmt: skip
    return meta, sum(needed) + 1


def naive_attention(
    qkv: torch.Tensor, kv: LayerKV, meta: AttentionMeta, shape: AttentionShape, norms: list[torch.Tensor] | None,
    cos: torch.Tensor, sin: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Token by token and head by head, in float64, on a copy of the pages."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    k_pages, v_pages = kv.k.double().clone(), kv.v.double().clone()
    x = qkv.double().view(-1, heads + 2 * kv_heads, dim)

    def placed(row: torch.Tensor, position: int, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            row = row / (row.pow(2).mean() + shape.eps).sqrt() * norm.double()
        a, b = row[: dim // 2], row[dim // 2 :]
        c, s = cos[position].double(), sin[position].double()
        return torch.cat((a * c - b * s, b * c + a * s))

    q_norm, k_norm = norms or (None, None)
    for t in range(len(x)):
        page, offset = divmod(int(meta.slots[t]), PAGE)
        for h in range(kv_heads):
            k_pages[page, offset, h] = placed(x[t, heads + h], int(meta.positions[t]), k_norm)
            v_pages[page, offset, h] = x[t, heads + kv_heads + h]
    out = torch.zeros(len(x), heads, dim, dtype=torch.float64)
    for r in range(len(meta.kv_len_host)):
        for t in range(meta.cu_q_host[r], meta.cu_q_host[r + 1]):
            seen = int(meta.positions[t]) + 1
            table = meta.block_table[r].long()
            for h in range(heads):
                keys = k_pages[table].flatten(0, 1)[:seen, h * kv_heads // heads]
                values = v_pages[table].flatten(0, 1)[:seen, h * kv_heads // heads]
                q = placed(x[t, h], int(meta.positions[t]), q_norm)
                out[t, h] = torch.softmax(keys @ q * shape.scale, 0) @ values
    kv.k.copy_(k_pages), kv.v.copy_(v_pages)
    return out.flatten(1).float()


def random_pages(num_pages: int, heads: int, dim: int, joined: bool) -> LayerKV:
    """``joined``: k and v are halves of one tensor, as the runner allocates them on a CPU."""
    both = torch.randn(num_pages, PAGE, 2 * heads, dim)
    k, v = both[:, :, :heads], both[:, :, heads:]
    return LayerKV(k, v) if joined else LayerKV(k.contiguous(), v.contiguous())


BATCHES = {
    "decode": [(0, 1), (5, 1), (15, 1), (16, 1), (31, 1), (60, 1)],
    "one decode": [(40, 1)],
    "decode of very different lengths": [(700, 1), (3, 1), (5, 1), (690, 1), (2, 1)],
    "prefill": [(0, 7), (0, 16), (0, 33)],
    "chunks": [(16, 16), (5, 3), (33, 20)],
    "mixed, decodes not first": [(0, 9), (40, 1), (16, 5), (7, 1), (0, 2)],
}


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("block", [128, 4])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention(batch: str, qk_norm: bool, block: int, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "QUERY_BLOCK", block)
    torch.manual_seed(1)
    meta, num_pages = make_meta(BATCHES[batch])
    shape = AttentionShape(6, 2, 16, 1e-6, 16**-0.5)
    kv = random_pages(num_pages, 2, 16, joined)
    assert (torch_attention._joined(kv.k, kv.v) is not None) == joined
    before = LayerKV(kv.k.clone(), kv.v.clone())
    cos, sin = torch.randn(800, 8), torch.randn(800, 8)
    norms = [torch.rand(16) + 0.5, torch.rand(16) + 0.5] if qk_norm else None
    qkv = torch.randn(meta.cu_q_host[-1], 10 * 16)
    got = TorchOps(CPU, torch.float32).attention(qkv.clone(), kv, meta, shape, *(norms or (None, None)), cos, sin)
    expected = naive_attention(qkv, before, meta, shape, norms, cos, sin)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kv.k, before.k, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv.v, before.v)


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_gather_buffers_are_reused_across_sizes_and_pools(joined: bool) -> None:
    ops = TorchOps(CPU, torch.float32)
    for requests, dim in (([(600, 1)], 16), ([(5, 1), (9, 1)], 16), ([(100, 4)], 32), ([(600, 1)], 16)):
        torch.manual_seed(2)
        meta, num_pages = make_meta(requests)
        shape = AttentionShape(2, 1, dim, 1e-6, dim**-0.5)
        kv = random_pages(num_pages, 1, dim, joined)
        before = LayerKV(kv.k.clone(), kv.v.clone())
        table = torch.randn(800, dim // 2)
        qkv = torch.randn(meta.cu_q_host[-1], 4 * dim)
        got = ops.attention(qkv.clone(), kv, meta, shape, None, None, table, table)
        torch.testing.assert_close(
            got, naive_attention(qkv, before, meta, shape, None, table, table), atol=2e-5, rtol=1e-4
        )


def test_long_contexts_take_smaller_query_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.empty(0)
    assert torch_attention._causal_mask(1000, 512, 3, like).block == 128
    assert torch_attention._causal_mask(1000, 20, 3, like).block == 20
    long = torch_attention._causal_mask(100_000, 512, 4, like)
    assert 16 <= long.block < 128 and long.values.numel() <= 16 * 4 * 100_016 * 2


def test_groups_split_only_where_padding_costs_more() -> None:
    assert torch_attention._groups([]) == []
    assert torch_attention._groups([4]) == [[0]]
    assert torch_attention._groups([4, 6, 5, 8]) == [[0, 1, 2, 3]]
    assert sorted(torch_attention._groups([500, 4, 490, 5])) == [[0, 2], [1, 3]]
    for seed in range(20):
        rng = random.Random(seed)
        pages = [rng.randint(1, 300) for _ in range(rng.randint(1, 40))]
        groups = torch_attention._groups(pages)
        assert sorted(i for group in groups for i in group) == list(range(len(pages)))
        assert all(group == sorted(group) for group in groups)


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("prepared", [False, True])
def test_products(rows: int, prepared: bool) -> None:
    torch.manual_seed(3)
    ops = TorchOps(CPU, torch.float32)

    def ready(role: str, weight: torch.Tensor) -> torch.Tensor:
        out = ops.prepare(role, weight) if prepared else weight
        assert torch.equal(out.to_dense(), weight)
        return out

    h, norm = torch.randn(rows, 32), torch.rand(32) + 0.5
    normed = (h.double() * (h.double().pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()).float()
    close = {"atol": 2e-5, "rtol": 1e-4}
    qkv, bias = torch.randn(48, 32), torch.randn(48)
    for b in (None, bias):
        got = ops.norm_linear(Stream(h), norm, EPS, ready("qkv", qkv), b)
        torch.testing.assert_close(got, F.linear(normed, qkv, b), **close)
    gate_up = torch.randn(40, 32)
    gate, up = F.linear(normed, gate_up).chunk(2, -1)
    torch.testing.assert_close(
        ops.norm_mlp(Stream(h), norm, EPS, ready("gate_up", gate_up)), F.silu(gate) * up, **close
    )
    down, x = torch.randn(32, 20), torch.randn(rows, 20)
    kept = h.clone()
    torch.testing.assert_close(
        ops.linear_add(x, ready("down", down), Stream(h), norm).h, h + F.linear(x, down), **close
    )
    assert torch.equal(h, kept)
    head = ready("head", torch.randn(64, 32))
    torch.testing.assert_close(ops.norm_logits(Stream(h), None, norm, EPS, head), F.linear(normed, head), **close)
    last = torch.tensor([rows - 1])
    torch.testing.assert_close(ops.norm_logits(Stream(h), last, norm, EPS, head), F.linear(normed[-1:], head), **close)
    ids = torch.randint(0, 64, (rows,))
    assert torch.equal(ops.embed(ids, head, norm, EPS).h, head[ids])


def test_a_norm_already_done_by_the_producer_is_taken() -> None:
    ops = TorchOps(CPU, torch.float32)
    h, norm, weight = torch.randn(3, 8), torch.ones(8), torch.randn(5, 8)
    done = Stream(torch.full_like(h, float("nan")), normed=h)
    torch.testing.assert_close(ops.norm_linear(done, norm, EPS, weight, None), F.linear(h, weight))
