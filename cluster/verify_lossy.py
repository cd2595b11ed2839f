"""How far options that lose precision move the model: measured against transformers, and against themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from cluster.verify_reference import Asked, Expected
from replica.llm import LLM
from router.wire import Logprob, Sampling

LIKELIEST = 64
"""Tokens told apart in the divergence; all others count as one."""


@dataclass(frozen=True)
class Loss:
    """Of one option. ``refused``: why this model can't run with it; nothing was measured then."""

    option: str
    agreement: float = 0.0
    kl_mean: float = 0.0
    """Nats. A lower bound, as the unlikely tokens are not told apart."""
    kl_max: float = 0.0
    same_tokens: float = 0.0
    """Share of the output before the first token that differs, generating freely."""
    alone_as_in_a_crowd: bool = False
    positions: int = 0
    refused: str | None = None


def measure(
    option: str,
    engine: Callable[..., AbstractContextManager[LLM]],
    asked: Sequence[Asked],
    expected: Sequence[Expected],
) -> Loss:
    """``engine(**options)`` opens one with the option on. Raises ValueError when it can't."""
    prompts = [a.prompt for a in asked]
    with engine() as llm:
        free = [out.ids for out in llm.generate(prompts, [a.sampling() for a in asked])]
    with engine(max_batch_size=1) as llm:
        alone = [out.ids for out in llm.generate(prompts, [a.sampling() for a in asked])]
    # In chunks of a page, so that what is read back from the cache is what the option made of it.
    with engine(chunk_size=16) as llm:
        whole = [(*a.prompt, *e.ids[:-1]) for a, e in zip(asked, expected, strict=True)]
        wanted = Sampling(temperature=0, max_tokens=1, prompt_logprobs=LIKELIEST, logprobs=LIKELIEST)
        scored = llm.generate(whole, wanted)
    same: list[bool] = []
    divergences: list[float] = []
    for a, e, out in zip(asked, expected, scored, strict=True):
        rows = [*(out.prompt_logprobs or [])[len(a.prompt) :], *(out.logprobs or [])]
        for want, reference, row in zip(e.ids, e.logprobs, rows, strict=True):
            assert row is not None
            same.append(row.top[0][0] == want)
            divergences.append(divergence(reference, row))
    kept = [_shared(e.ids, ids) / len(e.ids) for e, ids in zip(expected, free, strict=True)]
    return Loss(
        option,
        float(np.mean(same)),
        float(np.mean(divergences)),
        max(divergences),
        float(np.mean(kept)),
        free == alone,
        len(same),
    )


def divergence(reference: torch.Tensor, row: Logprob) -> float:
    """KL(reference || row) in nats over the tokens that ``row`` lists and all others together. reference: fp32 [vocab],
    log-probabilities."""
    ids = torch.tensor([token for token, _ in row.top])
    theirs = reference[ids].double()
    ours = torch.tensor([value for _, value in row.top], dtype=torch.float64)
    rest, our_rest = (float((1 - x.exp().sum()).clamp_min(1e-12)) for x in (theirs, ours))
    listed = float((theirs.exp() * (theirs - ours)).sum())
    others = rest * float(np.log(rest / our_rest)) if len(ids) < len(reference) else 0.0
    return max(0.0, listed + others)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
