"""Server-sent events, built by hand: per chunk one concatenation around the JSON-escaped text."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

from router.api.errors import ApiError
from router.api.http import dumps

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family buffer whole responses otherwise.
    (b"x-accel-buffering", b"no"),
]


def escape(text: str) -> bytes:
    """A JSON string literal, UTF-8."""
    return encode_basestring(text).encode()


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Ends a stream that failed after its headers; ``[DONE]`` never follows it."""
    return b"data: " + error.body() + b"\n\n"


class Chunks:
    """Chunks of one response. ``usage_field``: OpenAI puts ``"usage": null`` into chunks when usage was asked for."""

    def __init__(self, kind: str, response_id: str, created: int, model: str, *, usage_field: bool) -> None:
        self._base = {"id": response_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + dumps(self._base)[:-1] + b',"choices":[{"index":'
        self._usage_field = usage_field
        self._tail = b'}],"usage":null}\n\n' if usage_field else b"}]}\n\n"
        self._heads: dict[int, bytes] = {}

    def head(self, index: int) -> bytes:
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + str(index).encode() + b","
        return head

    def chat_text(self, index: int, text: str) -> bytes:
        """A chunk with nothing but content."""
        body = b'"delta":{"content":' + escape(text) + b'},"logprobs":null,"finish_reason":null'
        return self.head(index) + body + self._tail

    def completion_text(self, index: int, text: str) -> bytes:
        body = b'"text":' + escape(text) + b',"logprobs":null,"finish_reason":null'
        return self.head(index) + body + self._tail

    def full(
        self, choice: dict[str, Any], usage: dict[str, object] | None, extra: dict[str, Any] | None = None
    ) -> bytes:
        """A chunk with anything in its one choice."""
        body = {**self._base, **(extra or {}), "choices": [choice]}
        if usage is not None or self._usage_field:
            body["usage"] = usage
        return event(body)

    def usage(self, usage: dict[str, object]) -> bytes:
        """The last chunk: no choices, the whole request's usage."""
        return event({**self._base, "choices": [], "usage": usage})
