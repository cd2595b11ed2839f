"""A second model, or the first layers of the served one, guesses what the served one will sample.

It runs inside the step that verifies its guesses: one pass per guess over all rows that want one, each from the token
before. Guesses are chosen as the served model's tokens are, with the row's own options and the noise of the very
position: where both models see nearly the same distribution, the same noise mostly picks the same token.

A second model has pages of its own under the same block tables, so whatever the prefix cache, preemption and chunks do
to a request's pages holds for both. What is not there (pages that came back from a host tier, say) or is wrong there
makes guesses worse and nothing else. The first layers of the served model need no memory: their keys and values are
the ones it is about to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from kernels.dispatch import Dispatch
from kernels.interface import LayerKV
from replica import weights
from replica.batch import FROM_DEVICE, FROM_DRAFT, Row
from replica.config import ResolvedConfig
from replica.inputs import InputBuilder
from replica.kv import PagedKV
from replica.model import Decoder, ModelConfig, Weights
from replica.sampler import Sampler


def load_draft(
    config: ResolvedConfig, choose_ops: Callable[[ModelConfig, ResolvedConfig], Dispatch], load_format: str = "auto"
) -> Decoder | None:
    """``speculative_model``, if there is one. Raises what :func:`replica.weights.load` raises."""
    if (path := config.speculative_model) is None:
        return None
    ops = choose_ops(weights.read_config(path), config)
    dtype = getattr(torch, config.dtype)
    model, loaded = weights.load(path, dtype, config.device, load_format=load_format, prepare=ops.prepare)
    return Decoder(model, loaded, ops, config.max_model_len)


class DraftModel:
    """Used by the runner, in its thread. ``own``: the pages of a second model; None: ``layers`` are the runner's."""

    def __init__(
        self, decoder: Decoder, layers: list[LayerKV], sampler: Sampler, page_size: int, own: PagedKV | None = None
    ) -> None:
        self.decoder, self.own = decoder, own
        self.layers, self._sampler, self._vocab_size = layers, sampler, sampler.vocab_size
        self._inputs = InputBuilder(decoder.device, page_size)

    @classmethod
    def open(
        cls, config: ResolvedConfig, target: Decoder, kv: PagedKV, sampler: Sampler, draft: Decoder | None
    ) -> DraftModel | None:
        """What the options say; None: no model drafts. ``draft``: from :func:`load_draft`. Raises ValueError."""
        if config.speculative != "draft":
            return None
        count = config.speculative_layers
        if count is None and draft is None:
            raise ValueError(f"speculative_model: {config.speculative_model!r} was not loaded")
        if draft is not None:
            own = PagedKV(draft.config, config.num_pages, config.page_size, config.kv_cache_dtype, target.device)
            return cls(draft, own.layers, sampler, config.page_size, own)
        w = target.weights
        first = Weights(w.embed, w.layers[:count], w.norm, w.head, prepared=True)
        shape = replace(target.config, num_layers=len(first.layers))
        decoder = Decoder(shape, first, target.ops, config.max_model_len)
        return cls(decoder, kv.layers[:count], sampler, config.page_size)

    def prepare(self, rows: list[Row]) -> None:
        """Before the step's own pass: guesses in place of every FROM_DRAFT, and the draft model's keys and values of
        all its tokens. On a GPU it waits for the guesses, which become part of the step's input."""
        self._guess([row for row in rows if row.num_samples > 1 and row.drafts[0] == FROM_DRAFT])
        if self.own is not None:
            self._follow(rows, self.own)

    def _guess(self, rows: list[Row]) -> None:
        for j in range(max((row.num_samples - 1 for row in rows), default=0)):
            active = [row for row in rows if row.num_samples - 1 > j]
            steps = [
                replace(row, start=row.start + j, token_ids=row.token_ids[j : j + 1], num_samples=1) for row in active
            ]
            inputs = self._inputs.build(steps)
            stream = self.decoder.hidden(self._known(inputs.ids), self.layers, inputs.meta, None)
            ids = self._sampler.guess(self._fit(self.decoder.logits(stream, None)), active, j)
            for row, token_id in zip(active, ids.tolist(), strict=True):
                row.drafts[j] = token_id

    def _follow(self, rows: list[Row], kv: PagedKV) -> None:
        inputs = self._inputs.build(rows)
        ids = torch.where(inputs.ids == FROM_DEVICE, self._sampler.last_ids(inputs.slots_of_tokens), inputs.ids)
        none = torch.zeros(1, dtype=torch.int64, device=ids.device)  # one row, as kernels don't take empty inputs
        self.decoder.hidden(self._known(ids), kv.layers, inputs.meta, none)

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Models of one tokenizer may differ in the padding of their vocabulary."""
        return ids.clamp(max=self.decoder.config.vocab_size - 1)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self._vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, : self._vocab_size]

    def check_invariants(self) -> None:
        """Call with no step in flight."""
        if self.own is not None:
            self.own.check_invariants()

    def describe(self) -> dict[str, Any]:
        shape = self.decoder.config
        return {
            "family": shape.family,
            "num_layers": shape.num_layers,
            "kv_bytes": 0 if self.own is None else self.own.num_bytes,
        }
