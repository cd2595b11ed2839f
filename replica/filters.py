"""min_p, top-k and top-p as one thing: a floor under the logits of a row, found without sorting the vocabulary.

Each of the three keeps the tokens above some value, so together they keep those above the largest of three floors
(tokens equal to a floor stay). Two ways to find it: :func:`short` looks at the ``SHORT`` likeliest tokens, which nearly
always hold all that stay; :func:`floors` is exact for every row and needs no copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHORT = 256
_BITS_OF_ONE = 0x3F800000


@dataclass(frozen=True)
class Filters:
    """Per row, [S] each: top_k int64 (0: off), top_p and min_p fp32 (1 and 0: off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def select(self, rows: torch.Tensor) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def floors(logits: torch.Tensor, filters: Filters, max_top_k: int) -> torch.Tensor:
    """The floor of each row of logits [S, V] (divided by temperature already) -> fp32 [S, 1].

    ``max_top_k`` is the largest top_k of the rows, known on the host. min_p is relative to the likeliest token; top-k
    counts what min_p left; top-p is of the mass that both left, as in vLLM.
    """
    vocab = logits.shape[-1]
    floor = logits.amax(-1, keepdim=True) + filters.min_p[:, None].log()
    if max_top_k > 0:
        limited = ((filters.top_k > 0) & (filters.top_k < vocab))[:, None]
        kept = min(max_top_k, vocab)
        index = filters.top_k.clamp(1, kept)[:, None] - 1
        kth = logits.topk(kept, dim=-1).values.gather(-1, index)
        floor = torch.where(limited, torch.maximum(floor, kth), floor)
    probs = torch.softmax(logits.masked_fill(logits < floor, float("-inf")), dim=-1)
    nucleus = _nucleus(probs, filters.top_p)
    # Masked tokens have probability 0, below any threshold of a row that top-p limits.
    least = logits.masked_fill(probs < nucleus, float("inf")).amin(-1, keepdim=True)
    return torch.where((filters.top_p < 1)[:, None], torch.maximum(floor, least), floor)


def _nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The largest t with sum(p >= t) >= top_p, fp32 [S, 1]: bisection over its bits, which order as positive floats.
    The likeliest token stays whatever top_p is: in fp32 a tiny one is 0."""
    low = torch.zeros(probs.shape[0], 1, dtype=torch.int32, device=probs.device)
    high = torch.full_like(low, _BITS_OF_ONE + 1)
    for _ in range(31):
        middle = low + (high - low) // 2
        threshold = middle.view(torch.float32)
        mass = probs.masked_fill(probs < threshold, 0).sum(-1, keepdim=True, dtype=torch.float64)
        enough = (mass >= top_p[:, None]) & (mass > 0)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32)


def short(logits: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same from the ``SHORT`` likeliest tokens: (their logits [S, n] with -inf below the floor, their ids [S, n],
    certain [S] bool). Where ``certain`` is False, a token that stays may be missing and :func:`floors` must decide."""
    vocab = logits.shape[-1]
    values, ids = logits.topk(min(SHORT, vocab), dim=-1)
    count = values.shape[-1]
    floor = values[:, :1] + filters.min_p[:, None].log()
    limited = (filters.top_k > 0) & (filters.top_k < vocab)
    in_reach = ~limited | (filters.top_k <= count)
    kth = values.gather(-1, (filters.top_k.clamp(1, count) - 1)[:, None])
    floor = torch.where(limited[:, None], torch.maximum(floor, kth), floor)
    # With a floor inside the short list the mass is that of the list; with none, of the vocabulary.
    bounded = values[:, -1:] < floor
    known = bounded.squeeze(-1) | floor.isneginf().squeeze(-1)
    masked = values.masked_fill(values < floor, float("-inf"))
    total = torch.where(bounded, masked.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    mass = (masked - total).exp().to(torch.float64).cumsum(-1)
    reached = mass >= filters.top_p[:, None]
    nucleus = filters.top_p < 1
    last = torch.where(reached.any(-1), reached.int().argmax(-1), count - 1)
    least = values.gather(-1, last[:, None])
    floor = torch.where(nucleus[:, None], torch.maximum(floor, least), floor)
    complete = (values[:, -1:] < floor).squeeze(-1) | (count == vocab)
    certain = complete & in_reach & (known & reached.any(-1) | ~nucleus | (count == vocab))
    return values.masked_fill(values < floor, float("-inf")), ids, certain
