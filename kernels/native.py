"""``native*.c``, compiled for this machine when they are first asked for.

The compiler is GCC, whose OpenMP is the one in torch's CPU wheels, so that both share one team of threads. The library
is built into a temporary directory (five seconds of one core), so it always fits the processor and the source.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

SOURCES = tuple(Path(__file__).with_name(f"native{part}.c") for part in ("", "_products", "_attention"))
FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
WIDE, NARROW = ("-O3",), ("-O2",)
"""With registers of 16 floats, and without: unrolled loops of vectors that are spread over two take GCC 12 minutes."""
COMPILER = "gcc"
_LONG, _FLOAT, _INT, _AT = ctypes.c_long, ctypes.c_float, ctypes.c_int, ctypes.c_void_p
_SIGNATURES = {
    "ew_product": (_AT,),
    "ew_norm": (_AT, _AT, _FLOAT, _LONG, _LONG, _AT),
    "ew_gate": (_AT, _LONG, _LONG, _AT),
    "ew_largest": (_AT, _LONG, _LONG, _AT, _AT),
    "ew_attention": (_AT,) * 8,
    "ew_layers": (_AT, _LONG, _AT, _AT, _AT),
}


class Unavailable(RuntimeError):
    """The library can't be had here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL | Unavailable:
    """Built once per process; the same answer from then on."""
    try:
        return build()
    except Unavailable as error:
        return error


def build(machine: str = "native", sources: Sequence[Path] = SOURCES) -> ctypes.CDLL:
    """``machine``: what GCC's ``-march`` takes. Raises Unavailable."""
    wide = machine == "native" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise Unavailable(f"there is no {COMPILER} to compile native kernels")
    try:
        with TemporaryDirectory(prefix="everwarm-native-") as folder:
            found = _compile(compiler, wide, machine, sources, Path(folder, "native.so"))
    except OSError as error:
        raise Unavailable(f"no temporary directory to compile native kernels in: {error}") from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    found.ew_has_codes.argtypes, found.ew_has_codes.restype = (), _INT
    return found


def _compile(compiler: str, wide: bool, machine: str, sources: Sequence[Path], target: Path) -> ctypes.CDLL:
    flags = [*(WIDE if wide else NARROW), *FLAGS, f"-march={machine}"]
    command = [compiler, *flags, "-o", str(target), *map(str, sources)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} did not run: {error}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise Unavailable(f"{compiler} failed: {first.strip()}")
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise Unavailable(f"what {compiler} made can't be loaded: {error}") from None
