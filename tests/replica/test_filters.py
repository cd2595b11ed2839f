"""Floors and penalties against transformers' logits processors; the short list against the exact search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from replica.batch import Row
from replica.filters import Filters, floors, short
from replica.logit_edits import LogitEdits
from replica.sampler import Sampler, apply_bitmask
from router.wire import Sampling

transformers = pytest.importorskip("transformers")
VOCAB = 1000
SETTINGS = list(itertools.product((0, 1, 5, 50, 300, VOCAB), (1.0, 0.95, 0.5, 0.05), (0.0, 0.02, 0.3)))


def _logits(scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(len(SETTINGS), VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def _filters() -> Filters:
    k, p, m = zip(*SETTINGS, strict=True)
    return Filters(torch.tensor(k), torch.tensor(p), torch.tensor(m))


def _theirs(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    from transformers.generation import logits_process as lp

    scores = row[None]
    if min_p:
        scores = lp.MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = lp.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = lp.TopPLogitsWarper(top_p)(None, scores)
    return scores[0] > float("-inf")


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_floors_keep_what_transformers_keeps(scale: float) -> None:
    logits = _logits(scale)
    kept = logits >= floors(logits, _filters(), VOCAB)
    for i, setting in enumerate(SETTINGS):
        theirs = _theirs(logits[i], *setting)
        # A sum that lands on top_p within rounding may go either way, by one token.
        assert int((kept[i] ^ theirs).sum()) <= (1 if 0 < setting[1] < 1 else 0), setting
        assert bool(kept[i].any())


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [0.0, 1e-46, 1e-30])
def test_a_tiny_top_p_leaves_the_likeliest_token(top_p: float, top_k: int) -> None:
    """1e-46 is 0 in fp32."""
    logits = _logits(1.0)[:3]
    one = torch.ones(3)
    filters = Filters(one.long() * top_k, one * top_p, one * 0.0)
    kept = logits >= floors(logits, filters, top_k)
    assert kept.sum(-1).tolist() == [1, 1, 1]
    assert torch.equal(kept.int().argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_short_list_agrees_where_it_is_certain(scale: float) -> None:
    logits = _logits(scale, seed=1)
    exact = logits >= floors(logits, _filters(), VOCAB)
    values, ids, certain = short(logits, _filters())
    for i in range(len(SETTINGS)):
        if certain[i]:
            listed = ids[i][values[i] > float("-inf")]
            assert sorted(listed.tolist()) == exact[i].nonzero().flatten().tolist(), SETTINGS[i]
    assert certain.any() and (scale > 1 or not certain.all())


def test_ties_at_the_floor_stay() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, :10] = 1.0
    filters = Filters(torch.tensor([3, 3]), torch.tensor([1.0, 0.5]), torch.zeros(2))
    assert (logits >= floors(logits, filters, 3)).sum(-1).tolist() == [10, 10]
    values, _, certain = short(logits, filters)
    assert certain.all() and (values > float("-inf")).sum(-1).tolist() == [10, 10]


def test_a_rows_floor_does_not_depend_on_its_neighbours() -> None:
    logits = _logits(1.0, seed=2)
    together = floors(logits, _filters(), VOCAB)
    for i, (k, p, m) in enumerate(SETTINGS):
        one = Filters(torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))
        assert torch.equal(floors(logits[i : i + 1], one, k), together[i : i + 1])


def test_short_list_and_exact_search_draw_the_same_token() -> None:
    """The sampler takes the short list or the exact search as it sees fit; the draw must not show which."""
    sampler = Sampler(VOCAB, 1, torch.device("cpu"))
    logits = _logits(4.0, seed=3)
    keys = torch.randint(-(2**31), 2**31, (len(SETTINGS), 2), generator=torch.Generator().manual_seed(4)).to(
        torch.int32
    )
    options = [Sampling(top_k=k, top_p=p, min_p=m) for k, p, m in SETTINGS]
    drawn = sampler._draw_filtered(logits, keys, options)
    exact = sampler._draw_floored(logits, keys, _filters(), VOCAB)
    assert int((drawn != exact).sum()) == 0


def _penalised(logits: torch.Tensor, history: list[int], num_prompt: int, sampling: Sampling) -> torch.Tensor:
    edits = LogitEdits(VOCAB, torch.device("cpu"))
    ids = np.array(history, np.int32)
    edits.begin(Row(0, 0, ids, ids, 1, sampling, True, ids, num_prompt))
    entry = edits.get(0)
    assert entry is not None
    out = logits.clone()[None]
    edits.penalise(out, [0], [entry], [torch.empty(0, dtype=torch.int64)])
    return out[0]


def test_repetition_penalty_equals_transformers() -> None:
    from transformers.generation import logits_process as lp

    logits = _logits(3.0)[0]
    history = [1, 5, 5, 900, 17, 5]
    for penalty in (0.5, 1.3):
        theirs = lp.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits[None])[0]
        ours = _penalised(logits, history, 3, Sampling(repetition_penalty=penalty))
        torch.testing.assert_close(ours, theirs)


def test_frequency_and_presence_count_the_output_only() -> None:
    logits = _logits(3.0)[1]
    ours = _penalised(logits, [1, 5, 7, 5, 5, 9], 3, Sampling(frequency_penalty=0.5, presence_penalty=0.25))
    expected = logits.clone()
    expected[5] -= 2 * 0.5 + 0.25
    expected[9] -= 0.5 + 0.25
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("vocab", [1000, 1024, 33, 7])
def test_bitmask_is_low_bit_first(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    allowed = rng.random((3, vocab)) < 0.3
    padded = np.zeros((3, -(-vocab // 32) * 32), np.uint8)
    padded[:, :vocab] = allowed
    mask = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = torch.zeros(3, vocab)
    apply_bitmask(logits, mask)
    assert np.array_equal((logits == 0).numpy(), allowed)


@pytest.mark.parametrize("vocab", [512, 1000, 49152, 7, 48])
def test_argmax_in_blocks_takes_the_first_of_equals(vocab: int) -> None:
    sampler = Sampler(vocab, 1, torch.device("cpu"))
    logits = torch.randint(0, 6, (9, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    logits[0] = float("-inf")
    expected = [int(np.argmax(row)) for row in logits.numpy()]
    assert sampler._argmax(logits).tolist() == expected
