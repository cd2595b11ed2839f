"""Cache on = cache off, alone = in a crowd, streamed = whole, whatever the chunk size: token for token, over HTTP.

The whole grid runs in this process, with all that a cluster has but Ray; its two far ends and the small pool run as
deployments.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import stack

on_ray = pytest.mark.ray
pytestmark = pytest.mark.timeout(240, func_only=True)
CHUNKS: dict[str, dict[str, Any]] = {
    "32": {"chunk_size": 32}, "64": {"chunk_size": 64}, "unlimited": {"chunked_prefill": False},
}  # fmt: skip
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 511, 513)
TOKENS = 10
PAGE = 16
Answers = dict[tuple[int, bool], list[int]]
"""(prompt length, sampled) -> token ids."""


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


def body_of(prompt: list[int], *, sampled: bool, tokens: int = TOKENS) -> dict[str, Any]:
    how = {"temperature": 1, "seed": len(prompt)} if sampled else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **how}


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], *, stream: bool) -> tuple[list[int], int]:
    """Token ids and cached_tokens."""
    if not stream:
        response = await client.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    ids: list[int] = []
    usage: dict[str, Any] = {}
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line[6:] async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
    return ids, usage["prompt_tokens_details"]["cached_tokens"]


CASES = [(length, sampled) for length in LENGTHS for sampled in (False, True)]


async def alone(client: httpx.AsyncClient, url: str, *, stream: bool) -> tuple[Answers, dict[int, int]]:
    answers, cached = {}, {}
    for length, sampled in CASES:
        ids, hits = await ask(client, url, body_of(prompt_of(length), sampled=sampled), stream=stream)
        answers[length, sampled], cached[length] = ids, hits
    return answers, cached


async def crowded(client: httpx.AsyncClient, url: str, *, stream: bool, salt: str) -> Answers:
    """Sixteen at a time: nine cases and seven strangers, whose prompts no other round has seen."""
    answers: Answers = {}
    for sampled in (False, True):
        rng = random.Random(f"{salt} {stream} {sampled}")
        strangers = [[rng.randrange(256) for _ in range(rng.randrange(5, 90))] for _ in range(16 - len(LENGTHS))]
        prompts = [prompt_of(length) for length in LENGTHS] + strangers
        bodies = [body_of(prompt, sampled=sampled) for prompt in prompts]
        results = await asyncio.gather(*(ask(client, url, body, stream=stream) for body in bodies))
        for length, (ids, _) in zip(LENGTHS, results, strict=False):
            answers[length, sampled] = ids
    return answers


def differences(expected: Answers, got: Answers) -> list[str]:
    return [f"{case}: {expected[case]} became {got[case]}" for case in expected if expected[case] != got[case]]


async def compare(client: httpx.AsyncClient, url: str, name: str, expected: Answers) -> None:
    """Every way of asking the app of this name ("cache=on,chunk=32") against ``expected``; and that it is that app."""
    for stream in (False, True):
        got, cached = await alone(client, url, stream=stream)
        assert not differences(expected, got), f"{name}, alone, stream={stream}"
        hits = {n: (n - 1) // PAGE * PAGE if name.startswith("cache=on") else 0 for n in LENGTHS}
        assert cached == hits, f"{name}: each prompt had come before"
        got = await crowded(client, url, stream=stream, salt=name)
        assert not differences(expected, got), f"{name}, in a crowd, stream={stream}"
    engine = (await client.get(f"{url}/v1/engine")).json()["data"][0]
    config = engine["config"]
    assert config["prefix_caching"] == name.startswith("cache=on") and config["dtype"] == "float32"
    wanted = name.partition("chunk=")[2]
    assert config["chunked_prefill"] == (wanted != "unlimited")
    assert wanted == "unlimited" or config["chunk_size"] == int(wanted)


async def reference(client: httpx.AsyncClient, url: str) -> Answers:
    expected, _ = await alone(client, url, stream=False)
    assert all(len(ids) == TOKENS for ids in expected.values())
    assert len(set(map(tuple, expected.values()))) == len(CASES), "prompts and sampling must matter"
    return expected


async def test_cache_chunk_crowd_and_stream_change_no_token(tiny: Path) -> None:
    expected: Answers = {}
    for chunk in reversed(CHUNKS):
        for cache in ("off", "on"):
            async with stack(str(tiny), 1, max_num_pages=1024, prefix_caching=cache == "on", **CHUNKS[chunk]) as made:
                expected = expected or await reference(made.http, "")
                await compare(made.http, "", f"cache={cache},chunk={chunk}", expected)


@on_ray
async def test_deployments_change_no_token(matrix: dict[str, str]) -> None:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=32)) as client:
        expected = await reference(client, matrix["cache=off,chunk=unlimited"])
        for name in ("cache=off,chunk=unlimited", "cache=on,chunk=32"):
            await compare(client, matrix[name], name, expected)


@on_ray
async def test_a_pool_too_small_preempts_and_changes_no_token(matrix: dict[str, str]) -> None:
    """Sixteen requests that need 16 x 16 pages at their ends share 47."""
    prompts = [prompt_of(100 + index) for index in range(16)]
    bodies = [body_of(prompt, sampled=index % 2 == 1, tokens=150) for index, prompt in enumerate(prompts)]
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=32)) as client:
        roomy = matrix["cache=on,chunk=32"]
        expected = await asyncio.gather(*(ask(client, roomy, body, stream=False) for body in bodies))
        engine = (await client.get(f"{roomy}/v1/engine")).json()["data"][0]
        assert engine["counters"]["preemptions"] == 0
        small = matrix["pressure"]
        for stream in (False, True):
            got = await asyncio.gather(*(ask(client, small, body, stream=stream) for body in bodies))
            assert [ids for ids, _ in got] == [ids for ids, _ in expected]
            assert all(len(ids) == 150 for ids, _ in got)
        engine = (await client.get(f"{small}/v1/engine")).json()["data"][0]
        assert engine["counters"]["preemptions"] > 0
        pages = engine["pages"]
        assert pages["held"] == 0 and pages["free"] + pages["cached"] == pages["all"] == 47
