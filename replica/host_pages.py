"""Copies of whole pages between the device's KV memory and host memory.

Every copy goes through a small staging buffer on the device, so that it is one gather or scatter over all layers there
and one contiguous transfer per page:

    save   main stream  gather pages -> staging | record         | go on with the next step
           side stream                   wait --| staging -> host| record: the buffer is free
    load   side stream  host -> staging | record | ...
           main stream             wait --| scatter staging -> pages | record: the buffer is free

The side stream makes its transfers in order, so a slot is read after it was written and before it is overwritten; the
main stream makes gathers, scatters and steps in order, so a page is read before a later step overwrites it and written
before a later step reads it. On a CPU both are the runner's one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch

from replica.batch import Move
from replica.kv import PagedKV, page_index

STAGING_BYTES = 32 << 20
"""Of each of the four staging buffers, two per direction."""


class _Staging:
    """``size`` pages on the device, and when they may be used again."""

    def __init__(self, kv: PagedKV, size: int) -> None:
        self.size = size
        self.parts = kv.page_buffer(size, kv.device)
        self.free: torch.cuda.Event | None = torch.cuda.Event() if kv.device.type == "cuda" else None


class HostPages:
    """``num_slots`` pages of host memory behind ``kv``, page-locked for a GPU. Raises ValueError when the machine has
    less."""

    def __init__(self, kv: PagedKV, num_slots: int) -> None:
        self.num_bytes = num_slots * kv.page_bytes
        if self.num_bytes > (room := available_bytes()):
            raise ValueError(
                f"host_cache_gb: {self.num_bytes / 2**30:.1f} GiB were asked for; {room / 2**30:.1f} GiB are available"
            )
        cuda = kv.device.type == "cuda"
        self._kv = kv
        self._slots = kv.page_buffer(num_slots, "cpu", pinned=cuda)
        self._side = torch.cuda.Stream(kv.device) if cuda else None
        size = max(1, min(num_slots, STAGING_BYTES // kv.page_bytes))
        self._out, self._in = (cycle([_Staging(kv, size) for _ in range(2)]) for _ in range(2))

    def move(self, moves: list[Move]) -> None:
        """Enqueues the copies in order; on a CPU it makes them."""
        for move in moves:
            staged = self._out if move.to_host else self._in
            copy = self._save if move.to_host else self._load
            for pages, slots, staging in _portions(move, staged):
                copy(pages, slots, staging)

    def _save(self, pages: list[int], slots: list[int], staging: _Staging) -> None:
        index = page_index(pages, self._kv.device)
        if self._side is None or staging.free is None:
            self._kv.read(index, staging.parts)
            self._to_host(slots, staging)
            return
        main = torch.cuda.current_stream(self._kv.device)
        main.wait_event(staging.free)
        self._kv.read(index, staging.parts)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._to_host(slots, staging)
            staging.free.record(self._side)

    def _load(self, pages: list[int], slots: list[int], staging: _Staging) -> None:
        index = page_index(pages, self._kv.device)
        if self._side is None or staging.free is None:
            self._from_host(slots, staging)
            self._kv.write(index, staging.parts)
            return
        self._side.wait_event(staging.free)
        with torch.cuda.stream(self._side):
            self._from_host(slots, staging)
        main = torch.cuda.current_stream(self._kv.device)
        main.wait_stream(self._side)
        self._kv.write(index, staging.parts)
        staging.free.record(main)

    def _to_host(self, slots: list[int], staging: _Staging) -> None:
        for memory, part in zip(self._slots, staging.parts, strict=True):
            for i, slot in enumerate(slots):
                memory[slot].copy_(part[i], non_blocking=True)

    def _from_host(self, slots: list[int], staging: _Staging) -> None:
        for memory, part in zip(self._slots, staging.parts, strict=True):
            for i, slot in enumerate(slots):
                part[i].copy_(memory[slot], non_blocking=True)


def available_bytes() -> int:
    """Host memory that can be had without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _portions(move: Move, staged: Iterator[_Staging]) -> Iterator[tuple[list[int], list[int], _Staging]]:
    done = 0
    while done < len(move.pages):
        staging = next(staged)
        upto = done + staging.size
        yield move.pages[done:upto], move.slots[done:upto], staging
        done = upto
