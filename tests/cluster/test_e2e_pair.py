"""Two replicas, two routers: one prefix cache, and a death that only shows as a pause."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from typing import Any

import httpx
import pytest
from conftest import Deployed

from cluster.bench.load import StreamRecord
from cluster.private import wait_ready

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240, func_only=True)]
PAGE = 16


def words(rng: random.Random, count: int) -> str:
    """ASCII text of exactly ``count`` tokens: the tiny model has one token per byte."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz     ") for _ in range(count))


async def chat(client: httpx.AsyncClient, url: str, system: str, user: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 4, **fields}
    response = await client.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def both_directories(client: httpx.AsyncClient, url: str) -> dict[str, dict[str, Any]]:
    """Each router's view, by router; the proxy picks one per request."""
    views: dict[str, dict[str, Any]] = {}
    for _ in range(200):
        view = (await client.get(f"{url}/v1/directory?top=100")).json()
        views[view["router"]] = view
        if len(views) == 2 and all(v["in_sync"] for v in views.values()):
            return views
    raise AssertionError(f"two routers in sync were not seen: {list(views)}")


async def test_prefixes_are_cached_cluster_wide_and_both_routers_know_where(pair: Deployed) -> None:
    """40 chats over 4 system prompts of 600 tokens, 8 at a time: only the first on a holder computes the prefix."""
    rng = random.Random(1)
    systems = [words(rng, 600) for _ in range(4)]
    gate = asyncio.Semaphore(8)
    async with httpx.AsyncClient(timeout=60) as client:

        async def one(index: int) -> tuple[int, int]:
            async with gate:
                answer = await chat(client, pair.url, systems[index % 4], f"question {index:3d}")
                return index % 4, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        cached: defaultdict[int, list[int]] = defaultdict(list)
        for system, tokens in await asyncio.gather(*(one(index) for index in range(40))):
            cached[system].append(tokens)
        await asyncio.sleep(0.3)
        first, second = (await both_directories(client, pair.url)).values()
    # Role marker, text, end marker, role marker and "question " are shared: 612 tokens, 38 full pages.
    shared = 612 // PAGE * PAGE
    holders = {p["hash"]: sorted(p["holders"]) for p in first["prefixes"] if p["tokens"] == shared}
    assert len(holders) == 4 and all(holders.values()), first["prefixes"]
    for system, tokens in cached.items():
        misses = [t for t in tokens if t < shared]
        assert len(tokens) == 10 and len(misses) <= pair.replicas, f"prompt {system}: {tokens}"
        assert misses, "the first request on a holder can't have found the prefix"
    total_holders = sum(map(len, holders.values()))
    assert sum(t < shared for ts in cached.values() for t in ts) <= total_holders
    seen_by_second = {p["hash"]: sorted(p["holders"]) for p in second["prefixes"] if p["tokens"] == shared}
    common = holders.keys() & seen_by_second.keys()
    assert common and all(holders[h] == seen_by_second[h] for h in common)
    assert [(r["replica"], r["digests"]) for r in first["replicas"]] == [
        (r["replica"], r["digests"]) for r in second["replicas"]
    ]
    assert first["pages"] == second["pages"] > 0


async def stream(
    url: str, prompt: list[int], *, tokens: int, seed: int | None, record: StreamRecord
) -> tuple[StreamRecord, list[int]]:
    """A streamed completion's record, filled as it goes, and token ids."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **({"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}),
    }
    ids: list[int] = []
    async with (
        httpx.AsyncClient(timeout=90) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                record.done = True
            elif line.startswith("data: "):
                record.arrivals.append(time.perf_counter())
                event = httpx.Response(200, text=line[6:]).json()
                assert "error" not in event, event
                record.usage = event.get("usage") or record.usage
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
    return record, ids


async def test_a_killed_replica_shows_as_a_pause_only(pair: Deployed) -> None:
    """kill -9 under 8 streams: exactly the tokens of an undisturbed run, then no failure, then it is back."""
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(40 + 7 * i)] for i in range(8)]
    seeds = [None if i % 2 else 1000 + i for i in range(8)]

    records: list[StreamRecord] = []

    async def all_streams() -> list[tuple[StreamRecord, list[int]]]:
        records[:] = [StreamRecord(time.perf_counter()) for _ in prompts]
        return await asyncio.gather(
            *(
                stream(pair.url, p, tokens=1500, seed=s, record=r)
                for p, s, r in zip(prompts, seeds, records, strict=True)
            )
        )

    undisturbed = await all_streams()
    assert all(len(ids) == 1500 for _, ids in undisturbed)
    assert len({tuple(ids) for _, ids in undisturbed}) == 8

    async with httpx.AsyncClient(timeout=30) as client:
        running = asyncio.create_task(all_streams())
        victim = await busiest(client, pair.url, records)
        os.kill(victim["pid"], signal.SIGKILL)
        killed_at = time.perf_counter()
        disturbed = await running
        survived = [r for r, _ in disturbed if r.arrivals[0] < killed_at < r.arrivals[-1]]
        assert len(survived) >= 4, "the kill came before or after the streams"
        for (_, expected), (record, ids), seed in zip(undisturbed, disturbed, seeds, strict=True):
            assert record.done and ids == expected, f"seed {seed}: differs after {common_prefix(ids, expected)} tokens"
            assert record.tokens == 1500
        failures = []
        while time.perf_counter() - killed_at < 3:
            response = await client.post(
                f"{pair.url}/v1/completions", json={"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}
            )
            if response.status_code != 200:
                failures.append(response.text)
        assert not failures
        await asyncio.to_thread(wait_ready, pair.url, 2, 60)
        names = {e["replica"] for e in (await client.get(f"{pair.url}/v1/engine")).json()["data"]}
        assert victim["replica"] not in names
        newcomer = await served_by_all(client, pair.url)
        assert newcomer, "the replacement never served a request"


async def busiest(client: httpx.AsyncClient, url: str, records: list[StreamRecord]) -> dict[str, Any]:
    """The engine with most running requests, once all 8 run and their clients have seen something."""
    for _ in range(400):
        engines = (await client.get(f"{url}/v1/engine")).json()["data"]
        if sum(e["load"]["running"] for e in engines) == 8 and all(record.arrivals for record in records):
            return max(engines, key=lambda e: e["load"]["running"])
    raise AssertionError(f"the streams never ran together: {[e['load'] for e in engines]}")


async def served_by_all(client: httpx.AsyncClient, url: str) -> bool:
    """Every engine listed has generated something, after a burst that one replica would not take alone."""
    rng = random.Random(3)
    for _ in range(10):
        prompts = [[rng.randrange(256) for _ in range(300)] for _ in range(8)]
        bodies = [{"model": "tiny", "prompt": p, "max_tokens": 8} for p in prompts]
        answers = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=b) for b in bodies))
        assert all(a.status_code == 200 for a in answers)
        engines = (await client.get(f"{url}/v1/engine")).json()["data"]
        if len(engines) == 2 and all(e["counters"]["generated_tokens"] for e in engines):
            return True
    return False


def common_prefix(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
