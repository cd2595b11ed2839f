"""Matrix products with fused work, against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import close, gated, rms_norm

from kernels.triton_common import Launcher
from kernels.triton_gated import descriptor, gated_gemm
from kernels.triton_gemm import SplitWorkspace, skinny_gemm
from kernels.triton_gemv import gemv
from kernels.tuning import GemmConfig

EPS = 1e-6


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "bn", "bk"),
    [(64, 128, 16, 64), (48, 72, 4, 64), (33, 96, 8, 64), (5, 200, 2, 128)],
)
def test_gemv(device: torch.device, n: int, k: int, bn: int, bk: int, norm: bool, is_gated: bool) -> None:
    launch = Launcher(device)
    x = torch.randn(1, k, device=device)
    w = torch.randn(2 * n if is_gated else n, k, device=device) * 0.2
    g = torch.rand(k, device=device) + 0.5
    res = None if is_gated else torch.randn(1, n, device=device)
    bias = torch.randn(n, device=device) if not is_gated and norm else None
    y = torch.empty(1, n, device=device)
    config = GemmConfig("gemv", bn=bn, bk=bk, stages=1, pdl=True, trigger=2)
    gemv(launch, config, x, w, y, norm=g if norm else None, eps=EPS, bias=bias, residual=res, gated=is_gated)
    xin = rms_norm(x, g) if norm else x.double()
    if is_gated:
        want = gated(xin, w)
    else:
        want = xin @ w.double().T + res.double()
        if bias is not None:
            want += bias
    close(y, want)


@pytest.mark.parametrize("m", [5, 17])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("form", ["plain", "bias", "norm", "gated"])
def test_skinny(device: torch.device, m: int, swap: bool, split: int, form: str) -> None:
    n, k = 64, 128
    launch, workspace = Launcher(device), SplitWorkspace(device)
    x = torch.randn(m, k, device=device)
    g = torch.rand(k, device=device) + 0.5
    is_gated = form == "gated"
    w = torch.randn(2 * n if is_gated else n, k, device=device) * 0.2
    y = torch.empty(m, n, device=device)
    bias = torch.randn(n, device=device) if form == "bias" else None
    sumsq = (x * x).view(m, 4, -1).sum(-1) if form in ("norm", "gated") else None
    config = GemmConfig("dot", bn=16, bk=32, stages=2, swap=swap, split=split)
    skinny_gemm(launch, config, workspace, x if sumsq is None else x * g, w, y, eps=EPS, sumsq=sumsq, gated=is_gated,
                bias=bias)  # fmt: skip
    xin = x.double() if sumsq is None else rms_norm(x, g)
    want = gated(xin, w) if is_gated else xin @ w.double().T
    close(y, want if bias is None else want + bias)
    workspace.check_invariants()


@pytest.mark.parametrize("m", [2, 19])
@pytest.mark.parametrize("split", [1, 2])
def test_skinny_residual_leaves_the_next_norm_ready(device: torch.device, m: int, split: int) -> None:
    n, k = 48, 64
    launch, workspace = Launcher(device), SplitWorkspace(device)
    x, res = torch.randn(m, k, device=device), torch.randn(m, n, device=device)
    w, g = torch.randn(n, k, device=device) * 0.2, torch.rand(n, device=device) + 0.5
    y, scaled = torch.empty(m, n, device=device), torch.empty(m, n, device=device)
    sumsq = torch.empty(m, n // 16, device=device)
    config = GemmConfig("dot", bn=16, bk=32, stages=2, split=split)
    skinny_gemm(launch, config, workspace, x, w, y, residual=res, next_norm=g, scaled=scaled, sumsq_out=sumsq)
    want = x.double() @ w.double().T + res.double()
    close(y, want)
    close(scaled, want * g)
    close(sumsq.sum(-1), (want * want).sum(-1))
    close(scaled * torch.rsqrt(sumsq.sum(-1, keepdim=True) / n + EPS), rms_norm(want, g))


def test_split_k_is_deterministic_and_reuses_its_counters(device: torch.device) -> None:
    launch, workspace = Launcher(device), SplitWorkspace(device)
    x, w = torch.randn(5, 256, device=device), torch.randn(32, 256, device=device)
    config = GemmConfig("dot", bn=16, bk=32, stages=2, split=4)
    first = torch.empty(5, 32, device=device)
    skinny_gemm(launch, config, workspace, x, w, first)
    for _ in range(3):
        again = torch.empty(5, 32, device=device)
        skinny_gemm(launch, config, workspace, x, w, again)
        assert torch.equal(again, first)


@pytest.mark.parametrize("m", [1, 16, 37])
def test_gated_prefill(device: torch.device, m: int) -> None:
    n, k = 64, 64
    a = torch.randn(m, k, device=device)
    w = torch.randn(2 * n, k, device=device) * 0.2
    y = torch.empty(m, n, device=device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, w, y = a.to(dtype), w.to(dtype), y.to(dtype)
    gated_gemm(Launcher(device), a, descriptor(w, 16, 32), y, programs=3, tile=(16, 16, 32))
    close(y, gated(a, w), 2e-5 if dtype == torch.float32 else 8e-3)
