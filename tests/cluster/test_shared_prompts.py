"""``n`` answers to one prompt: replicas and a router as in production, but in this process and without Ray."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tiny import write_tiny_llama

from cluster.build import open_replica, open_router
from replica.config import EngineConfig
from replica.loop import Engine
from router.api.options import ApiOptions
from router.dispatch import DispatchOptions

SECRET = "a secret of these tests"
PAGE = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


@asynccontextmanager
async def served(model: str, count: int, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[Engine]]]:
    config = EngineConfig(device="cpu", threads=1, max_num_pages=512, **options)
    replicas = [await asyncio.to_thread(open_replica, model, config, SECRET, f"r{i}") for i in range(count)]
    router, app = open_router(model, "tiny", ApiOptions(), DispatchOptions(), SECRET, "router")
    try:
        for engine, _ in replicas:
            engine.start()
        router.update_replicas({f"r{i}": await server.start("127.0.0.1") for i, (_, server) in enumerate(replicas)})
        await router.start()
        while not router.directory(0)["in_sync"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://everwarm", timeout=60) as client:
            yield client, [engine for engine, _ in replicas]
    finally:
        await router.close()
        for engine, server in replicas:
            await server.close()
            await asyncio.to_thread(engine.stop)


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
