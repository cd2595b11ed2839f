"""Choosing ids from tiles, with and without noise, against the definition in plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import Draw
from kernels.triton_common import Launcher
from kernels.triton_gemm import SplitWorkspace, skinny_gemm
from kernels.triton_gemv import gemv
from kernels.triton_sampling import best_tile, sample_logits
from kernels.tuning import GemmConfig


def reference_noise(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """Wellons' lowbias32 over the token id, keyed twice, in 64-bit integers; then Gumbel in float64."""
    k = keys.cpu().long() & 0xFFFFFFFF
    x = ((torch.arange(vocab) * 0x9E3779B1) & 0xFFFFFFFF)[None] ^ k[:, :1]
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = (x ^ (x >> 15)) ^ k[:, 1:]
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    negative = ((x | 0x80000001) - (1 << 32)).float() * ((1 - 2.0**-24) * 2.0**-31)
    return -torch.log(-torch.log1p(negative.double()))


def check(ids: torch.Tensor, logits: torch.Tensor, draw: Draw | None) -> None:
    """Equal to the reference, except where it cannot tell its two best apart in fp32."""
    values = logits.double().cpu()
    if draw is not None and draw.temperature is not None:
        t = draw.temperature.double().cpu()[:, None]
        noisy = values / t.clamp_min(1e-9) + reference_noise(draw.keys, logits.shape[1])
        values = torch.where(t > 0, noisy, values)
    top = values.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-4
    assert clear.float().mean() > 0.9
    assert torch.equal(ids.cpu().long()[clear], values.argmax(-1)[clear])


def draw_for(m: int, device: torch.device) -> Draw:
    temperature = torch.rand(m, device=device) + 0.3
    temperature[::3] = 0
    keys = torch.randint(-(2**31), 2**31, (m, 2), device=device).int()
    last = torch.full((40,), 7, dtype=torch.int64, device=device)
    return Draw(temperature, keys, last, torch.randperm(40, device=device)[:m].int())


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("m", [3, 17])
def test_head_of_several_rows(device: torch.device, m: int, noise: bool) -> None:
    launch, workspace = Launcher(device), SplitWorkspace(device)
    x, w = torch.randn(m, 32, device=device), torch.randn(96, 32, device=device)
    values, index = torch.empty(m, 3, device=device), torch.empty(m, 3, dtype=torch.int32, device=device)
    draw = draw_for(m, device) if noise else None
    skinny_gemm(launch, GemmConfig("dot", bn=32, bk=32, stages=2), workspace, x, w, values, index=index, draw=draw)
    ids = best_tile(launch, values, index, draw)
    check(ids, x.double() @ w.double().T, draw)
    if draw is not None:
        assert torch.equal(draw.last[draw.slots.long()], ids.long())
        others = torch.ones(40, dtype=torch.bool)
        others[draw.slots.long().cpu()] = False
        assert (draw.last.cpu()[others] == 7).all()


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("n", [64, 61])
def test_head_of_one_row(device: torch.device, n: int, noise: bool) -> None:
    launch = Launcher(device)
    x, w = torch.randn(1, 64, device=device), torch.randn(n, 64, device=device)
    values = torch.empty(1, -(-n // 16), device=device)
    index = torch.empty(1, -(-n // 16), dtype=torch.int32, device=device)
    draw = draw_for(2, device) if noise else None
    if draw is not None:
        draw = Draw(draw.temperature[1:], draw.keys[1:].clone())
    gemv(launch, GemmConfig("gemv", bn=16, bk=64), x, w, values, index=index, draw=draw)
    check(best_tile(launch, values, index, draw), x.double() @ w.double().T, draw)


@pytest.mark.parametrize("noise", [False, True])
def test_logits_of_another_product(device: torch.device, noise: bool) -> None:
    logits = torch.randn(4, 5000, device=device) * 3
    draw = draw_for(4, device) if noise else None
    check(sample_logits(Launcher(device), logits, draw), logits, draw)


def test_the_lowest_of_equals(device: torch.device) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[0, 4500] = logits[0, 8200] = 1
    assert sample_logits(Launcher(device), logits, None).tolist() == [4500, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_not_finite_spoils_its_row_only(device: torch.device, bad: float) -> None:
    launch, workspace = Launcher(device), SplitWorkspace(device)
    x, w = torch.randn(3, 32, device=device), torch.randn(64, 32, device=device)
    x[1, 5] = bad
    values, index = torch.empty(3, 2, device=device), torch.empty(3, 2, dtype=torch.int32, device=device)
    skinny_gemm(launch, GemmConfig("dot", bn=32, bk=32, stages=2), workspace, x, w, values, index=index)
    ids = best_tile(launch, values, index, None).tolist()
    assert ids[1] == -1 and ids[0] >= 0 and ids[2] >= 0


def test_noise_is_spread_like_gumbel(device: torch.device) -> None:
    """Drawn ids follow the softmax: chi-square over 20000 keys, 8 tokens."""
    if device.type != "cuda":
        pytest.skip("minutes under the interpreter; the noise itself is compared bit by bit above")
    n = 20000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 0.0, 1.5], device=device).repeat(n, 1)
    keys = torch.randint(-(2**31), 2**31, (n, 2), device=device).int()
    ids = sample_logits(Launcher(device), logits, Draw(torch.ones(n, device=device), keys))
    seen = torch.bincount(ids.long().cpu(), minlength=8).double()
    want = torch.softmax(logits[0].double().cpu(), -1) * n
    assert ((seen - want) ** 2 / want).sum() < 24.3, (seen, want)  # p = 0.001 at 7 degrees of freedom
