"""The packed inputs of captured steps, against the general builder's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from replica import noise
from replica.batch import FROM_DEVICE, Row
from replica.graph_inputs import GraphInputs, Layout
from replica.inputs import InputBuilder
from replica.sharing import Sharing
from router.wire import Sampling

PAGE = 16


def make_rows(counts: list[int], starts: list[int], samples: list[int], rng: np.random.Generator) -> list[Row]:
    rows = []
    for slot, (count, start, num_samples) in enumerate(zip(counts, starts, samples, strict=True)):
        ids = rng.integers(0, 1000, count).astype(np.int32)
        if count == 1 and start:
            ids[0] = FROM_DEVICE
        pages = rng.permutation(900)[: -(-(start + count) // PAGE)].astype(np.int32) + 1
        sampling = Sampling(temperature=0.0 if slot % 2 else 0.7, seed=slot + 3)
        rows.append(Row(slot + 5, start, ids, pages, num_samples, sampling, position_base=start + count))
    return rows


@pytest.mark.parametrize("tokens", [1, 80, 100])
@pytest.mark.parametrize("rows_room", [4, 9])
def test_fields_are_the_general_builders(tokens: int, rows_room: int) -> None:
    rng = np.random.default_rng(tokens)
    counts, starts, samples = ([1], [33], [1]) if tokens == 1 else ([40, 1, 16, 1], [0, 31, 48, 200], [0, 1, 1, 1])
    rows = make_rows(counts, starts, samples, rng)
    layout = Layout(tokens if tokens > 1 else rows_room, rows_room)
    inputs = GraphInputs(torch.device("cpu"), PAGE, 63, layout.size(64))
    inputs.packed.fill_(12345)
    for staging in inputs._staging:
        staging.fill_(54321)
    inputs.send(rows, layout)
    want = InputBuilder(torch.device("cpu"), PAGE).build(rows)
    field = lambda name: inputs.field(layout, name)  # noqa: E731
    m, r = sum(counts), len(rows)
    slots = want.slots_of_tokens
    assert torch.equal(field("ids")[:m].long(), torch.where(want.ids < 0, -1 - slots, want.ids))
    assert torch.equal(field("positions")[:m], want.meta.positions)
    assert torch.equal(field("slots")[:m].long(), want.meta.slots)
    assert (field("slots")[m:] == -1).all() and (field("ids")[m:] == 0).all()
    assert torch.equal(field("cu_q")[: r + 1], want.meta.cu_q) and (field("cu_q")[r + 1 :] == m).all()
    assert torch.equal(field("kv_len")[:r], want.meta.kv_len) and (field("kv_len")[r:] == 0).all()
    width = int(field("width"))
    assert width == want.meta.block_table.shape[1]
    table = field("pages")[: rows_room * width].view(rows_room, width)
    for i, row in enumerate(rows):
        assert table[i, : len(row.pages)].tolist() == row.pages.tolist()
    s = sum(samples)
    assert torch.equal(field("sample")[:s].long(), want.sample_rows)
    assert field("engine").tolist() == [row.slot for row in rows if row.num_samples] + [63] * (rows_room - s)
    temperature = field("temperature").view(torch.float32)
    sampled = [row for row in rows if row.num_samples]
    assert temperature[:s].tolist() == pytest.approx([row.sampling.temperature for row in sampled])
    assert (temperature[s:] == 0).all()
    seeds = np.array([row.sampling.seed for row in sampled], np.uint64)
    keys = noise.keys(seeds, np.array([row.position_base for row in sampled]))
    if temperature.any():
        assert field("keys")[: 2 * s].tolist() == keys.reshape(-1).tolist()


def test_shared_splits_are_packed_and_cleared() -> None:
    rows = make_rows([1, 1, 1], [40, 40, 40], [1, 1, 1], np.random.default_rng(0))
    layout = Layout(4, 4, 3, 5)
    inputs = GraphInputs(torch.device("cpu"), PAGE, 63, layout.size(8))
    sharing = Sharing(np.array([[0, 1, 2, -1, -1]], np.int32), np.array([0, 32, 32], np.int32), 32)
    for given, covered, first in ((sharing, [0, 32, 32, 0], [0, 1, 2]), (None, [0] * 4, [-1])):
        inputs.send(rows, layout, given)
        assert inputs.field(layout, "covered").tolist() == covered
        items = inputs.field(layout, "items").view(3, 5)
        assert (items[1:, 0] == -1).all() and items[0, : len(first)].tolist() == first


def test_fields_do_not_overlap_and_cover_the_head() -> None:
    layout = Layout(7, 3, 2, 5)
    spans = sorted(layout.offsets.values())
    assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert layout.size(5) == spans[-1][0] + 15
