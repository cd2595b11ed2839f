"""Scores and sampling options through HTTP, held against transformers on the same weights in fp32."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from stack import Stack, stack
from transformers import AutoModelForCausalLM
from transformers.generation import logits_process as lp

TOKENS = 8
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(256) for _ in range(RNG.randrange(3, 40))] for _ in range(20)]
STOP = 101
ALLOWED = list(range(30, 90))


class OutputPenalty(lp.LogitsProcessor):
    """OpenAI's formula; transformers has none of its own."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self._num_prompt, self._frequency, self._presence = num_prompt, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1])[None]
        return scores - counts * self._frequency - (counts > 0) * self._presence


# In the order that transformers' own generate has them.
Processors = list[lp.LogitsProcessor]
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, lambda n: []),
    "repetition": ({"repetition_penalty": 1.6}, lambda n: [lp.RepetitionPenaltyLogitsProcessor(1.6)]),
    "frequency": ({"frequency_penalty": 2}, lambda n: [OutputPenalty(n, 2.0, 0)]),
    "presence": ({"presence_penalty": 2.0}, lambda n: [OutputPenalty(n, 0, 2.0)]),
    "bias": (
        {"logit_bias": {"40": 9, "41": 8.5, "42": -50}},
        lambda n: [lp.SequenceBiasLogitsProcessor([[[40], 9.0], [[41], 8.5], [[42], -50.0]])],
    ),
    "allowed": ({"allowed_token_ids": ALLOWED}, lambda n: [lp.PrefixConstrainedLogitsProcessor(lambda *_: ALLOWED, 1)]),
    "stop": (
        {"logit_bias": {str(STOP): 20}, "stop_token_ids": [STOP], "min_tokens": 5},
        lambda n: [
            lp.SequenceBiasLogitsProcessor([[[STOP], 20.0]]),
            lp.MinNewTokensLengthLogitsProcessor(n, 5, STOP, device="cpu"),
        ],
    ),
    "all": (
        {"repetition_penalty": 1.3, "logit_bias": {"40": 4}, "bad_words": ["("], "allowed_token_ids": ALLOWED},
        lambda n: [
            lp.SequenceBiasLogitsProcessor([[[40], 4.0]]),
            lp.RepetitionPenaltyLogitsProcessor(1.3),
            lp.PrefixConstrainedLogitsProcessor(lambda *_: ALLOWED, 1),
        ],
    ),
}
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "bad_words": [],
    "min_tokens": 0, "stop_token_ids": [], "top_p": 1, "top_k": 0, "min_p": 0, "stop": [],
}  # fmt: skip
DRAWN: dict[str, dict[str, Any]] = {
    "plain": {}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.3}, "min_p": {"min_p": 0.4},
    "temperature": {"temperature": 0.3}, "seed": {"seed": 99},
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.eval()
    return model


async def complete(made: Stack, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **fields}
    response = await made.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def ids_of(made: Stack, prompt: list[int], **fields: Any) -> list[int]:
    ids: list[int] = (await complete(made, prompt, ignore_eos=True, **fields))["choices"][0]["token_ids"]
    return ids


@torch.no_grad()
def greedy(model: Any, prompt: list[int], processors: Processors, stop: int | None) -> list[int]:
    ids = torch.tensor([prompt])
    while ids.shape[1] < len(prompt) + TOKENS:
        scores = model(ids).logits[:, -1]
        for processor in processors:
            scores = processor(ids, scores)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
        if stop is not None and ids[0, -1] == stop:
            break
    return ids[0, len(prompt) :].tolist()


async def test_penalties_and_processors_equal_transformers_on_20_prompts(tiny: Path, reference: Any) -> None:
    """All options at once in mixed batches: so no neighbour's options change a request either."""
    async with stack(str(tiny), 1, max_num_pages=1024) as made:
        asked = [(name, index) for index in range(len(PROMPTS)) for name in OPTIONS]
        got = dict(
            zip(
                asked,
                await asyncio.gather(*(ids_of(made, PROMPTS[i], **OPTIONS[name][0]) for name, i in asked)),
                strict=True,
            )
        )
        for name, index in asked:
            prompt = PROMPTS[index]
            processors = OPTIONS[name][1](len(prompt))
            if name == "all":
                paren = made.api.services.card.tokenizer.encode("(", add_special_tokens=False)
                processors.append(lp.NoBadWordsLogitsProcessor([paren], eos_token_id=None))
            expected = greedy(reference, prompt, processors, STOP if name == "stop" else None)
            assert got[name, index] == expected, f"{name}, prompt {index}"
        for name in OPTIONS:
            changed = sum(got[name, index] != got["plain", index] for index in range(len(PROMPTS)))
            assert (changed >= 5) == (name != "plain"), f"{name} changed {changed} of 20 answers"
        for index in range(5):
            assert await ids_of(made, PROMPTS[index], **NEUTRAL) == got["plain", index]


async def test_drawing_options_change_draws_and_no_neighbour(tiny: Path) -> None:
    async with stack(str(tiny), 1, max_num_pages=1024) as made:
        how = {name: {"temperature": 1, "seed": 4, **fields} for name, fields in DRAWN.items()}
        asked = [(name, index) for index in range(6) for name in how]
        alone = [await ids_of(made, PROMPTS[index], **how[name]) for name, index in asked]
        mixed = await asyncio.gather(*(ids_of(made, PROMPTS[index], **how[name]) for name, index in asked))
        assert mixed == alone
        answers = dict(zip(asked, alone, strict=True))
        for name in DRAWN:
            changed = sum(answers[name, index] != answers["plain", index] for index in range(6))
            assert (changed >= 4) == (name != "plain"), f"{name} changed {changed} of 6 answers"


@torch.no_grad()
def log_likelihoods(model: Any, ids: list[int]) -> tuple[list[float], list[int]]:
    """Of each token but the first; and the likeliest at its place."""
    scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    own = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return own.tolist(), scores[:-1].argmax(-1).tolist()


async def test_echoed_log_likelihoods_equal_a_forward_pass(tiny: Path, reference: Any) -> None:
    """As lm_eval asks for them: lists of token ids, echo, one token; and the same as text."""
    async with stack(str(tiny), 1, max_num_pages=1024) as made:
        tokenizer = made.api.services.card.tokenizer
        fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
        batch = [*PROMPTS[:8], [RNG.randrange(256) for _ in range(700)]]
        by_ids = (await complete(made, batch, **fields))["choices"]
        again = (await complete(made, batch, **fields))["choices"]
        text = "Überall 日本, und 👩‍👩‍👧."
        by_text = (await complete(made, text, **fields))["choices"]
        encoded = tokenizer.encode(text, add_special_tokens=True)
        scored = [c["logprobs"] for c in [*by_ids, *by_text]]
        for ids, logprobs in zip([*batch, encoded], scored, strict=True):
            own, likeliest = log_likelihoods(reference, ids)
            assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == len(ids) + 1
            assert logprobs["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-4)
            # lm_eval's is_greedy: the token itself is the likeliest of those listed.
            listed = [max(top, key=top.get) for top in logprobs["top_logprobs"][1:-1]]
            greedy_here = [best == token for best, token in zip(listed, logprobs["tokens"][1:-1], strict=True)]
            assert greedy_here == [best == token for best, token in zip(likeliest, ids[1:], strict=True)]
        for first, second in zip(by_ids, again, strict=True):
            values = (choice["logprobs"]["token_logprobs"][1:-1] for choice in (first, second))
            assert next(values) == pytest.approx(next(values), abs=1e-4)
