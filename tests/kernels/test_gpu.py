"""On a GPU, in bf16, at real shapes: every regime against fp32 torch, bitwise equalities, and what graphs rely on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from kernels.bench_step import EPS, MODELS, Step, capture, repack  # noqa: E402
from kernels.interface import LayerKV, Stream  # noqa: E402
from kernels.reference import TorchOps  # noqa: E402
from kernels.triton_ops import TritonOps  # noqa: E402

DEVICE = torch.device("cuda")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def small(name: str, batch: int, context: int, page: int = 16) -> Step:
    torch.manual_seed(batch * 1000 + context)
    return Step(replace(MODELS[name], layers=2, vocab=4096 if name != "smollm2" else 1024), batch, context, page)


def in_fp32(step: Step) -> Step:
    """The same weights, caches and batch, upcast."""
    up = Step.__new__(Step)
    up.__dict__.update(step.__dict__)
    up.layers = [tuple(t.float() for t in layer) for layer in step.layers]
    up.final, up.head, up.embedding = step.final.float(), step.head.float(), step.embedding.float()
    up.kv = [LayerKV(kv.k.float(), kv.v.float()) for kv in step.kv]
    return up


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("batch", [1, 2, 16, 17, 32, 64, 72, 256])
def test_decode_is_as_close_to_fp32_as_bf16_allows(name: str, batch: int) -> None:
    step = small(name, batch, 150, page=64 if batch == 17 else 16)
    reference = in_fp32(step)
    want = reference.hidden(TorchOps(DEVICE, torch.float32)).h
    ops = TritonOps(DEVICE)
    got = step.hidden(ops)
    assert error(got.h, want) < 1e-2
    for mine, theirs in zip(step.kv, reference.kv, strict=True):
        assert error(mine.k, theirs.k) < 5e-3 and error(mine.v, theirs.v) < 5e-3
    logits = ops.norm_logits(got, None, step.final, EPS, step.head)
    plain = Stream(got.h.float())
    plain = Stream(got.h.float())
    exact = TorchOps(DEVICE, torch.float32).norm_logits(plain, None, reference.final, EPS, reference.head)
    assert error(logits, exact) < 1e-2
    ids = ops.norm_sample(got, None, step.final, EPS, step.head).long()
    picked = exact.gather(1, ids[:, None])[:, 0]
    assert ((exact.amax(-1) - picked) < 0.02 * exact.std(-1)).all()
    ops.workspace.check_invariants()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("new", "prefix"), [
    ([300, 1, 40, 1], [0, 500, 130, 15]), ([5, 5, 5], [0, 63, 64]), ([1, 1, 70], [599, 0, 530]), ([513], [64]),
    ([16, 37], [16, 16]), ([300, 64], [300, 8]),
])  # fmt: skip
def test_mixed_batches(name: str, new: list[int], prefix: list[int]) -> None:
    step = small(name, len(new), 610)
    repack(step, new, prefix)
    want = in_fp32(step).hidden(TorchOps(DEVICE, torch.float32)).h
    assert error(step.hidden(TritonOps(DEVICE)).h, want) < 1e-2


@pytest.mark.parametrize("name", ["0.6b", "smollm2", "8b"])
def test_deterministic_mode_is_bitwise(name: str) -> None:
    """Decoded alone, decoded in a crowd, and computed inside prefill chunks of any cut: the same bits."""
    ops = TritonOps(DEVICE, deterministic=True)
    step = small(name, 3, 200)
    repack(step, [150, 1, 37], [0, 180, 90])
    ids, meta = step.ids, step.meta
    kv = [LayerKV(x.k.clone(), x.v.clone()) for x in step.kv]
    together = step.hidden(ops).h.clone()
    whole = [(x.k.clone(), x.v.clone()) for x in step.kv]
    step.kv, step.batch = kv, 1
    for cuts in ([0, 1, 2, 80, 150], [0, 64, 65, 150]):
        rows = []
        for a, b in itertools.pairwise(cuts):
            step.meta = replace(meta, block_table=meta.block_table[:1])
            repack(step, [b - a], [a])
            step.ids = ids[a:b]
            rows.append(step.hidden(ops).h)
        assert torch.equal(torch.cat(rows), together[:150])
        for (k, v), now in zip(whole, step.kv, strict=True):
            first = meta.block_table[0, : 150 // 16].long()
            assert torch.equal(k[first], now.k[first]) and torch.equal(v[first], now.v[first])
    for r, (at, rows) in enumerate(((0, None), (150, 1), (151, None))):
        if rows:
            step.meta = replace(meta, block_table=meta.block_table[r : r + 1])
            repack(step, [1], [180])
            step.ids = ids[at : at + 1]
            assert torch.equal(step.hidden(ops).h[0], together[at])


def test_row_zero_does_not_depend_on_neighbours_contents() -> None:
    """Default mode: the same batch size, other neighbours; padded rows on the null page change nothing."""
    ops = TritonOps(DEVICE)
    step = small("0.6b", 8, 150)
    a = step.hidden(ops).h.clone()
    step.ids[1:] = 5
    step.meta.kv_len[3:], step.meta.block_table[3:], step.meta.slots[3:] = 1, 0, 0
    b = step.hidden(ops).h
    assert torch.equal(a[0], b[0])


def test_graph_replay_equals_eager_and_writes_only_its_slots() -> None:
    for batch in (1, 4, 32):
        ops, step = TritonOps(DEVICE), small("0.6b", batch, 150)
        before = [(x.k.clone(), x.v.clone()) for x in step.kv]
        eager = step.hidden(ops).h.clone()
        out = {}
        graph = capture(lambda step=step, ops=ops, out=out: out.update(h=step.hidden(ops).h))
        out["h"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out["h"], eager)
        for (k, v), now in zip(before, step.kv, strict=True):
            mine = torch.zeros(k.shape[0] * k.shape[1], dtype=torch.bool, device=DEVICE)
            mine[step.meta.slots] = True
            for old, new in ((k, now.k), (v, now.v)):
                assert torch.equal(old.flatten(0, 1)[~mine], new.flatten(0, 1)[~mine])
