"""``n`` answers to one prompt: replicas and a router as in production, but in this process and without Ray."""

from __future__ import annotations

import random

import httpx
import pytest
from in_process import served
from tiny import write_tiny_llama

from replica.loop import Engine

PAGE = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


def computed(engines: list[Engine]) -> list[int]:
    """Prompt tokens that each replica computed so far."""
    return [engine.info()["counters"]["prompt_tokens"] for engine in engines]


async def ask(client: httpx.AsyncClient, prompt: list[int], n: int) -> tuple[list[list[int]], int]:
    """(token ids of each choice, cached tokens)."""
    body = {"prompt": prompt, "n": n, "seed": 5, "temperature": 1, "max_tokens": 6, "ignore_eos": True}
    response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"speculative": "ngram"}, {"chunk_size": 32}])
async def test_full_pages_are_computed_once_per_replica_and_the_rest_by_each(
    tiny: str, options: dict, replicas: int
) -> None:
    """Where the choices go is up to the placement; those that meet share."""
    rng, n = random.Random(1), 5
    async with served(tiny, replicas, **options) as (client, engines):
        for length in (1, 15, 16, 17, 31, 32, 33, 100, 250):
            prompt, before = [rng.randrange(256) for _ in range(length)], computed(engines)
            choices, cached = await ask(client, prompt, n)
            shared = (length - 1) // PAGE * PAGE  # whole pages, less the last token: its logits are needed
            spent = [after - earlier for after, earlier in zip(computed(engines), before, strict=True)]
            own = length - shared
            on_each = [1 + (tokens - length) // own for tokens in spent if tokens]
            assert sum(on_each) == n, "every choice was computed somewhere"
            assert [length + (count - 1) * own for count in on_each] == [tokens for tokens in spent if tokens]
            assert cached == 0, "the first choice computed the prompt"
            assert len(set(map(tuple, choices))) == n and all(len(ids) == 6 for ids in choices)
            again, cached = await ask(client, prompt, 1)
            assert again == choices[:1], "choice 0 is the answer for n = 1"
            assert cached == shared or len(on_each) < replicas
        for engine in engines:
            engine.check_invariants()
            assert engine.pool.counts()["held"] == 0


async def test_without_a_cache_every_choice_computes_everything_and_says_the_same(tiny: str) -> None:
    prompt = list(range(50, 150))
    async with served(tiny, 1) as (client, engines):
        shared, _ = await ask(client, prompt, 4)
    async with served(tiny, 1, prefix_caching=False) as (client, engines):
        assert (await ask(client, prompt, 4))[0] == shared
        assert sum(computed(engines)) == 4 * len(prompt)
