"""What is left to the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_of(package: str) -> Iterator[list[str]]:
    """The list gets the types of ``package`` whose objects became unreachable inside, but not free: those of cycles."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [str(type(thing)) for thing in gc.garbage if type(thing).__module__.split(".")[0] == package]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
