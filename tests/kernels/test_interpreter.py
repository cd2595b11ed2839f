"""Runs ``device/`` under Triton's interpreter, in a process of its own: the switch is read at Triton's import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run compiled here")
def test_every_kernel_under_the_interpreter() -> None:
    cores = min(4, len(os.sched_getaffinity(0)))
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    # The interpreter multiplies with numpy. In OpenBLAS's kernels for Haswell and Zen a row's last bits depend on where
    # in its tile it is, which no GPU's product does; in its oldest they don't, and tiles this small take no longer.
    env["OPENBLAS_CORETYPE"] = "Prescott"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", str(cores), "-p", "no:cacheprovider", "-W", "ignore",
         "tests/kernels/device"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed.group(1)) > 90, done.stdout[-500:]
