"""The few pieces of ASGI that the API needs, without a framework on the streaming path."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from pydantic_core import from_json

from router.api.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


_LARGE_EXPONENTS = [re.compile(letter + rb"\+?[0-9]{3}") for letter in (b"e", b"E")]
"""Two, since the search for a pattern that begins with one certain letter is six times as fast."""
_BLOCK = 105
"""A number with an exponent below 100 that no double holds has at least 210 digits in a row, which cover a whole block
of so many bytes wherever they stand."""


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def request_headers(scope: Scope) -> dict[str, str]:
    """Lower-case names; the last of a repeated header wins."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}


def header_list(headers: Mapping[str, str]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


_DISCARD = 64 << 20
"""So much of a body that is too long is read and dropped. Closing the connection on a client that still sends would
reset it, and the answer would be lost on its way."""


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The whole body. Raises a 413 when it is longer than ``limit`` bytes, of which no more than that are held."""
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit + _DISCARD:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        more = message.get("more_body", False)
        if size > limit:
            parts.clear()
            if not more or size > limit + _DISCARD:
                raise _too_large(size, limit)
        elif not more:
            return b"".join(parts)


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request body has {size} bytes or more; at most {limit} are allowed",
        code="body_too_large",
        # What is left of the body may not have been read, so the connection can't carry another request.
        headers={"connection": "close"},
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises a 400 for anything else, NaN, lone surrogates and absurd nesting included."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if _maybe_infinite(body) and not _finite(value):
        # The parser turns what no double can hold into infinity, which no answer could repeat.
        raise ApiError(400, "the request body holds a number beyond the range of a double", code="invalid_json")
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise ApiError(400, f"the request body must be a JSON object; got {kind}", code="invalid_json")
    return value


def _maybe_infinite(body: bytes) -> bool:
    """Cheap, and never False where a number is too large for a double."""
    if any(exponent.search(body) for exponent in _LARGE_EXPONENTS):
        return True
    return any(body[at : at + _BLOCK].isdigit() for at in range(0, len(body), _BLOCK))


def _finite(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return False
        if isinstance(item, dict | list):
            stack.extend(item.values() if isinstance(item, dict) else item)
    return True


async def send_bytes(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]], content_type: str = "application/json"
) -> None:
    start = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
