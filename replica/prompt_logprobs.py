"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is prefilled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface import Stream
from replica.batch import Row
from replica.model import Decoder
from replica.sampler import TopLogprobs, top_logprobs
from router.wire import Logprob

ROWS_AT_ONCE = 64
"""Logits of so many positions exist at a time: a whole chunk's would outweigh the model."""


@dataclass
class PromptScores:
    """What one row's chunk gave: the entries of prompt tokens start + 1 .. (and None for token 0)."""

    starts_prompt: bool
    parts: list[TopLogprobs]

    def to_host(self) -> PromptScores:
        return PromptScores(self.starts_prompt, [part.to_host() for part in self.parts])

    def read(self) -> list[Logprob | None]:
        out: list[Logprob | None] = [None] if self.starts_prompt else []
        for part in self.parts:
            scored = part.read()
            out += [scored[i] for i in part.rows]
        return out


class PromptLogprobs:
    """Keeps the prompts of slots that asked, because a chunk's last position predicts a token of the next chunk."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._prompts: dict[int, np.ndarray] = {}

    def wanted(self, rows: list[Row]) -> bool:
        """Whether a row of this step has prompt positions to score. Raises ValueError for a new row without history."""
        wanted = False
        for row in rows:
            if row.new:
                self._prompts.pop(row.slot, None)
                if row.sampling.prompt_logprobs is not None:
                    if row.history is None:
                        raise ValueError(f"slot {row.slot}: prompt_logprobs need the row's history")
                    self._prompts[row.slot] = np.asarray(row.history[: row.num_prompt], np.int64)
            wanted |= row.slot in self._prompts and row.start < row.num_prompt
        return wanted

    def score(self, rows: list[Row], x: Stream, cu_q: list[int]) -> list[PromptScores | None]:
        """``x``: the residual stream of all packed tokens. Per row its scores, or None where it has none."""
        return [self._row(row, x, cu_q[i]) for i, row in enumerate(rows)]

    def _row(self, row: Row, x: Stream, first: int) -> PromptScores | None:
        prompt = self._prompts.get(row.slot)
        if prompt is None or row.start >= row.num_prompt:
            return None
        k = row.sampling.prompt_logprobs or 0
        last = min(row.start + len(row.token_ids), row.num_prompt - 1)
        parts = []
        for position in range(row.start, last, ROWS_AT_ONCE):
            end = min(position + ROWS_AT_ONCE, last)
            offset = first + position - row.start
            at = torch.arange(offset, offset + end - position, device=x.h.device)
            raw = torch.log_softmax(self._decoder.logits(x, at), dim=-1)
            targets = torch.from_numpy(prompt[position + 1 : end + 1]).to(x.h.device)
            parts.append(top_logprobs(raw, targets, list(range(end - position)), [k] * (end - position)))
        return PromptScores(row.start == 0, parts)
