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


def _trait(arg: Any, fixed: bool) -> Any:
    """What Triton specializes a kernel on, for one argument: types, alignment to 16 bytes, integers that are 1 or
    multiples of 16. ``fixed``: the kernel is not specialized on its value or alignment."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype if fixed else (arg.dtype, arg.data_ptr() % 16 == 0)
    if isinstance(arg, int):
        return -(2**31) <= arg < 2**31 if fixed else (arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31)
    if isinstance(arg, float):
        return None
    return tuple(arg.block_shape)


class _Compiled:
    """A compiled kernel and the constants that follow its arguments."""

    def __init__(self, kernel: Any, compiled: Any, num_args: int, constants: dict[str, Any]) -> None:
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.tail = tuple(constants[name] for name in kernel.arg_names[num_args:])


class Launcher:
    """Launches kernels, or only compiles them (``compile_only``: what a worker process of the warm-up does).

    ``pdl_available`` is False under the interpreter and on devices older than sm_90, where the flags must be off.
    Triton's own launch binds and hashes every argument again, 80 us of host time for ours; a launch seen before goes
    straight to the compiled kernel. Single-threaded, like the stream it launches on."""

    def __init__(self, device: torch.device, compile_only: bool = False) -> None:
        cuda = device.type == "cuda"
        self.compile_only = compile_only
        self.pdl_available = cuda and torch.cuda.get_device_capability(device) >= (9, 0)
        self.launches = 0
        self._device = device
        self._direct = cuda and not compile_only
        self._seen: dict[Any, _Compiled] = {}
        self._fixed: dict[Any, tuple[bool, ...]] = {}

    @property
    def compiled(self) -> int:
        """Distinct compiled kernels launched so far: stays what it is once everything is warm."""
        return len(self._seen)

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
        constants["PDL"] = pdl
        self.launches += 1
        if self.compile_only:
            kernel.warmup(*args, launch_pdl=pdl, grid=grid, **constants)
        elif self._direct:
            self._launch(kernel, grid, args, constants)
        else:
            kernel[grid](*args, **constants)

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        fixed = self._fixed.get(kernel)
        if fixed is None:
            fixed = tuple(p.do_not_specialize or p.do_not_specialize_on_alignment for p in kernel.params)
            self._fixed[kernel] = fixed
        key = (kernel, *map(_trait, args, fixed), *constants.values())
        found = self._seen.get(key)
        if found is None:
            compiled = kernel[grid](*args, launch_pdl=constants["PDL"], **constants)
            self._seen[key] = _Compiled(kernel, compiled, len(args), constants)
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        x, y, z = (*grid, 1, 1)[:3]
        found.run(x, y, z, stream, found.function, found.metadata, None, None, None, *args, *found.tail)


Launch = Callable[..., None]
