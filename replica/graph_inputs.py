"""What changes from step to step, for captured steps: packed on the host, copied once, read at fixed addresses.

    int32:  width | id M | position M | slot M | cu_q R+1 | kv_len R | sample R | engine slot R | temperature R | key 2R
            | covered R | item I x (1 + members) | pages R x width

M tokens and R rows are the graph's, not the batch's. Padding tokens have slot -1, which no kernel writes to; padding
rows have no tokens and length 0. The sampled rows come first in ``sample``, ``engine slot``, ``temperature`` (fp32
bits) and ``key``. An id of -1 - s is the one sampled last for engine slot s. Graphs that read shared splits once have
``covered`` and ``item`` (replica/sharing.py); a row of ``item`` that begins with -1 is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from replica import noise
from replica.batch import Row
from replica.sampler import GREEDY_BELOW
from replica.sharing import Sharing

DEPTH = 3
"""Steps whose packed inputs may be in flight."""


@dataclass(frozen=True)
class Layout:
    """Offsets of the fields for M tokens and R rows; ``items`` of ``item_width`` ints each."""

    tokens: int
    rows: int
    items: int = 0
    item_width: int = 0

    @property
    def offsets(self) -> dict[str, tuple[int, int]]:
        m, r = self.tokens, self.rows
        sizes = {"width": 1, "ids": m, "positions": m, "slots": m, "cu_q": r + 1, "kv_len": r, "sample": r, "engine": r,
                 "temperature": r, "keys": 2 * r, "covered": r if self.items else 0,
                 "items": self.items * self.item_width}  # fmt: skip
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = (at, at + size)
            at += size
        found["pages"] = (at, at)
        return found

    def size(self, width: int) -> int:
        return self.offsets["pages"][0] + self.rows * width


class GraphInputs:
    """The packed array on the device and its staging copies in pinned memory."""

    def __init__(self, device: torch.device, page_size: int, padding_slot: int, largest: int) -> None:
        """``largest``: ints of the largest step. ``padding_slot``: the engine slot that padding rows sample for."""
        self.page_size, self.padding_slot = page_size, padding_slot
        self.packed = torch.zeros(largest, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(largest, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH)]
        self._copied = [torch.cuda.Event() for _ in range(DEPTH)] if pinned else []
        self._turn = 0

    def field(self, layout: Layout, name: str) -> torch.Tensor:
        begin, end = layout.offsets[name]
        return self.packed[begin : None if name == "pages" else end]

    def send(self, rows: list[Row], layout: Layout, sharing: Sharing | None = None) -> None:
        """Packs the batch and enqueues its copy."""
        self._turn = (self._turn + 1) % DEPTH
        if self._copied:
            self._copied[self._turn].synchronize()
        staging = self._staging[self._turn]
        used = self.pack(rows, layout, staging.numpy(), sharing)
        self.packed[:used].copy_(staging[:used], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()

    def pack(self, rows: list[Row], layout: Layout, out: np.ndarray, sharing: Sharing | None = None) -> int:
        """Writes the fields into ``out`` int32; returns how many ints are used."""
        n, at = len(rows), layout.offsets
        fields = {name: out[begin:end] for name, (begin, end) in at.items()}
        counts = np.fromiter((len(row.token_ids) for row in rows), np.int64, n)
        starts = np.fromiter((row.start for row in rows), np.int64, n)
        engine = np.fromiter((row.slot for row in rows), np.int64, n)
        total = int(counts.sum())
        ends = np.cumsum(counts)
        of = np.repeat(np.arange(n), counts)
        num_pages = (starts + counts - 1) // self.page_size + 1
        width = int(num_pages.max())
        used = layout.size(width)
        pages = out[at["pages"][0] : used].reshape(layout.rows, width)
        for i, row in enumerate(rows):
            pages[i, : num_pages[i]] = row.pages[: num_pages[i]]
        positions = np.arange(total) + np.repeat(starts + counts - ends, counts)
        ids = np.concatenate([row.token_ids for row in rows])
        fields["width"][0] = width
        fields["ids"][:total] = np.where(ids < 0, -1 - engine[of], ids)
        fields["positions"][:total] = positions
        fields["slots"][:total] = pages[of, positions // self.page_size] * self.page_size + positions % self.page_size
        fields["ids"][total:], fields["positions"][total:], fields["slots"][total:] = 0, 0, -1
        fields["cu_q"][0], fields["cu_q"][1 : n + 1], fields["cu_q"][n + 1 :] = 0, ends, total
        fields["kv_len"][:n], fields["kv_len"][n:] = starts + counts, 0
        if layout.items:
            items = fields["items"].reshape(layout.items, layout.item_width)
            fields["covered"][:], items[:, 0] = 0, -1
            if sharing is not None:
                fields["covered"][:n], items[: len(sharing.items)] = sharing.covered, sharing.items
        self._pack_sampling(
            [(row, int(end) - 1) for row, end in zip(rows, ends, strict=True) if row.num_samples], fields
        )
        return used

    def _pack_sampling(self, sampled: list[tuple[Row, int]], fields: dict[str, np.ndarray]) -> None:
        s = len(sampled)
        fields["sample"][:s] = [at for _, at in sampled]
        fields["engine"][:s] = [row.slot for row, _ in sampled]
        fields["sample"][s:], fields["engine"][s:] = 0, self.padding_slot
        temperature = fields["temperature"].view(np.float32)
        temperature[:s], temperature[s:] = [row.sampling.temperature for row, _ in sampled], 0
        temperature[temperature < GREEDY_BELOW] = 0
        if temperature.any():
            seeds = np.array([row.sampling.seed for row, _ in sampled], np.uint64)
            positions = np.array([row.position_base for row, _ in sampled], np.int64)
            fields["keys"][: 2 * s] = noise.keys(seeds, positions).reshape(-1)
