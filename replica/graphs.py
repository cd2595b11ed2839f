"""Decode steps as CUDA graphs: one launch for a whole forward pass, sampling included.

A graph is captured per batch size and, where attention splits long contexts, per context bound. A step takes the
smallest that fits; rows beyond the batch are padding with length 0, which read and write nothing. Everything that
changes from step to step travels in one packed copy (``kernels.triton_inputs``); ids sampled by the step before are
already on the device. Two kinds share the inputs: ``ids`` ends in sampled ids (greedy, or temperature alone),
``logits`` ends in logits for the general sampler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from kernels.interface import AttentionMeta, Draw, LayerKV
from kernels.triton_common import Launcher
from kernels.triton_inputs import FIELDS, HEADER, packed_size, prepare_decode
from kernels.tuning import decode_attention_config
from replica import noise
from replica.batch import Row
from replica.model import Decoder
from replica.sampler import GREEDY_BELOW

log = logging.getLogger("everwarm.replica")

Kind = Literal["ids", "logits"]
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
CONTEXTS = (2048, 8192, 32768)
"""Bounds of the context in tokens; a grid made for far more splits than there are costs up to half a kernel."""
DEPTH = 3
"""Steps whose packed inputs may be in flight."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor


class DecodeGraphs:
    """Captured decode steps over one decoder and its pages. ``last`` int64 [max_batch + 1]: newest id per engine slot;
    its last entry is the padding's."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[LayerKV],
        last: torch.Tensor,
        *,
        page_size: int,
        max_batch: int,
        max_context: int,
    ) -> None:
        device = last.device
        self._decoder, self._kv, self._last = decoder, kv, last
        self._page_size = page_size
        self.sizes = [s for s in SIZES if s < max_batch] + [min(max_batch, SIZES[-1])]
        self.max_context = max_context
        width = -(-max_context // page_size)
        biggest = packed_size(self.sizes[-1], width)
        self._launch = Launcher(device)
        self._packed = torch.zeros(biggest, dtype=torch.int32, device=device)
        self._staging = [torch.zeros(biggest, dtype=torch.int32, pin_memory=True) for _ in range(DEPTH)]
        self._copied = [torch.cuda.Event() for _ in range(DEPTH)]
        self._turn = 0
        self._ids = torch.zeros(self.sizes[-1], dtype=torch.int32, device=device)
        self._kv_len = torch.zeros(self.sizes[-1], dtype=torch.int32, device=device)
        self._slots = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._table = torch.zeros(self.sizes[-1], width, dtype=torch.int32, device=device)
        self._cu_q = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._bounds = {size: self._bounds_of(size) for size in self.sizes}
        self._graphs: dict[tuple[Kind, int, int], _Captured] = {}
        self.replays = 0

    # --- capture

    def capture(self, kinds: Sequence[Kind]) -> None:
        """Runs every graph's work once, which compiles what is missing, then captures it; largest first, so that
        workspaces and the shared memory pool have their final size early."""
        started = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                for bound in self._bounds[size]:
                    for kind in kinds:
                        self._graphs[kind, size, bound] = self._capture_one(kind, size, bound, pool)
        torch.cuda.synchronize()
        log.info("captured %d decode graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    def _capture_one(self, kind: Kind, size: int, bound: int, pool: Any) -> _Captured:
        # Everything is padding during capture: positions -1, so that no page is written.
        self._packed[HEADER + 2 * size : HEADER + 3 * size] = -1
        self._packed[HEADER + size : HEADER + 2 * size] = self._last.shape[0] - 1
        self._packed[0] = 1
        self._forward(kind, size, bound)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = self._forward(kind, size, bound)
        finally:
            graph.capture_end()
        return _Captured(graph, output)

    def _bounds_of(self, size: int) -> list[int]:
        """Context bounds worth a graph of their own at this size: one if attention does not split."""
        heads = self._decoder.shape.num_kv_heads
        if decode_attention_config(size, heads, self.max_context).split == 0:
            return [self.max_context]
        return [c for c in CONTEXTS if c < self.max_context] + [self.max_context]

    def _forward(self, kind: Kind, size: int, bound: int) -> torch.Tensor:
        decoder = self._decoder
        ids, kv_len, slots, table = self._ids[:size], self._kv_len[:size], self._slots[:size], self._table[:size]
        prepare_decode(self._launch, self._packed, self._last, ids, kv_len, slots, table, self._page_size)
        meta = AttentionMeta(
            cu_q=self._cu_q[: size + 1], kv_len=kv_len, block_table=table, positions=self._field(2, size), slots=slots,
            page_size=self._page_size, max_q=1, max_kv=bound, decode_only=True, cu_q_host=list(range(size + 1)),
            kv_len_host=[bound] * size,
        )  # fmt: skip
        stream = decoder.hidden(ids, self._kv, meta, None)
        if kind == "logits":
            return decoder.logits(stream, None)
        keys = self._packed[HEADER + 4 * size : HEADER + 6 * size].view(size, 2)
        draw = Draw(self._field(3, size).view(torch.float32), keys, self._last, self._field(1, size))
        return decoder.sample(stream, draw)

    def _field(self, index: int, size: int) -> torch.Tensor:
        return self._packed[HEADER + index * size : HEADER + (index + 1) * size]

    # --- a step

    def find(self, rows: list[Row], kind: Kind) -> tuple[Kind, int, int] | None:
        """The key of the smallest graph that holds the rows; None: not a decode step, or too large for any."""
        if len(rows) > self.sizes[-1] or any(len(row.token_ids) != 1 or row.num_samples != 1 for row in rows):
            return None
        size = next(s for s in self.sizes if s >= len(rows))
        longest = max(row.start for row in rows) + 1
        for bound in self._bounds[size]:
            if longest <= bound:
                key = (kind, size, bound)
                return key if key in self._graphs else None
        return None

    def run(self, rows: list[Row], key: tuple[Kind, int, int]) -> torch.Tensor:
        """Enqueues one step: ids int32 [len(rows)] (-1: a logit was not finite), or logits fp32 [len(rows), vocab].
        The output is overwritten by the next replay."""
        self._fill(rows, key[1])
        captured = self._graphs[key]
        captured.graph.replay()
        self.replays += 1
        return captured.output[: len(rows)]

    def _fill(self, rows: list[Row], size: int) -> None:
        n = len(rows)
        starts = np.fromiter((row.start for row in rows), np.int32, n)
        pages = starts // self._page_size + 1
        width = int(pages.max())
        self._turn = (self._turn + 1) % DEPTH
        self._copied[self._turn].synchronize()
        staging = self._staging[self._turn][: packed_size(size, width)]
        packed = staging.numpy()
        packed[0] = width
        fields = packed[HEADER : HEADER + 4 * size].reshape(4, size)
        fields[:, n:] = [[0], [self._last.shape[0] - 1], [-1], [0]]
        fields[0, :n] = np.fromiter((row.token_ids[0] for row in rows), np.int32, n)
        fields[1, :n] = np.fromiter((row.slot for row in rows), np.int32, n)
        fields[2, :n] = starts
        temperature = fields[3].view(np.float32)
        temperature[:n] = [row.sampling.temperature for row in rows]
        temperature[:n][temperature[:n] < GREEDY_BELOW] = 0
        if temperature.any():
            seeds = np.array([row.sampling.seed for row in rows], np.uint64)
            positions = np.fromiter((row.position_base for row in rows), np.int64, n)
            packed[HEADER + 4 * size : HEADER + 4 * size + 2 * n] = noise.keys(seeds, positions).reshape(-1)
        table = packed[HEADER + FIELDS * size :].reshape(size, width)
        for i, row in enumerate(rows):
            table[i, : pages[i]] = row.pages[: pages[i]]
        table[n:, 0] = 0
        self._packed[: len(packed)].copy_(staging, non_blocking=True)
        self._copied[self._turn].record()

    def describe(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "graphs": len(self._graphs), "replays": self.replays}
