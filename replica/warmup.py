"""Compiles what steps outside the graphs may launch, before the replica says it is ready.

Which kernels a step needs depends on sizes only through a few classes (buckets of tokens and rows, how attention is
split), so one pass per class covers all. Every pass consists of padding: it reads and writes no page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from kernels.interface import AttentionMeta, LayerKV
from replica.model import Decoder

log = logging.getLogger("everwarm.replica")

TOKENS = (1, 2, 17, 33, 65, 129, 257, 513)
"""One of each class of products: tuning buckets, and the two pipelines of the gate-up kernel."""


def padding(device: torch.device, tokens: int, rows: int, page_size: int, max_context: int) -> AttentionMeta:
    """``tokens`` tokens that belong to no one, in ``rows`` requests of length 0."""
    i32: Any = {"dtype": torch.int32, "device": device}
    return AttentionMeta(
        cu_q=torch.zeros(rows + 1, **i32),
        kv_len=torch.zeros(rows, **i32),
        block_table=torch.zeros(rows, -(-max_context // page_size), **i32),
        positions=torch.zeros(tokens, **i32),
        slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        page_size=page_size,
        max_q=1,
        max_kv=max_context,
        decode_only=True,
        cu_q_host=[],
        kv_len_host=[],
    )


def warm(decoder: Decoder, kv: list[LayerKV], page_size: int, max_context: int, sizes: Sequence[int] = TOKENS) -> None:
    """Runs every class of eager pass once, at the given numbers of tokens. Call on the stream that will serve."""
    started = time.perf_counter()
    heads = decoder.shape.num_kv_heads
    splits = [1, -(-33 // heads), -(-256 // heads), -(-512 // heads)]
    for tokens in sizes:
        ids = torch.zeros(tokens, dtype=torch.int64, device=decoder.device)
        meta = padding(decoder.device, tokens, tokens, page_size, max_context)
        x = decoder.hidden(ids, kv, meta, None)
        decoder.logits(x, None)
        rows = torch.zeros(min(tokens, 65), dtype=torch.int64, device=decoder.device)
        decoder.logits(x, rows)
        for single, longest in zip(splits, (2, tokens, tokens, tokens), strict=True):
            meta = padding(decoder.device, tokens, max(2, single), page_size, max_context)
            meta.decode_only, meta.max_q, meta.extra = False, longest, {"new_tokens": (single, 1)}
            decoder.logits(decoder.hidden(ids, kv, meta, rows), None)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
    log.info("warmed eager passes in %.1f s", time.perf_counter() - started)
