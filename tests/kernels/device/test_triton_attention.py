"""Paged attention, RoPE and the KV write, against float64: around page, block and split borders."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import Case, attention_case, close

from kernels.interface import SharedSplits
from kernels.triton_common import Launcher
from kernels.triton_decode import decode_attention
from kernels.triton_prefill import prefill_attention
from kernels.triton_rope import rope_write
from kernels.triton_shared import members
from kernels.tuning import DecodeConfig, PrefillConfig


def run_decode(case: Case, config: DecodeConfig, fused: bool) -> torch.Tensor:
    out = torch.empty(case.qkv.shape[0], case.shape.num_heads * case.shape.head_dim, device=case.qkv.device)
    launch = Launcher(case.qkv.device)
    norms = (case.q_norm, case.k_norm)
    if not fused:
        rope_write(launch, case.qkv, case.kv, case.meta, case.shape, *norms, case.cos, case.sin)
        norms = (None, None)
    decode_attention(launch, config, case.qkv, case.kv, case.meta, case.shape, *norms, case.cos, case.sin, out,
                     fused=fused)  # fmt: skip
    return out


SHAPES = [(4, 2, 32), (9, 3, 32), (8, 1, 32), (2, 2, 64)]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("split", [0, 32])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_decode_ragged(device: torch.device, page: int, split: int, qk_norm: bool) -> None:
    """Contexts of 1, one less, equal and one more than a page, a block and a split."""
    prefix = [0, 14, 15, 16, 30, 31, 32, 63, 64]
    case = attention_case(device, [1] * len(prefix), prefix, page=page, qk_norm=qk_norm)
    close(run_decode(case, DecodeConfig(split, 16, 1, 1), fused=True), case.want())
    case.check_cache()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("fused", [False, True])
def test_decode_shapes(device: torch.device, heads: int, kv_heads: int, dim: int, fused: bool) -> None:
    case = attention_case(device, [1, 1, 1], [0, 40, 70], heads=heads, kv_heads=kv_heads, dim=dim)
    close(run_decode(case, DecodeConfig(32, 32, 1, 1), fused), case.want())
    case.check_cache()


def test_a_context_shorter_than_the_split(device: torch.device) -> None:
    case = attention_case(device, [1, 1], [3, 40])
    close(run_decode(case, DecodeConfig(64, 16, 1, 1), fused=True), case.want())


def test_decode_with_a_graphs_bound_on_the_context(device: torch.device) -> None:
    """A captured grid is sized for the bucket, not for the batch."""
    case = attention_case(device, [1, 1], [3, 70], max_kv=500)
    close(run_decode(case, DecodeConfig(64, 16, 1, 1), fused=True), case.want())


def test_many_splits_need_more_than_one_combine_chunk(device: torch.device) -> None:
    case = attention_case(device, [1], [16 * 18 + 5], heads=2, kv_heads=1, dim=32)
    close(run_decode(case, DecodeConfig(16, 16, 1, 1), fused=True), case.want())


def share(case: Case, tokens: int, groups: list[list[int]]) -> None:
    """Requests of a group get the first one's pages for their first ``tokens`` tokens."""
    pages = slice(tokens // case.meta.page_size)
    for first, *others in groups:
        for r in others:
            case.meta.block_table[r, pages] = case.meta.block_table[first, pages]
            for mine, theirs in zip(case.history[r], case.history[first], strict=True):
                mine[:tokens] = theirs[:tokens]


@pytest.mark.parametrize(("heads", "kv_heads", "fused"), [(4, 2, True), (9, 3, False), (16, 1, True)])
def test_shared_splits_are_read_once_for_all(device: torch.device, heads: int, kv_heads: int, fused: bool) -> None:
    """Two groups of different extent, and a request alone or with more than one new token; unused items between."""
    prefix = [130, 128, 200, 140, 150, 20]
    case = attention_case(
        device, [1] * 5 + [1 if fused else 5], prefix, heads=heads, kv_heads=kv_heads, dim=32, max_kv=400
    )
    share(case, 128, [[0, 1]])
    share(case, 64, [[2, 3, 4]])
    items = torch.full((6, 1 + members(case.shape)), -1, dtype=torch.int32)
    for i, item in enumerate(([0, 0, 1], [1, 1, 0], [-1], [0, 4, 2, 3])):
        items[i, : len(item)] = torch.tensor(item, dtype=torch.int32)
    covered = torch.tensor([128, 128, 64, 64, 64, 0], dtype=torch.int32)
    case.meta.shared = SharedSplits(items.to(device), covered.to(device), 64)
    out = run_decode(case, DecodeConfig(128, 16, 1, 1), fused)
    rows = 6 if fused else 5
    close(out[:rows], case.want()[:rows])
    case.check_cache()


def test_rows_of_length_zero_write_nothing(device: torch.device) -> None:
    case = attention_case(device, [1, 1], [20, 20])
    case.meta.kv_len[1] = 0
    out = run_decode(case, DecodeConfig(0, 16, 1, 1), fused=True)
    close(out[:1], case.want()[:1])
    assert out[1].isnan().all()
    where = case.meta.slots[1].item()
    assert torch.equal(case.kv.k.flatten(0, 1)[where], case.before.k.flatten(0, 1)[where])


def run_mixed(case: Case, config: PrefillConfig, min_new: int, search: int = 256) -> torch.Tensor:
    out = torch.empty(case.qkv.shape[0], case.shape.num_heads * case.shape.head_dim, device=case.qkv.device)
    launch = Launcher(case.qkv.device)
    rope_write(launch, case.qkv, case.kv, case.meta, case.shape, case.q_norm, case.k_norm, case.cos, case.sin)
    if min_new > 1:
        decode_attention(launch, DecodeConfig(32, 16, 1, 1), case.qkv, case.kv, case.meta, case.shape, None, None,
                         case.cos, case.sin, out, fused=False)  # fmt: skip
    prefill_attention(launch, config, case.qkv, case.kv, case.meta, case.shape, out, min_new=min_new,
                      search=search)  # fmt: skip
    return out


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("min_new", "rows"), [(1, 16), (2, 32)])
@pytest.mark.parametrize("fresh", [False, True])
def test_mixed_batch(device: torch.device, page: int, min_new: int, rows: int, fresh: bool) -> None:
    """Prefill chunks with and without a cached prefix between decode rows."""
    new, prefix = [1, 17, 1, 10, 2], [33, 0, 0, 25, 64]
    case = attention_case(device, new, prefix, page=page)
    close(run_mixed(case, PrefillConfig(rows, 16, 1, 4, fresh), min_new), case.want())
    case.check_cache()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("fresh", [False, True])
def test_chunks_of_several_blocks(device: torch.device, rows: int, fresh: bool) -> None:
    """No block, one and more before the diagonal, in the prefix and in the chunk; blocks that their border cuts."""
    case = attention_case(device, [49, 16, 70, 5], [0, 15, 47, 32])
    close(run_mixed(case, PrefillConfig(rows, 16, 2, 4, fresh), 2), case.want())


@pytest.mark.parametrize(("room", "search"), [(16384, 256), (80, 2), (0, 256)])
def test_gathered_prefixes(device: torch.device, monkeypatch: pytest.MonkeyPatch, room: int, search: int) -> None:
    """Of none, one and several blocks, a single token between them; a prefix with room for a part, and one without."""
    monkeypatch.setattr("kernels.triton_prefill.GATHER_ROOM", room)
    monkeypatch.setattr("kernels.triton_prefill.GATHER_PROGRAMS", 3)
    case = attention_case(device, [20, 1, 9, 20, 33, 20], [70, 40, 20, 15, 33, 48])
    close(run_mixed(case, PrefillConfig(16, 16, 2, 4, True, True), 2, search=search), case.want())
    case.check_cache()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_neighbours_nan_stays_with_it(device: torch.device, fresh: bool) -> None:
    case = attention_case(device, [21, 20, 9], [5, 40, 0])
    start, end = case.meta.cu_q_host[1:3]
    case.qkv[start:end] = float("nan")
    out = run_mixed(case, PrefillConfig(16, 16, 1, 4, fresh), 2)
    want = case.want()
    close(torch.cat([out[:start], out[end:]]), torch.cat([want[:start], want[end:]]))
    assert out[start:end].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("fresh", [False, True])
def test_prefill_shapes(device: torch.device, heads: int, kv_heads: int, dim: int, fresh: bool) -> None:
    """Three query heads a group leave a row of the tile unused."""
    case = attention_case(device, [23, 7], [0, 35], heads=heads, kv_heads=kv_heads, dim=dim, qk_norm=False)
    close(run_mixed(case, PrefillConfig(16, 32, 1, 4, fresh), 1), case.want())
    case.check_cache()


def test_more_requests_than_one_search_block(device: torch.device) -> None:
    new = [1 + i % 2 for i in range(40)]
    case = attention_case(device, new, [0] * 40, heads=2, kv_heads=1, dim=32)
    close(run_mixed(case, PrefillConfig(16, 16, 1, 4), 1, search=16), case.want())


@pytest.mark.parametrize("cut", [1, 17])
def test_a_chunk_border_changes_no_bit(device: torch.device, cut: int) -> None:
    """36 tokens at once, and the same in two chunks over the same pages."""
    whole = attention_case(device, [36], [0])
    raw = whole.qkv.clone()
    config = PrefillConfig(16, 16, 1, 4)
    once = run_mixed(whole, config, 1)
    parts = []
    for a, b in ((0, cut), (cut, 36)):
        part = attention_case(device, [b - a], [a])
        part.qkv, part.kv, part.meta.block_table = raw[a:b].clone(), whole.kv, whole.meta.block_table
        part.meta.slots = whole.meta.slots[a:b]
        part.cos, part.sin, part.q_norm, part.k_norm = whole.cos, whole.sin, whole.q_norm, whole.k_norm
        parts.append(run_mixed(part, config, 1))
    assert torch.equal(torch.cat(parts), once)
