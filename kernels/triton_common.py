"""What all Triton kernels here share: launching, and programmatic dependent launch (PDL).

PDL lets a kernel start while the one before it still runs. Two independent settings per launch:

* ``pdl``: this kernel may start early. It must execute ``pdl_wait`` before its first read of anything the kernel
  before it wrote, and before any write. Weights, block tables and lengths are not written inside a step, so their
  loads may come first.
* ``trigger``: when *this* kernel lets the next one start: ``AT_END`` (implicit), ``AT_START``, ``AFTER_LOOP``.

Every kernel launched with ``pdl`` waits in at least one of its programs, so "finished" stays transitive along the
stream and buffers may be reused as if nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlc

AT_END, AT_START, AFTER_LOOP = 0, 1, 2


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    if PDL:
        tlc.gdc_wait()


@triton.jit
def pdl_trigger(TRIGGER: tl.constexpr, HERE: tl.constexpr):
    if TRIGGER == HERE:
        tlc.gdc_launch_dependents()


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def load_stream(ptr, mask, MASKED: tl.constexpr):
    """A tile that is read once per step (weights): first to leave the cache."""
    if MASKED:
        return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(ptr, eviction_policy="evict_first")


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class Launcher:
    """Launches kernels, or only compiles them (``compile_only``: what a worker process of the warm-up does).

    ``pdl_available`` is False under the interpreter and on devices older than sm_90, where the flags must be off."""

    def __init__(self, device: torch.device, compile_only: bool = False) -> None:
        self.compile_only = compile_only
        self.pdl_available = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.launches = 0

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *args: Any,
        pdl: bool = False,
        trigger: int | None = None,
        **constants: Any,
    ) -> None:
        """``trigger`` None: the kernel has no TRIGGER argument."""
        pdl = pdl and self.pdl_available
        if trigger is not None:
            constants["TRIGGER"] = trigger if self.pdl_available else AT_END
        self.launches += 1
        if self.compile_only:
            kernel.warmup(*args, PDL=pdl, launch_pdl=pdl, grid=grid, **constants)
        else:
            kernel[grid](*args, PDL=pdl, launch_pdl=pdl, **constants)


Launch = Callable[..., None]
