"""The work of a captured step, run without capture: padded tokens and rows, ids fed from the device, fixed addresses.
Compared with the same step through the general inputs; on a GPU also through a real graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.interface import Draw, LayerKV
from kernels.triton_ops import TritonOps
from kernels.tuning import DecodeConfig, TuningTable
from replica import noise
from replica.batch import FROM_DEVICE, Row
from replica.graphs import Key, StepGraphs
from replica.inputs import InputBuilder
from replica.model import Decoder, random_model, tiny_config
from replica.warmup import warm
from router.wire import Sampling

CONTEXT, SLOTS = 128, 12


class Ops(TritonOps):
    def prepare(self, role: str, weight: torch.Tensor) -> torch.Tensor:
        return weight


def setup(device: torch.device) -> tuple[StepGraphs, Decoder, torch.Tensor]:
    config = tiny_config("qwen3", head_dim=32, num_layers=2, vocab_size=192)
    decoder = Decoder(config, random_model(config, 0, device=device), Ops(device, table=TuningTable()), CONTEXT)
    last = torch.arange(SLOTS + 1, device=device) * 3 + 1
    kv = [LayerKV(*(torch.randn(40, 16, config.num_kv_heads, 32, device=device) for _ in range(2))) for _ in range(2)]
    graphs = StepGraphs(decoder, kv, last, page_size=16, max_context=CONTEXT, max_tokens=48, guesses=3)
    return graphs, decoder, last


def batch(counts: list[int], starts: list[int], samples: list[int]) -> list[Row]:
    rng = np.random.default_rng(len(counts))
    pages = iter(rng.permutation(39) + 1)
    rows = []
    for i, (count, start, num_samples) in enumerate(zip(counts, starts, samples, strict=True)):
        known = count > 1 or i == 1
        ids = rng.integers(0, 192, count).astype(np.int32) if known else np.array([FROM_DEVICE], np.int32)
        mine = np.array([next(pages) for _ in range(-(-(start + count) // 16))], np.int32)
        sampling = Sampling(temperature=0.0 if i % 2 else 0.9, seed=i)
        base = start + count - max(0, num_samples - 1)
        rows.append(Row(i + 2, start, ids, mine, num_samples, sampling, position_base=base))
    return rows


CASES = [
    ([1, 1, 1], [20, 0, 47], [1, 1, 1], Key("ids", False, 4, 4, CONTEXT)),
    ([1], [95], [1], Key("ids", False, 1, 1, CONTEXT)),
    ([20, 1, 7], [0, 33, 16], [0, 1, 1], Key("ids", True, 32, 16, CONTEXT, shared=True)),
    ([1, 30], [40, 0], [1, 1], Key("logits", True, 32, 48, CONTEXT)),
    ([1, 4, 2], [20, 14, 47], [1, 4, 2], Key("ids", False, 8, 8, CONTEXT, verify=True)),
    ([4], [0], [4], Key("logits", False, 4, 4, CONTEXT, verify=True)),
    ([20, 4, 1], [0, 30, 16], [0, 4, 1], Key("ids", True, 32, 16, CONTEXT, shared=True)),
]


@pytest.mark.parametrize(("counts", "starts", "samples", "key"), CASES)
def test_padding_changes_nothing(
    device: torch.device, counts: list[int], starts: list[int], samples: list[int], key: Key
) -> None:
    graphs, decoder, last = setup(device)
    rows = batch(counts, starts, samples)
    before = [(x.k.clone(), x.v.clone()) for x in graphs._kv]
    was = last.clone()
    if device.type == "cuda":
        graphs.capture([key.kind])
        assert all(torch.equal(x.k, k) and torch.equal(x.v, v) for x, (k, v) in zip(graphs._kv, before, strict=True))
        last.copy_(was)
        found = graphs.find(rows, key.kind)
        assert found is not None
        assert (found.mixed, found.bound, found.verify) == (key.mixed, key.bound, key.verify)
        out = graphs.run(rows, found)
    else:
        graphs._blank(key)
        graphs.inputs.send(graphs._single(rows), graphs._layout(key))
        out = graphs._forward(key)[: sum(samples)]
    after = [(x.k.clone(), x.v.clone()) for x in graphs._kv]
    new_last = last.clone()
    for layer, (k, v) in zip(graphs._kv, before, strict=True):
        layer.k.copy_(k), layer.v.copy_(v)
    last.copy_(was)
    inputs = InputBuilder(device, 16).build(rows)
    ids = torch.where(inputs.ids < 0, last[inputs.slots_of_tokens], inputs.ids)
    stream = decoder.hidden(ids, graphs._kv, inputs.meta, inputs.sample_rows)
    for (k, v), layer, (old_k, old_v) in zip(after, graphs._kv, before, strict=True):
        assert torch.allclose(k, layer.k, atol=1e-5) and torch.allclose(v, layer.v, atol=1e-5)
        untouched = torch.ones(40 * 16, dtype=torch.bool, device=device)
        untouched[inputs.meta.slots] = False
        assert torch.equal(k.flatten(0, 1)[untouched], old_k.flatten(0, 1)[untouched])
        assert torch.equal(v.flatten(0, 1)[untouched], old_v.flatten(0, 1)[untouched])
    if key.kind == "logits":
        assert torch.allclose(out, decoder.logits(stream, None), atol=1e-4)
        return
    sampled = [(row, j) for row in rows for j in range(row.num_samples)]
    temperature = torch.tensor([row.sampling.temperature for row, _ in sampled], device=device)
    keys = noise.keys(np.array([row.sampling.seed for row, _ in sampled], np.uint64),
                      np.array([row.position_base + j for row, j in sampled]))  # fmt: skip
    want = decoder.sample(stream, Draw(temperature, torch.from_numpy(keys).to(device)))
    assert out.tolist() == want.tolist()
    expected, at = was.clone(), 0
    for row in rows:
        if row.num_samples == 1:
            expected[row.slot] = want[at]
        at += row.num_samples
    assert torch.equal(new_last[:SLOTS], expected[:SLOTS])


@pytest.mark.parametrize("mixed", [False, True])
def test_shared_splits_change_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    """The same step with and without reading shared splits once: equal up to rounding."""
    monkeypatch.setattr("replica.graphs.longest_split", lambda longest: 64)
    monkeypatch.setattr("replica.graphs.sharing_pays", lambda saved, heads: saved > 0)
    monkeypatch.setattr("replica.graphs.SHARING_ROWS", 4)
    monkeypatch.setattr("replica.graphs.MAX_ITEMS", 3)
    monkeypatch.setattr("kernels.triton_ops.decode_attention_config", lambda *a, **k: DecodeConfig(64, 16, 1, 1))
    graphs, decoder, last = setup(device)
    rows = batch([1, 1, 1] + [9] * mixed, [70, 100, 90] + [3] * mixed, [1] * (3 + mixed))
    rows[2].pages[:4] = rows[1].pages[:4]
    if device.type == "cuda":
        graphs.capture(["logits"])
    else:
        graphs._graphs = dict.fromkeys(graphs.keys(["logits"]), (None, None))  # type: ignore[assignment]
    key = graphs.find(rows, "logits")
    assert key is not None and key.shared and key.mixed == mixed
    assert graphs._sharing is not None and graphs._sharing[1].covered.tolist() == [0, 64, 64] + [0] * mixed
    if device.type == "cuda":
        out = graphs.run(rows, key).clone()
        assert graphs.replays["shared"] == 1
    else:
        graphs._blank(key)
        graphs.inputs.send(rows, graphs._layout(key), graphs._sharing[1])
        out = graphs._forward(key)[: len(rows)]
    inputs = InputBuilder(device, 16).build(rows)
    ids = torch.where(inputs.ids < 0, last[inputs.slots_of_tokens], inputs.ids)
    want = decoder.logits(decoder.hidden(ids, graphs._kv, inputs.meta, inputs.sample_rows), None)
    assert torch.allclose(out, want, atol=1e-4)


def test_warming_touches_no_page(device: torch.device) -> None:
    graphs, decoder, _ = setup(device)
    before = [(x.k.clone(), x.v.clone()) for x in graphs._kv]
    warm(decoder, graphs._kv, 16, CONTEXT, sizes=(2,))
    if device.type == "cuda":
        compiled = decoder.ops.compiled
        assert compiled > 10
        warm(decoder, graphs._kv, 16, CONTEXT, sizes=(2,))
        assert decoder.ops.compiled == compiled
    assert all(torch.equal(x.k, k) and torch.equal(x.v, v) for x, (k, v) in zip(graphs._kv, before, strict=True))


def test_find_refuses_what_no_graph_holds(device: torch.device) -> None:
    graphs, *_ = setup(device)
    for rows in (batch([49], [0], [1]), batch([1, 1], [5, 5], [1, 1])):
        assert graphs.find(rows, "ids") is None  # nothing is captured yet
    keys = list(graphs.keys(["ids"]))
    assert len(keys) == len(set(keys)) and keys[0].tokens == 48
    assert {k.rows for k in keys if not k.mixed and not k.verify} == {1, 2, 4, 8, 12}
    assert {k.rows for k in keys if k.verify} == {2, 4, 8, 16, 24, 32, 40, 48}


def test_find_takes_the_smallest_graph_for_guesses(device: torch.device) -> None:
    graphs, *_ = setup(device)
    graphs._graphs = dict.fromkeys(graphs.keys(["ids"]), (None, None))  # type: ignore[assignment]
    assert graphs.find(batch([1, 4], [20, 5], [1, 4]), "ids") == Key("ids", False, 8, 8, CONTEXT, verify=True)
    assert graphs.find(batch([2], [126], [2]), "ids") == Key("ids", False, 2, 2, CONTEXT, verify=True)
    mixed = graphs.find(batch([30, 4], [0, 5], [0, 4]), "ids")
    assert mixed is not None and (mixed.tokens, mixed.rows, mixed.mixed) == (48, 16, True)
    assert graphs.find(batch([6], [5], [4]), "ids") is None  # samples in the middle of a chunk
    assert graphs.find(batch([4], [126], [4]), "ids") is None  # beyond the longest context


def test_guesses_of_one_request_share_its_context(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.graphs.longest_split", lambda longest: 32)
    monkeypatch.setattr("replica.graphs.sharing_pays", lambda saved, heads: saved > 0)
    monkeypatch.setattr("replica.graphs.SHARING_ROWS", 4)
    graphs, *_ = setup(device)
    graphs._graphs = dict.fromkeys(graphs.keys(["ids"]), (None, None))  # type: ignore[assignment]
    rows = batch([1, 4], [20, 70], [1, 4])
    assert graphs.find(rows, "ids") == Key("ids", False, 8, 8, CONTEXT, shared=True, verify=True)
    assert graphs._sharing is not None and graphs._sharing[0] is rows
    assert graphs._sharing[1].covered.tolist() == [0, 64, 64, 64, 64]


def test_find_splits_one_long_context_although_the_rows_fill_the_chip(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.graphs.UNSPLIT_PROGRAMS", 16)
    graphs, *_ = setup(device)
    graphs._graphs = dict.fromkeys(graphs.keys(["ids"]), (None, None))  # type: ignore[assignment]
    even, uneven = batch([1] * 8, [30] * 8, [1] * 8), batch([1] * 8, [126] + [5] * 7, [1] * 8)
    monkeypatch.setattr("replica.graphs.uneven_contexts", lambda total, longest, heads: total < 8 * longest)
    assert graphs.find(even, "ids") == Key("ids", False, 8, 8, CONTEXT)
    assert graphs.find(uneven, "ids") == Key("ids", False, 8, 8, CONTEXT, uneven=True)
    assert graphs.find(batch([1] * 4, [30] * 4, [1] * 4), "ids") == Key("ids", False, 4, 4, CONTEXT)
