"""Sampling noise: a function of (seed, position, token) alone, with the right distribution and no visible structure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replica import noise

EULER = 0.5772156649
IDS = torch.arange(20_000, dtype=torch.int32)


def _keys(seeds: object, positions: object) -> torch.Tensor:
    return torch.from_numpy(noise.keys(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64)))


def test_known_values() -> None:
    """Pinned: a change here changes every seeded output that users have recorded."""
    keys = _keys([0, 1, 2**64 - 1], [0, 7, 131071])
    assert keys.tolist() == PINNED_KEYS
    assert noise.gumbel(keys, torch.tensor([0, 1, 49151], dtype=torch.int32)).flatten().tolist() == pytest.approx(
        PINNED_NOISE, rel=1e-5
    )


def test_it_depends_on_nothing_but_seed_position_and_token() -> None:
    keys = _keys(range(8), [100] * 8)
    whole = noise.gumbel(keys, IDS)
    some = torch.tensor([[5, 19_999, 0]], dtype=torch.int32).expand(8, -1)
    assert torch.equal(noise.gumbel(keys, some), whole[:, [5, 19_999, 0]])
    assert torch.equal(noise.gumbel(keys[3:4], IDS)[0], whole[3])
    assert torch.equal(noise.gumbel(keys.flip(0), IDS).flip(0), whole)


@pytest.mark.parametrize("which", ["seeds", "positions"])
def test_distribution_is_gumbel(which: str) -> None:
    keys = _keys(range(50), [9] * 50) if which == "seeds" else _keys([9] * 50, range(50))
    drawn = noise.gumbel(keys, IDS).double()
    assert float(drawn.mean()) == pytest.approx(EULER, abs=0.005)
    assert float(drawn.var()) == pytest.approx(np.pi**2 / 6, rel=0.01)
    uniform = (-(-drawn).exp()).exp().flatten()
    counts = torch.histc(uniform.float(), 100, 0, 1).double()
    expected = uniform.numel() / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 99 + 5 * (2 * 99) ** 0.5
    assert bool(drawn.isfinite().all()) and float(drawn.max()) > 11


def test_neighbours_are_uncorrelated() -> None:
    for keys in (
        _keys(range(64), [5] * 64),
        _keys([5] * 64, range(64)),
        _keys(2 ** np.arange(64, dtype=np.uint64), [0] * 64),
    ):
        drawn = noise.gumbel(keys, IDS)
        rows = torch.corrcoef(drawn).fill_diagonal_(0)
        assert float(rows.abs().max()) < 6 / len(IDS) ** 0.5
        for shift in (1, 2, 256):
            pair = torch.stack((drawn[:, :-shift].flatten(), drawn[:, shift:].flatten()))
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 6 / pair.shape[1] ** 0.5


def test_draws_follow_the_probabilities() -> None:
    probs = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2, 0)
    count = 200_000
    scores = probs.log() + noise.gumbel(_keys([3] * count, range(count)), IDS[:50])
    observed = torch.bincount(scores.argmax(-1), minlength=50).double()
    expected = probs.double() * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 49 + 5 * (2 * 49) ** 0.5


def test_extremes_stay_finite() -> None:
    """The hash's image includes the words whose uniform rounds to 0 or 1."""
    words = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    negative = words.bitwise_or(noise._SIGN_AND_ONE).to(torch.float32) * noise._BELOW_ONE
    assert bool(((negative > -1) & (negative < 0)).all())
    assert bool((-(-negative.log1p()).log()).isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same() -> None:
    keys = _keys(range(16), range(16))
    cpu, gpu = noise.gumbel(keys, IDS), noise.gumbel(keys.cuda(), IDS.cuda()).cpu()
    torch.testing.assert_close(gpu, cpu, rtol=1e-5, atol=1e-6)


PINNED_KEYS = [[1293516399, -1492722385], [1993957563, 1060707466], [-839366966, -747865467]]
PINNED_NOISE = [0.271981, 0.083352, 0.014167, -0.32119, -0.645211, -0.759705, 0.681129, 2.076113, -1.266747]
