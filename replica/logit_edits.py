"""What a request's options do to its logits before anything is chosen, and the state per slot that this needs.

In order: allowed ids, bad words, min_tokens, logit_bias, penalties (repetition over prompt and output; frequency and
presence over the output). The newest token may exist only on the device, so counts and the tail of recent ids live
there and are advanced there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from replica.batch import Row
from router.wire import Sampling

_NEVER = float("-inf")


@dataclass
class SlotEdits:
    """One request's options as tensors on the device. ``pool_row``: its row in the penalty tables, -1 for none."""

    forbidden: torch.Tensor | None = None
    """bool [V]: outside allowed_token_ids."""
    banned: torch.Tensor | None = None
    """int64 ids: bad words of one token."""
    words: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """(all ids but the last, the last) of longer bad words."""
    tail: torch.Tensor | None = None
    """int64, the most recent ids, oldest first, as many as the longest bad word needs; -1 before the first."""
    stop_ids: torch.Tensor | None = None
    min_tokens: int = 0
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    pool_row: int = -1
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """repetition, frequency, presence."""

    @property
    def any_but_penalties(self) -> bool:
        tensors = (self.forbidden, self.banned, self.tail, self.stop_ids, self.bias_ids)
        return any(tensor is not None for tensor in tensors)


def edits_anything(s: Sampling) -> bool:
    return bool(
        s.allowed_token_ids
        or s.bad_words
        or s.logit_bias
        or (s.min_tokens and s.stop_token_ids)
        or s.repetition_penalty != 1
        or s.frequency_penalty
        or s.presence_penalty
    )


class PenaltyTables:
    """counts int32 [n, V] of emitted ids, in_prompt bool [n, V]; rows are handed out and grow in number by doubling."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def take(self, history: np.ndarray, num_prompt: int) -> int:
        if not self._free:
            old = len(self.counts)
            more = max(4, old)
            self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.counts.shape[1])))
            self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])))
            self._free = list(range(old + more - 1, old - 1, -1))
        row = self._free.pop()
        vocab, device = self.counts.shape[1], self.counts.device
        emitted = np.bincount(history[num_prompt:], minlength=vocab).astype(np.int32)
        self.counts[row] = torch.from_numpy(emitted).to(device)
        self.in_prompt[row] = False
        self.in_prompt[row, torch.from_numpy(np.unique(history[:num_prompt]).astype(np.int64)).to(device)] = True
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def check_invariants(self, held: list[int]) -> None:
        """``held`` plus the free rows are all rows, each once."""
        assert sorted(self._free + held) == list(range(len(self.counts)))


class LogitEdits:
    """The edits of every slot."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab = vocab_size
        self._slots: dict[int, SlotEdits] = {}
        self.tables = PenaltyTables(vocab_size, device)

    def begin(self, row: Row) -> None:
        """A request's first row in its slot: what an earlier one left is dropped. Raises ValueError without history
        where the options need it."""
        self.end(row.slot)
        s = row.sampling
        if not edits_anything(s):
            return
        edits = SlotEdits(
            min_tokens=s.min_tokens, penalties=(s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        )
        if s.allowed_token_ids:
            edits.forbidden = torch.ones(self._vocab, dtype=torch.bool, device=self._device)
            edits.forbidden[self._ids(s.allowed_token_ids)] = False
        if singles := [word[0] for word in s.bad_words if len(word) == 1]:
            edits.banned = self._ids(singles)
        edits.words = [(self._ids(word[:-1], clip=False), word[-1]) for word in s.bad_words if len(word) > 1]
        edits.words = [(prefix, last) for prefix, last in edits.words if last < self._vocab]
        if s.min_tokens and s.stop_token_ids:
            edits.stop_ids = self._ids(s.stop_token_ids)
        if s.logit_bias:
            known = [(token, bias) for token, bias in s.logit_bias if token < self._vocab]
            edits.bias_ids = self._ids([token for token, _ in known])
            edits.bias = torch.tensor([bias for _, bias in known], dtype=torch.float32, device=self._device)
        penalised = edits.penalties != (1.0, 0.0, 0.0)
        if (edits.words or penalised) and row.history is None:
            raise ValueError(f"slot {row.slot}: penalties and bad words need the row's history")
        if edits.words and row.history is not None:
            length = max(len(prefix) for prefix, _ in edits.words)
            recent = row.history[-length:].astype(np.int64)
            padded = np.concatenate((np.full(length - len(recent), -1, np.int64), recent))
            edits.tail = torch.from_numpy(padded).to(self._device)
        if penalised and row.history is not None:
            edits.pool_row = self.tables.take(row.history, row.num_prompt)
        self._slots[row.slot] = edits

    def end(self, slot: int) -> None:
        edits = self._slots.pop(slot, None)
        if edits is not None and edits.pool_row >= 0:
            self.tables.give_back(edits.pool_row)

    def get(self, slot: int) -> SlotEdits | None:
        return self._slots.get(slot)

    def _ids(self, ids: tuple[int, ...] | list[int], clip: bool = True) -> torch.Tensor:
        """Ids outside the vocabulary can never be sampled, so they need no edit."""
        kept = [i for i in ids if i < self._vocab] if clip else list(ids)
        return torch.tensor(kept, dtype=torch.int64, device=self._device)

    def apply_to_row(self, logits: torch.Tensor, edits: SlotEdits, num_emitted: int, drafts: torch.Tensor) -> None:
        """Everything but penalties, in place on one row [V]. ``drafts``: int64 ids assumed emitted before it."""
        if edits.forbidden is not None:
            logits.masked_fill_(edits.forbidden, _NEVER)
        if edits.banned is not None:
            logits[edits.banned] = _NEVER
        if edits.tail is not None:
            tail = torch.cat((edits.tail, drafts))
            for prefix, last in edits.words:
                matches = (tail[len(tail) - len(prefix) :] == prefix).all()
                logits[last] = torch.where(matches, logits.new_tensor(_NEVER), logits[last])
        if edits.stop_ids is not None and num_emitted < edits.min_tokens:
            logits[edits.stop_ids] = _NEVER
        if edits.bias_ids is not None and edits.bias is not None:
            logits.index_add_(0, edits.bias_ids, edits.bias)

    def penalise(
        self, logits: torch.Tensor, rows: list[int], edits: list[SlotEdits], drafts: list[torch.Tensor]
    ) -> None:
        """In place on ``rows`` of logits [S, V]; ``drafts`` as in :meth:`apply_to_row`, one per row."""
        where = torch.tensor(rows, device=self._device)
        pool = torch.tensor([e.pool_row for e in edits], device=self._device)
        repetition, frequency, presence = torch.tensor([e.penalties for e in edits], device=self._device).T[..., None]
        counts = self.tables.counts[pool]
        for i, draft in enumerate(drafts):
            if len(draft):
                counts[i].index_add_(0, draft, torch.ones_like(draft, dtype=torch.int32))
        emitted = counts > 0
        x = logits[where]
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(emitted | self.tables.in_prompt[pool], repeated, x)
        logits[where] = x - frequency * counts - presence * emitted

    def advance(self, edits: SlotEdits, ids: torch.Tensor, kept: torch.Tensor) -> None:
        """``ids`` int64 [n] were sampled in order; those with ``kept`` int32 1 (a prefix) became tokens."""
        if edits.pool_row >= 0:
            self.tables.counts[edits.pool_row].index_add_(0, ids, kept)
        if edits.tail is not None:
            # The window of the tail's length that ends after the last kept id.
            end = kept.sum() + torch.arange(len(edits.tail), device=ids.device)
            edits.tail = torch.cat((edits.tail, ids))[end]

    def check_invariants(self) -> None:
        self.tables.check_invariants([e.pool_row for e in self._slots.values() if e.pool_row >= 0])
