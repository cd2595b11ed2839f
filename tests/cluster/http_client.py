"""A client that may misbehave: a request on a socket of its own, of which nothing is read."""

from __future__ import annotations

import json
import random
import socket
import time
from typing import Any

import httpx


def post(
    url: str, body: dict[str, Any], *, receive_buffer: int | None = None, apart_s: float | None = None
) -> socket.socket:
    """``apart_s``: the body follows the head so many seconds later, in a segment of its own."""
    target = httpx.URL(url)
    raw = json.dumps(body).encode()
    head = f"POST {target.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((target.host, target.port or 80))
    if apart_s is None:
        connection.sendall(head.encode() + b"\r\n" + raw)
    else:
        connection.sendall(head.encode() + b"\r\n")
        time.sleep(apart_s)
        connection.sendall(raw)
    return connection


def long_answer(index: int, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """A completion of 1,500 tokens to a prompt of its own."""
    rng = random.Random(index)
    prompt = [rng.randrange(256) for _ in range(40)]
    body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": stream}
    return {**body, **fields}
