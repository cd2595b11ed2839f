"""Steps as CUDA graphs: one launch for a whole forward pass, sampling included.

Enqueueing a pass kernel by kernel costs the host 10 to 20 ms at 36 layers, more than the device needs for a few hundred
tokens. So every step that fits runs from a graph:

* decode: every row has one new token. Captured per number of rows and, where attention splits long contexts, per bound
  of the context;
* verify: the same with rows that may belong to one request: a row that verifies guesses becomes one row per sample,
  each with the context up to its own token. Only where there is speculation;
* mixed: prefill chunks and decode rows together, packed. Captured per number of tokens and of rows.

A step takes the smallest graph that holds it; the rest is padding that reads and writes nothing. Each comes in two
kinds: ``ids`` ends in sampled ids (greedy, or temperature alone), ``logits`` ends in logits for the general sampler.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kernels.interface import AttentionMeta, Draw, LayerKV, SharedSplits
from kernels.triton_common import Launcher
from kernels.triton_inputs import unpack_inputs
from kernels.triton_shared import members
from kernels.tuning import UNSPLIT_PROGRAMS, longest_split, sharing_pays, uneven_contexts
from replica.batch import Row
from replica.graph_inputs import GraphInputs, Layout
from replica.model import Decoder
from replica.sharing import Sharing, find_sharing

log = logging.getLogger("everwarm.replica")

Kind = Literal["ids", "logits"]
DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
CONTEXTS = (1280, 2560, 5120, 10240, 40960)
"""Bounds of the context, tokens: a grid made for far more splits than there are costs up to half a kernel."""
WIDE_CONTEXTS = (5120, 40960)
"""The same where the rows fill the chip and only some contexts are split, and in mixed steps."""
MIXED_TOKENS = (32, 64, 128, 160, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Measured: sizes in between (192, 224, 288, 448) cost about as much as the next, as whole waves of tiles count."""
MIXED_ROWS = (16, 64, 256)
SHARING_ROWS = 16
"""Decode steps of fewer rows don't look for shared splits."""
MAX_ITEMS = 256
"""Shared splits of a step; more are read by each row for itself."""


@dataclass(frozen=True)
class Key:
    """``tokens`` = ``rows`` and ``mixed`` False for decode. ``bound``: of the context. ``uneven``: the longest context
    is split although the rows fill the chip. ``shared``: splits that rows have in common are read once; mixed steps are
    always made for that. ``verify``: rows may continue one another's context; in mixed steps they always may."""

    kind: Kind
    mixed: bool
    tokens: int
    rows: int
    bound: int
    uneven: bool = False
    shared: bool = False
    verify: bool = False


def _up_to(sizes: Sequence[int], largest: int) -> list[int]:
    return [s for s in sizes if s < largest] + [largest]


class StepGraphs:
    """Captured steps over one decoder and its pages. ``last`` int64 [max_batch + 1]: newest id per engine slot; its
    last entry is the padding's. At most ``max_tokens`` tokens in a mixed step. ``share``: splits of the context that
    rows have in common may be read once. ``guesses``: how many a row may bring to be verified."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[LayerKV],
        last: torch.Tensor,
        *,
        page_size: int,
        max_context: int,
        max_tokens: int,
        share: bool = True,
        guesses: int = 0,
    ) -> None:
        max_rows = last.shape[0] - 1
        self._decoder, self._kv, self._last = decoder, kv, last
        self._decode_rows = _up_to(DECODE_ROWS, min(max_rows, DECODE_ROWS[-1]))
        most = max_rows * (1 + guesses)
        self._verify_rows = _up_to(DECODE_ROWS[1:], min(most, DECODE_ROWS[-1])) if guesses else []
        self._mixed_rows = _up_to(MIXED_ROWS, min(most, MIXED_ROWS[-1]))
        self._mixed_tokens = _up_to(MIXED_TOKENS, min(max_tokens, MIXED_TOKENS[-1]))
        self.max_context = max_context
        self._heads = decoder.shape.num_kv_heads
        self._bounds, self._wide = _up_to(CONTEXTS, max_context), _up_to(WIDE_CONTEXTS, max_context)
        self._members = members(decoder.shape) if share else 0
        self._sharing: tuple[list[Row], Sharing] | None = None
        """What find last found."""
        width = -(-max_context // page_size)
        rows = max(self._decode_rows[-1], self._mixed_rows[-1], *self._verify_rows)
        largest = Layout(max(rows, self._mixed_tokens[-1]), rows, MAX_ITEMS, 1 + self._members).size(width)
        self.inputs = GraphInputs(last.device, page_size, max_rows, largest)
        self._launch = Launcher(last.device)
        self._ids = torch.zeros(max(rows, self._mixed_tokens[-1]), dtype=torch.int32, device=last.device)
        self._table = torch.zeros(rows, width, dtype=torch.int32, device=last.device)
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.replays = {"decode": 0, "verify": 0, "mixed": 0, "shared": 0}
        """``shared``: those of the others that read shared splits once."""

    # --- capture

    def keys(self, kinds: Sequence[Kind]) -> Iterator[Key]:
        """Largest first, so that workspaces and the shared memory pool have their final size early."""
        for kind in kinds:
            for tokens in reversed(self._mixed_tokens):
                for rows in reversed(self._mixed_rows):
                    if rows <= tokens or rows == self._mixed_rows[0]:
                        for bound in reversed(self._wide):
                            yield Key(kind, True, tokens, rows, bound, shared=self._shares)
            for rows in reversed(self._decode_rows):
                fills = self._fills(rows)
                if fills:
                    yield Key(kind, False, rows, rows, self.max_context)
                for bound in reversed(self._wide if fills else self._bounds):
                    yield Key(kind, False, rows, rows, bound, uneven=fills)
                if self._shares and rows >= SHARING_ROWS:
                    for bound in reversed(self._wide):
                        yield Key(kind, False, rows, rows, bound, shared=True)
            for rows in reversed(self._verify_rows):
                for bound in reversed(self._wide):
                    yield Key(kind, False, rows, rows, bound, uneven=self._fills(rows), verify=True)
                    if self._shares and rows >= SHARING_ROWS:
                        yield Key(kind, False, rows, rows, bound, shared=True, verify=True)

    def _fills(self, rows: int) -> bool:
        """Whether so many rows fill the chip with one program for each context and head."""
        return rows * self._heads >= UNSPLIT_PROGRAMS

    @property
    def _shares(self) -> bool:
        return self._members > 1

    def capture(self, kinds: Sequence[Kind]) -> None:
        """Runs every graph's work once, which compiles what is missing, then captures it."""
        started = time.perf_counter()
        gc.collect()  # what a former engine left would be freed in the middle of a capture, which makes that invalid
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for key in self.keys(kinds):
                self._blank(key)
                self._forward(key)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = self._forward(key)
                finally:
                    graph.capture_end()
                self._graphs[key] = (graph, output)
        torch.cuda.synchronize()
        log.info("captured %d steps in %.1f s", len(self._graphs), time.perf_counter() - started)

    def release(self) -> None:
        """Gives the graphs and their memory back; call with no step in flight."""
        self._graphs.clear()

    def _layout(self, key: Key) -> Layout:
        return (
            Layout(key.tokens, key.rows, MAX_ITEMS, 1 + self._members) if key.shared else Layout(key.tokens, key.rows)
        )

    def _blank(self, key: Key) -> None:
        """All padding, so that capturing writes to no page."""
        layout = self._layout(key)
        self.inputs.packed[: layout.size(1)] = 0
        self.inputs.field(layout, "items").fill_(-1)
        self.inputs.field(layout, "width").fill_(1)
        self.inputs.field(layout, "slots").fill_(-1)
        self.inputs.field(layout, "engine").fill_(self._last.shape[0] - 1)

    def _forward(self, key: Key) -> torch.Tensor:
        layout, inputs, decoder = self._layout(key), self.inputs, self._decoder
        ids, table = self._ids[: key.tokens], self._table[: key.rows]
        unpack_inputs(
            self._launch, inputs.field(layout, "ids"), inputs.field(layout, "width"), inputs.field(layout, "pages"),
            self._last, ids, table,
        )  # fmt: skip
        shared = None
        if key.shared:
            items = inputs.field(layout, "items").view(layout.items, layout.item_width)
            shared = SharedSplits(items, inputs.field(layout, "covered"), longest_split(key.bound))
        meta = AttentionMeta(
            cu_q=inputs.field(layout, "cu_q"), kv_len=inputs.field(layout, "kv_len"), block_table=table,
            positions=inputs.field(layout, "positions"), slots=inputs.field(layout, "slots"),
            page_size=inputs.page_size, max_q=key.tokens if key.mixed else 1, max_kv=key.bound,
            decode_only=not key.mixed, cu_q_host=[], kv_len_host=[], uneven=key.uneven, chained=key.verify,
            shared=shared, extra={"new_tokens": (key.rows, key.rows)},
        )  # fmt: skip
        stream = decoder.hidden(ids, self._kv, meta, inputs.field(layout, "sample") if key.mixed else None)
        if key.kind == "logits":
            return decoder.logits(stream, None)
        temperature = inputs.field(layout, "temperature").view(torch.float32)
        keys = inputs.field(layout, "keys").view(key.rows, 2)
        return decoder.sample(stream, Draw(temperature, keys, self._last, inputs.field(layout, "engine")))

    # --- a step

    def find(self, rows: list[Row], kind: Kind) -> Key | None:
        """The smallest graph that holds the batch; None: too large, or a row samples several times in the middle of
        what it computes."""
        verify = any(row.num_samples > 1 for row in rows)
        if any(row.num_samples > 1 and row.num_samples < len(row.token_ids) for row in rows):
            return None
        given, rows = rows, self._single(rows)
        tokens = sum(len(row.token_ids) for row in rows)
        contexts = [row.start + len(row.token_ids) for row in rows]
        longest = max(contexts)
        if longest > self.max_context:
            return None
        if tokens != len(rows) or any(row.num_samples == 0 for row in rows):
            size, height = _least(self._mixed_tokens, tokens), _least(self._mixed_rows, len(rows))
            self._find_sharing(given, rows, longest)
            key = Key(kind, True, size, height, _least(self._wide, longest), shared=self._shares)
        else:
            size = _least(self._verify_rows if verify else self._decode_rows, tokens)
            wide = _least(self._wide, longest)
            if size >= SHARING_ROWS and self._find_sharing(given, rows, longest):
                key = Key(kind, False, size, size, wide, shared=True, verify=verify)
            elif verify:
                key = Key(kind, False, size, size, wide, uneven=self._fills(size), verify=True)
            elif not self._fills(size):
                key = Key(kind, False, size, size, _least(self._bounds, longest))
            elif uneven_contexts(sum(contexts), longest, self._heads):
                key = Key(kind, False, size, size, wide, uneven=True)
            else:
                key = Key(kind, False, size, size, self.max_context)
        return key if key in self._graphs else None

    def _single(self, rows: list[Row]) -> list[Row]:
        """Rows that sample once or not at all: those that verify guesses are cut into their samples. Which of these ids
        is the newest of its slot is not known before they are compared, so they go to the padding's."""
        if all(row.num_samples <= 1 for row in rows):
            return rows
        single: list[Row] = []
        for row in rows:
            if row.num_samples <= 1:
                single.append(row)
                continue
            assert row.token_ids.min() >= 0, "guesses follow a token that the host knows"
            single += [
                replace(row, slot=self.inputs.padding_slot, start=row.start + j, token_ids=row.token_ids[j : j + 1],
                        num_samples=1, position_base=row.position_base + j)
                for j in range(row.num_samples)
            ]  # fmt: skip
        return single

    def _find_sharing(self, given: list[Row], rows: list[Row], longest: int) -> bool:
        """Whether reading shared splits once pays in this step of the ``given`` rows; ``run`` gets them."""
        self._sharing = None
        if not self._shares:
            return False
        split = longest_split(_least(self._wide, longest))
        size = self.inputs.page_size
        found = find_sharing(rows, page_size=size, split=split, members=self._members, limit=MAX_ITEMS)
        if found is None or not sharing_pays(found.saved, self._heads):
            return False
        self._sharing = (given, found)
        return True

    def run(self, rows: list[Row], key: Key) -> torch.Tensor:
        """Enqueues one step, with the key that ``find`` gave for these rows: ids int32 (-1: a logit was not finite) or
        logits fp32 [., vocab] of the sampled rows in order. The output is overwritten by the next replay."""
        sharing = None
        if key.shared and self._sharing is not None and self._sharing[0] is rows:
            sharing = self._sharing[1]
        self.inputs.send(self._single(rows), self._layout(key), sharing)
        graph, output = self._graphs[key]
        graph.replay()
        self.replays["mixed" if key.mixed else "verify" if key.verify else "decode"] += 1
        self.replays["shared"] += sharing is not None
        return output[: sum(row.num_samples for row in rows)]

    def describe(self) -> dict[str, Any]:
        return {
            "graphs": len(self._graphs),
            "decode_rows": self._decode_rows,
            "verify_rows": self._verify_rows,
            "mixed_tokens": self._mixed_tokens,
            "mixed_rows": self._mixed_rows,
            "replays": dict(self.replays),
        }


def _least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest size that is enough, or 0."""
    return next((s for s in sizes if s >= wanted), 0)
