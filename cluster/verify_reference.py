"""What ``everwarm verify`` holds the engine to: transformers' model, one request at a time, a token at a time.

Nothing of the engine is used but the definition of the sampling noise (:mod:`replica.noise`), which turns the same
logits into the same random token.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replica import noise
from router.wire import Sampling


@dataclass(frozen=True)
class Asked:
    """One request: greedy, or drawn at temperature 1 with ``seed``; ``only`` ids are allowed, () for all."""

    prompt: tuple[int, ...]
    count: int
    seed: int | None = None
    only: tuple[int, ...] = ()

    def sampling(self, **changes: Any) -> Sampling:
        base = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return Sampling(**{"max_tokens": self.count, "allowed_token_ids": self.only, **base, **changes})


@dataclass(frozen=True)
class Expected:
    """ids [count]; logprobs fp32 [count, vocab]; margin: by how much each id won over the next best, noise included."""

    ids: list[int]
    logprobs: torch.Tensor
    margin: list[float]


def workload(vocab_size: int, count: int, seed: int = 0) -> list[Asked]:
    """Requests around page boundaries: one trunk cut at many lengths, other tails on it, a prompt asked twice, a
    repetitive one for prompt lookup, single tokens, outputs of one and of three ids only (whose guesses must come
    right), and draws with a seed."""
    rng = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(length))

    trunk, motif = ids(80), ids(5)
    greedy = [trunk[:n] for n in (1, 15, 16, 17, 33, 80)]
    greedy += [trunk[:40] + ids(9), trunk[:48] + ids(20), trunk, motif * 9, ids(2)]
    drawn = [trunk[:33] + ids(3), motif * 6, ids(50)]
    few = [Asked(trunk[:20], count, only=motif[:1]), Asked(motif * 4, count, only=motif[:3])]
    return [*(Asked(p, count) for p in greedy), *(Asked(p, count, 100 + i) for i, p in enumerate(drawn)), *few]


class Steps:
    """transformers' ``model`` a token at a time, with its own cache."""

    def __init__(self, model: Any, prompt: tuple[int, ...]) -> None:
        self._model, self._cache = model, None
        self._device = next(model.parameters()).device
        # Its name changes in transformers 5.2x.
        self._keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._tokens = list(prompt)

    def logprobs(self) -> torch.Tensor:
        """fp32 [vocab] of the token that comes next."""
        tokens = torch.tensor([self._tokens], device=self._device)
        out = self._model(input_ids=tokens, use_cache=True, **{self._keyword: self._cache})
        self._cache = out[self._keyword]
        return torch.log_softmax(out.logits[0, -1].float().cpu(), -1)

    def append(self, token: int) -> None:
        self._tokens = [token]


def expect(model: Any, asked: Asked) -> Expected:
    """transformers' ``model`` on one request."""
    steps = Steps(model, asked.prompt)
    only = torch.tensor(asked.only, dtype=torch.int64)
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    margin: list[float] = []
    with torch.inference_mode():
        for step in range(asked.count):
            rows.append(steps.logprobs())
            scores = rows[-1]
            if asked.seed is not None:
                scores = scores + _noise(asked.seed, len(asked.prompt) + step, len(scores))
            if asked.only:
                scores = torch.full_like(scores, float("-inf")).index_copy_(0, only, scores[only])
            best, at = scores.topk(2)
            ids.append(int(at[0]))
            margin.append(float(best[0] - best[1]))
            steps.append(ids[-1])
    return Expected(ids, torch.stack(rows), margin)


def own_gaps(model: Any, asked: Asked, expected: Expected, top: int) -> torch.Tensor:
    """By how much ``model``, given the expected tokens, differs from the expected log-probabilities: of each token and
    of the ``top`` that it thinks likeliest, fp32 [count * (1 + top)]."""
    steps = Steps(model, asked.prompt)
    gaps = []
    with torch.inference_mode():
        for token, row in zip(expected.ids, expected.logprobs, strict=True):
            own = steps.logprobs()
            picked = torch.cat([torch.tensor([token]), own.topk(top).indices])
            gaps.append((own - row)[picked].abs())
            steps.append(token)
    return torch.cat(gaps)


def _noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel noise of one position, fp32 [vocab]."""
    key = torch.from_numpy(noise.keys(np.array([seed], np.uint64), np.array([position])))
    return noise.gumbel(key, torch.arange(vocab_size, dtype=torch.int32))[0]
