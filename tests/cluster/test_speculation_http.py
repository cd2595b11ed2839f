"""Several tokens in one delta: what the client sees is what it saw one by one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import served
from tiny import write_tiny_llama

SHARED = {"ignore_eos": True, "return_token_ids": True, "logprobs": 2, "max_tokens": 60}


def bodies() -> list[dict[str, Any]]:
    """Greedy, and sampled from few tokens, which repeat themselves."""
    prompt = [random.Random(2).randrange(97, 123) for _ in range(40)]
    few = {"prompt": prompt, "allowed_token_ids": [97, 98, 99], **SHARED}
    return [
        {"prompt": prompt, "temperature": 0, **SHARED},
        {**few, "temperature": 0},
        {**few, "temperature": 0.5, "seed": 1},
        {**few, "temperature": 0, "max_tokens": 17},
    ]


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The chunks, joined."""
    joined: dict[str, Any] = {"text": "", "token_ids": [], "tokens": [], "token_logprobs": []}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line[6:] async for line in response.aiter_lines() if line]
    for event in map(json.loads, lines[:-1]):
        for choice in event["choices"]:
            joined["text"] += choice["text"]
            joined["token_ids"] += choice.get("token_ids") or []
            joined["finish_reason"] = choice["finish_reason"]
            for name in ("tokens", "token_logprobs"):
                joined[name] += (choice.get("logprobs") or {}).get(name, [])
    return joined


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    values = zip(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"], strict=True)
    return (
        all(a[name] == b[name] for name in ("text", "token_ids", "finish_reason"))
        and a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
        and all(abs(x - y) < 1e-4 for x, y in values)
    )


@pytest.mark.parametrize("options", [
    {"speculative": "ngram"},
    {"speculative": "draft", "speculative_layers": 1},
])  # fmt: skip
async def test_speculating_and_streaming_change_no_answer(tmp_path: Path, options: dict[str, Any]) -> None:
    model = str(write_tiny_llama(tmp_path / "tiny"))
    async with served(model, 1) as (client, _):
        plain = [await whole(client, body) for body in bodies()]
        stop = plain[1]["text"][20:23]
        stopped = await whole(client, {**bodies()[1], "stop": [stop]})
        assert stopped["finish_reason"] == "stop" and len(stopped["token_ids"]) < 60
    async with served(model, 1, **options) as (client, (engine,)):
        for body, expected in zip(bodies(), plain, strict=True):
            assert same(await whole(client, body), expected)
            got = await streamed(client, body)
            assert all(got[name] == expected[name] for name in ("text", "token_ids", "finish_reason"))
            assert got["tokens"] == expected["logprobs"]["tokens"]
            assert got["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)
        assert same(await whole(client, {**bodies()[1], "stop": [stop]}), stopped)
        info = (await client.get("/v1/engine")).json()["data"][0]
        counters = info["counters"]
        assert 0 < counters["accepted_tokens"] <= counters["drafted_tokens"]
        assert info["config"]["speculative"] == options["speculative"]
        metrics = (await client.get("/metrics")).text
        line = f'spec_decode_num_accepted_tokens_total{{model_name="tiny",replica="r0"}} {counters["accepted_tokens"]}'
        assert line in metrics
        engine.check_invariants()
