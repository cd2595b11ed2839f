"""Server-sent events, built by hand: per chunk one concatenation around the JSON-escaped text."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

from router.api.errors import ApiError
from router.api.http import dumps

DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family buffer whole responses otherwise.
    (b"x-accel-buffering", b"no"),
]


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
        self._chat_tail = b'},"logprobs":null,"finish_reason":null' + self._tail
        self._completion_tail = b',"logprobs":null,"finish_reason":null' + self._tail
        self._heads: dict[int, bytes] = {}

    def _head_of(self, index: int, field: bytes) -> bytes:
        """Of a response's text chunks; all of them have the same ``field``."""
        head = self._heads[index] = self._head + str(index).encode() + b"," + field
        return head

    def chat_text(self, index: int, text: str) -> bytes:
        """A chunk with nothing but content."""
        head = self._heads.get(index) or self._head_of(index, b'"delta":{"content":')
        return head + encode_basestring(text).encode() + self._chat_tail

    def completion_text(self, index: int, text: str) -> bytes:
        head = self._heads.get(index) or self._head_of(index, b'"text":')
        return head + encode_basestring(text).encode() + self._completion_tail

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
