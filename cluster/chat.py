"""``everwarm chat``: a terminal conversation through the public API, streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from rich.console import Console

from cluster.client import Unreachable, connect, describe, get


def converse(
    url: str, keys: Sequence[str], system: str | None, temperature: float, max_tokens: int, console: Console
) -> int:
    """Reads turns from stdin until an empty line. Returns the exit status: 1 when the cluster can't be reached."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    with connect(url, keys) as client:
        try:
            model = get(client, "/v1/models")["data"][0]["id"]
        except Unreachable as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
        console.print(f"{model}; an empty line ends", style="dim", markup=False, highlight=False)
        while True:
            try:
                text = console.input("[bold]> [/]")
            except (EOFError, KeyboardInterrupt):
                return 0
            if not text.strip():
                return 0
            messages.append({"role": "user", "content": text})
            body = {"model": model, "messages": messages, "temperature": temperature, "max_tokens": max_tokens}
            try:
                answer = _answer(client, body, console)
            except (httpx.HTTPError, StreamError) as error:
                messages.pop()
                console.print(str(error), style="red", markup=False, highlight=False)
                continue
            messages.append({"role": "assistant", "content": answer})


class StreamError(Exception):
    """The server ended a stream with an error, or refused the request."""


def _answer(client: httpx.Client, body: dict[str, Any], console: Console) -> str:
    """Prints an answer as it comes, reasoning dimmed; returns its content."""
    parts: list[str] = []
    thinks = False
    usage: dict[str, Any] = {}
    for event in stream(client, body):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if thought := choice["delta"].get("reasoning_content"):
                thinks = True
                console.print(thought, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
            if piece := choice["delta"].get("content"):
                if thinks and not parts:
                    console.print("\n")
                parts.append(piece)
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    total = usage.get("prompt_tokens", 0)
    console.print(
        f"\n[dim]{usage.get('completion_tokens', 0)} tokens; {cached} of {total} prompt tokens were cached[/]"
    )
    return "".join(parts)


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a streamed chat completion. Raises StreamError with the server's message."""
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        if response.status_code != 200:
            response.read()
            raise StreamError(describe(response))
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise StreamError(event["error"]["message"])
            yield event
