"""Logits -> token ids, log-probabilities and faults. A row's result depends on that row alone.

Order: raw log-probabilities are taken first; then the edits of :mod:`replica.logit_edits`, the grammar mask, and
greedy, or temperature, min_p, top-k, top-p and a draw: the argmax of logits plus Gumbel noise, which is a function of
(seed, position, token id) only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from replica import noise
from replica.batch import Row
from replica.filters import Filters, floors, short
from replica.logit_edits import LogitEdits, SlotEdits
from router.wire import Logprob, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: dividing by them would overflow."""
_NOISE_BLOCK = 1 << 17
"""Noise elements made at a time on a CPU, so that they stay in its cache."""


@dataclass
class TopLogprobs:
    """Device tensors for some rows: chosen [n], rank [n], top values and ids [n, k]."""

    rows: list[int]
    wanted: list[int]
    chosen: torch.Tensor
    rank: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def to_host(self) -> TopLogprobs:
        chosen, rank, values, ids = (to_host(t) for t in (self.chosen, self.rank, self.values, self.ids))
        return TopLogprobs(self.rows, self.wanted, chosen, rank, values, ids)

    def read(self) -> dict[int, Logprob]:
        """Sample row -> its Logprob."""
        chosen, rank, values, ids = (t.tolist() for t in (self.chosen, self.rank, self.values, self.ids))
        return {
            row: Logprob(chosen[i], rank[i], tuple(zip(ids[i][:k], values[i][:k], strict=True)))
            for i, (row, k) in enumerate(zip(self.rows, self.wanted, strict=True))
        }


@dataclass
class Sampled:
    """What one step sampled, still on the device. ids [S]; sound, open bool [S]: all raw logits were finite; at least
    one token was allowed. sound None: ids are -1 where it would be False."""

    ids: torch.Tensor
    sound: torch.Tensor | None
    open: torch.Tensor | None
    logprobs: TopLogprobs | None

    def to_host(self) -> Sampled:
        return Sampled(
            to_host(self.ids),
            None if self.sound is None else to_host(self.sound),
            None if self.open is None else to_host(self.open),
            None if self.logprobs is None else self.logprobs.to_host(),
        )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On a GPU a copy into pinned memory, enqueued and not waited for: reading later would wait for later steps."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass
class _Sample:
    """One position to sample after: ``row`` of the batch, ``j`` of its samples."""

    row: Row
    j: int
    edits: SlotEdits | None

    @property
    def position(self) -> int:
        return self.row.position_base + self.j


@dataclass
class SamplePlan:
    """Host side of one step's sampling."""

    samples: list[_Sample]
    rows: list[Row]
    random: list[int] = field(default_factory=list)
    """Sample rows that are not greedy."""


class Sampler:
    """Samples for the slots of one runner. State per slot lives in :class:`LogitEdits`."""

    def __init__(
        self,
        vocab_size: int,
        max_batch_size: int,
        device: torch.device,
        largest: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        """``largest``: per row fp32 [S, V], the first largest element's index int64 [S], and whether all are finite."""
        self.edits = LogitEdits(vocab_size, device)
        self.vocab_size = vocab_size
        self._device = device
        self._vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self.last = torch.zeros(max_batch_size + 1, dtype=torch.int64, device=device)
        """Newest id per engine slot; the last entry belongs to the padding of captured steps."""
        self._largest = largest
        self._block = _block_size(vocab_size) if device.type == "cpu" else 0

    def last_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The ids sampled last for the given slots (int64), int64."""
        return self.last[slots]

    def release(self, slot: int) -> None:
        self.edits.end(slot)

    def plan(self, rows: list[Row]) -> SamplePlan:
        """Resets the state of new slots and lists what is to be sampled, rows in order. Raises ValueError for options
        that need a history without one."""
        plan = SamplePlan([], rows)
        for row in rows:
            if row.new:
                self.edits.begin(row)
            edits = self.edits.get(row.slot)
            for j in range(row.num_samples):
                if row.sampling.temperature >= GREEDY_BELOW:
                    plan.random.append(len(plan.samples))
                plan.samples.append(_Sample(row, j, edits))
        return plan

    @staticmethod
    def is_plain(plan: SamplePlan) -> bool:
        """Whether every row is greedy or draws from the whole distribution, and wants nothing but the id."""
        for sample in plan.samples:
            options = sample.row.sampling
            if sample.edits is not None or sample.row.mask is not None or options.logprobs is not None:
                return False
            if options.temperature >= GREEDY_BELOW and (options.top_k > 0 or options.top_p < 1 or options.min_p > 0):
                return False
        return True

    def sample(self, logits: torch.Tensor, plan: SamplePlan) -> Sampled:
        """logits fp32 [S, V], overwritten; S as planned."""
        greedy, sound = (None, logits.sum(-1).isfinite()) if self._largest is None else self._largest(logits)
        wanted = {i: k for i, s in enumerate(plan.samples) if (k := s.row.sampling.logprobs) is not None}
        raw = torch.log_softmax(logits[self._put(list(wanted))], dim=-1) if wanted else None
        edited = self._edit(logits, plan)
        edited = self._mask(logits, plan.rows) or edited
        ids = self._choose(logits, plan, None if edited else greedy)
        self.advance(plan, ids)
        logprobs = None
        if raw is not None:
            rows, counts = list(wanted), list(wanted.values())
            logprobs = top_logprobs(raw, ids[self._put(rows)], rows, counts)
        return Sampled(ids, sound, logits.amax(-1) > float("-inf") if edited else None, logprobs)

    def guess(self, logits: torch.Tensor, rows: list[Row], j: int) -> torch.Tensor:
        """Another model's idea of sample number ``j`` of each row: its logits fp32 [n, V], overwritten, take the same
        edits and the same noise -> ids int64 [n]. The drafts before it are filled in. Grammars are not asked."""
        plan = SamplePlan([_Sample(row, j, self.edits.get(row.slot)) for row in rows], rows)
        plan.random = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
        self._edit(logits, plan)
        return self._choose(logits, plan)

    # --- steps of sample

    def _choose(self, logits: torch.Tensor, plan: SamplePlan, greedy: torch.Tensor | None = None) -> torch.Tensor:
        """Edited logits fp32 [S, V] -> ids int64 [S]. ``greedy``: their argmax, where known; overwritten."""
        if len(plan.random) < len(plan.samples):
            ids = self._argmax(logits) if greedy is None else greedy
        else:
            ids = torch.zeros(len(plan.samples), dtype=torch.int64, device=self._device)
        if plan.random:
            self._draw(logits, plan, ids)
        return ids

    def _edit(self, logits: torch.Tensor, plan: SamplePlan) -> bool:
        """In place; True if any row could have lost every token."""
        penalised: list[int] = []
        edited = False
        for i, sample in enumerate(plan.samples):
            if (edits := sample.edits) is None:
                continue
            edited = True
            if edits.any_but_penalties:
                emitted = sample.position - sample.row.num_prompt
                self.edits.apply_to_row(logits[i], edits, emitted, self._drafts(sample))
            if edits.pool_row >= 0:
                penalised.append(i)
        if penalised:
            samples = [plan.samples[i] for i in penalised]
            edits_of = [s.edits for s in samples if s.edits is not None]
            self.edits.penalise(logits, penalised, edits_of, [self._drafts(s) for s in samples])
        return edited

    def _mask(self, logits: torch.Tensor, rows: list[Row]) -> bool:
        """Grammar masks, in one copy to the device; True if there were any."""
        masks: list[np.ndarray] = []
        where: list[int] = []
        at = 0
        for row in rows:
            if row.mask is not None and row.num_samples:
                assert not callable(row.mask), "masks are made before they are applied"
                masks.append(row.mask)
                where += range(at, at + row.num_samples)
            at += row.num_samples
        if len(where) == at:
            apply_bitmask(logits, np.concatenate(masks))
        elif where:
            index = self._put(where)
            masked = logits[index]
            apply_bitmask(masked, np.concatenate(masks))
            logits[index] = masked
        return bool(where)

    def _drafts(self, sample: _Sample) -> torch.Tensor:
        """Draft ids that precede a sample of speculative verification, int64 [j]."""
        drafts = sample.row.drafts[: sample.j]
        return self._put(drafts.astype(np.int64))

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The first of equals. On a CPU in two stages, because torch's argmax over a long row does not vectorise."""
        if self._largest is not None:
            return self._largest(logits)[0]
        if not self._block:
            return logits.argmax(-1)
        blocks = logits.unflatten(-1, (-1, self._block))
        best = blocks.amax(-1).argmax(-1, keepdim=True)
        inside = blocks.gather(1, best[..., None].expand(-1, 1, self._block)).squeeze(1).argmax(-1)
        return best.squeeze(-1) * self._block + inside

    def _draw(self, logits: torch.Tensor, plan: SamplePlan, ids: torch.Tensor) -> None:
        """Fills ``ids`` of the random rows."""
        options = [plan.samples[i].row.sampling for i in plan.random]
        seeds = np.array([o.seed for o in options], np.uint64)
        positions = np.array([plan.samples[i].position for i in plan.random], np.int64)
        keys = self._put(noise.keys(seeds, positions))
        where = self._put(plan.random)
        temperature = self._put(np.array([o.temperature for o in options], np.float32))
        scaled = (logits if len(plan.random) == len(plan.samples) else logits[where]) / temperature[:, None]
        filtered = [i for i, o in enumerate(options) if _filters_anything(o, logits.shape[-1])]
        drawn = torch.empty(len(options), dtype=torch.int64, device=self._device)
        whole = list(range(len(options)))
        if filtered:
            whole = sorted(set(whole) - set(filtered))
            chosen = [options[i] for i in filtered]
            at = self._put(filtered)
            drawn[at] = self._draw_filtered(scaled if not whole else scaled[at], keys[at], chosen)
        if whole:
            at = self._put(whole)
            drawn[at] = self._draw_whole(scaled if not filtered else scaled[at], keys[at])
        ids[where] = drawn

    def _draw_whole(self, scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cpu":
            return (scaled + noise.gumbel(keys, self._vocab_ids)).argmax(-1)
        step = max(1, _NOISE_BLOCK // scaled.shape[1])
        parts = [
            self._argmax(noise.gumbel(keys[i : i + step], self._vocab_ids).add_(scaled[i : i + step]))
            for i in range(0, len(scaled), step)
        ]
        return torch.cat(parts)

    def _draw_filtered(self, scaled: torch.Tensor, keys: torch.Tensor, options: list[Sampling]) -> torch.Tensor:
        filters = Filters(
            self._put([o.top_k for o in options]),
            self._put(np.array([o.top_p for o in options], np.float32)),
            self._put(np.array([o.min_p for o in options], np.float32)),
        )
        if self._device.type != "cpu":
            return self._draw_floored(scaled, keys, filters, max(o.top_k for o in options))
        values, ids, certain = short(scaled, filters)
        best = (values + noise.gumbel(keys, ids.to(torch.int32))).argmax(-1, keepdim=True)
        drawn = ids.gather(-1, best).squeeze(-1)
        if not bool(certain.all()):
            rest = (~certain).nonzero().squeeze(-1)
            widest = max(options[i].top_k for i in rest.tolist())
            drawn[rest] = self._draw_floored(scaled[rest], keys[rest], filters.select(rest), widest)
        return drawn

    def _draw_floored(self, scaled: torch.Tensor, keys: torch.Tensor, filters: Filters, max_top_k: int) -> torch.Tensor:
        floor = floors(scaled, filters, max_top_k)
        return self._draw_whole(scaled.masked_fill(scaled < floor, float("-inf")), keys)

    def advance(self, plan: SamplePlan, ids: torch.Tensor) -> None:
        """Newest ids (int32 or int64) per slot, and the state of the edits. Of a speculative row's samples, those up to
        the first that differs from its draft become tokens."""
        slots: list[int] = []
        ends: list[int] = []
        at = 0
        for row in plan.rows:
            n = row.num_samples
            edits = self.edits.get(row.slot) if n else None
            if n == 1:
                slots.append(row.slot)
                ends.append(at)
                if edits is not None:
                    self.edits.advance(edits, ids[at : at + 1], self._one)
            elif n > 1:
                drafts = self._put(row.drafts.astype(np.int64))
                agreed = (ids[at : at + n - 1] == drafts).to(torch.int32).cumprod(0)
                kept = torch.cat((self._one, agreed.to(torch.int32)))
                self.last[row.slot] = ids[at : at + n].take(kept.sum() - 1)  # an index that is a tensor would wait
                if edits is not None:
                    self.edits.advance(edits, ids[at : at + n], kept)
            at += n
        if slots:
            where = self._put(slots)
            newest = ids if len(ends) == len(ids) else ids[self._put(ends)]
            self.last[where] = newest.to(self.last.dtype)

    def _put(self, values: list[int] | np.ndarray) -> torch.Tensor:
        """On the device; through pinned memory, because a copy from pageable memory waits for the steps before."""
        host = torch.from_numpy(np.asarray(values))
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)

    @property
    def _one(self) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device=self._device)


def _filters_anything(o: Sampling, vocab: int) -> bool:
    return 0 < o.top_k < vocab or o.top_p < 1 or o.min_p > 0


def _block_size(vocab: int) -> int:
    """The largest power of two up to 512 that divides the vocabulary; 0 where none of at least 16 does."""
    block = 512
    while vocab % block:
        block //= 2
    return block if block >= 16 else 0


def apply_bitmask(logits: torch.Tensor, mask: np.ndarray | torch.Tensor) -> None:
    """Forbids, in place on [n, V], the ids whose bit is 0 in ``mask``, int32 [n, ceil(V / 32)], low bit first."""
    words = torch.as_tensor(mask).view(torch.uint8).view(logits.shape[0], -1)
    if logits.device.type != "cpu":
        # From pinned memory, or the copy would wait for the forward pass.
        words = words.pin_memory().to(logits.device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((words[..., None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits.masked_fill_(forbidden, float("-inf"))


def top_logprobs(raw: torch.Tensor, ids: torch.Tensor, rows: list[int], wanted: list[int]) -> TopLogprobs:
    """``raw`` log-probabilities [n, V] of ``rows``; chosen ids int64 [n]; ``wanted`` likeliest per row."""
    chosen = raw.gather(-1, ids[:, None])
    rank = (raw >= chosen).sum(-1)
    values, top = raw.topk(min(max(wanted), raw.shape[-1]), dim=-1)
    return TopLogprobs(rows, wanted, chosen.squeeze(-1), rank, values, top)
