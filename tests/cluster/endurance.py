"""Short requests of every kind, many of them: what must not make a router or a replica grow."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import psutil

AT_ONCE = 16
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
ABORTED = 0
"""Counted as a status: the client left before the answer."""


def asked(index: int) -> tuple[str, dict[str, Any], int]:
    """Path, body and expected status of the index-th request. Few prompts: cached pages are memory in use."""
    text = f"{'word ' * 20}{index % 64}"
    whole = {"prompt": text, "max_tokens": 8, "temperature": index % 2, "seed": index % 8}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": index % 8}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    kinds: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", {**whole, "stream": True}, 200),
        ("/v1/completions", whole, 200),
        ("/v1/completions", {**whole, "stream": True, "logprobs": 2}, 200),
        ("/v1/chat/completions", chat, 200),
        ("/v1/chat/completions", {**chat, "stream": True}, 200),
        ("/v1/chat/completions", {**chat, "response_format": form, "max_tokens": 24}, 200),
        ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required", "max_tokens": 24}, 200),
        ("/v1/completions", {**whole, "n": 2, "stop": ["e"]}, 200),
        ("/v1/completions", {**whole, "temperature": 9}, 400),
        ("/v1/messages", {"messages": chat["messages"], "max_tokens": 8}, 200),
        ("/v1/responses", {"input": text, "max_output_tokens": 8}, 200),
        ("/v1/completions", {**whole, "max_tokens": 1500, "ignore_eos": True, "stream": index % 24 < 12}, ABORTED),
    ]
    return kinds[index % len(kinds)]


async def ask(client: httpx.AsyncClient, url: str, index: int) -> int:
    """The status; ABORTED when this client left first. Raises AssertionError for an answer that is not as expected."""
    path, body, wanted = asked(index)
    if wanted == ABORTED:
        try:
            async with client.stream("POST", f"{url}{path}", json=body, timeout=0.2) as response:
                await anext(response.aiter_bytes(), b"")
        except httpx.ReadTimeout:
            pass
        return ABORTED
    response = await client.post(f"{url}{path}", json=body)
    assert response.status_code == wanted, f"{index}: {response.status_code} {response.text}"
    return wanted


async def load(url: str, first: int, count: int) -> Counter[int]:
    """Requests ``first`` to ``first + count``, ``AT_ONCE`` at a time. Returns how many ended with which status."""
    numbers = iter(range(first, first + count))
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=2 * AT_ONCE)) as client:

        async def worker() -> None:
            for number in numbers:
                statuses[await ask(client, url, number)] += 1

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return statuses


def rss_mib(pattern: str) -> dict[str, float]:
    """Resident memory of the processes whose title has ``pattern``, by the end of the title and pid."""
    out = {}
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if pattern in title:
            out[f"{title.rpartition(':')[2].strip()} {process.pid}"] = process.memory_info().rss / 2**20
    return out
