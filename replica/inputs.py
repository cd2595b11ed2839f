"""A batch of rows -> the arrays of one forward pass: vectorised on the host, one copy to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface import AttentionMeta
from replica.batch import FROM_DEVICE, Row


@dataclass
class StepInputs:
    """Device tensors of one step. ids int64 [M], FROM_DEVICE still in place; slots_of_tokens int64 [M] are engine
    slots; sample_rows int64 [S] index packed tokens."""

    ids: torch.Tensor
    slots_of_tokens: torch.Tensor
    any_from_device: bool
    sample_rows: torch.Tensor
    meta: AttentionMeta


class InputBuilder:
    """Packs everything into one int64 array; on a GPU it goes through pinned memory, which is reused only after the
    step that read it, ``depth`` steps later, is known to be over (the caller has its result)."""

    def __init__(self, device: torch.device, page_size: int, depth: int = 3) -> None:
        self._device = device
        self._page_size = page_size
        self._staging: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * depth
        self._turn = 0

    def build(self, rows: list[Row]) -> StepInputs:
        counts = np.array([len(row.token_ids) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        samples = np.array([row.num_samples for row in rows], np.int64)
        num_pages = -(-(starts + counts) // self._page_size)
        cu_q = np.concatenate(([0], np.cumsum(counts)))
        ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(ids)) - np.repeat(cu_q[:-1] - starts, counts)
        table = np.zeros((len(rows), int(num_pages.max())), np.int64)
        for i, row in enumerate(rows):
            table[i, : num_pages[i]] = row.pages[: num_pages[i]]
        slots = table[row_of, positions // self._page_size] * self._page_size + positions % self._page_size
        total = int(samples.sum())
        first = np.repeat(cu_q[1:] - samples - (np.cumsum(samples) - samples), samples)
        sample_rows = first + np.arange(total)
        engine_slots = np.array([row.slot for row in rows], np.int64)[row_of]
        kv_len = starts + counts
        parts = (ids, engine_slots, positions, slots, cu_q, kv_len, sample_rows, table.reshape(-1))
        on_device = torch.split(self._copy(parts), [len(part) for part in parts])
        meta = AttentionMeta(
            cu_q=on_device[4].to(torch.int32),
            kv_len=on_device[5].to(torch.int32),
            block_table=on_device[7].to(torch.int32).view(table.shape),
            positions=on_device[2].to(torch.int32),
            slots=on_device[3],
            page_size=self._page_size,
            max_q=int(counts.max()),
            max_kv=int(kv_len.max()),
            decode_only=bool((counts == 1).all()),
            cu_q_host=cu_q.tolist(),
            kv_len_host=kv_len.tolist(),
        )
        from_device = bool((ids == FROM_DEVICE).any())
        return StepInputs(on_device[0], on_device[1], from_device, on_device[6], meta)

    def _copy(self, parts: tuple[np.ndarray, ...]) -> torch.Tensor:
        packed = np.concatenate(parts)
        if self._device.type == "cpu":
            return torch.from_numpy(packed)
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        if len(staging) < len(packed):
            size = 1 << (len(packed) - 1).bit_length()
            staging = self._staging[self._turn] = torch.empty(size, dtype=torch.int64, pin_memory=True)
        staging[: len(packed)] = torch.from_numpy(packed)
        return staging[: len(packed)].to(self._device, non_blocking=True)
