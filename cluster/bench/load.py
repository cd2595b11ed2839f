"""A raw-socket SSE load generator, cheap enough to share two cores with what it measures."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class StreamRecord:
    """One streamed request. Times are seconds of ``time.perf_counter``."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Arrival of every ``data:`` event that carries a choice."""
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    """The stream ended with [DONE]."""
    failure: str | None = None

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))


async def stream_once(url: str, path: str, body: dict[str, Any]) -> StreamRecord:
    """POST ``body`` and read its event stream to the end."""
    target = urlsplit(url)
    payload = json.dumps(body).encode()
    record = StreamRecord(time.perf_counter())
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 80)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        first = await reader.readline()
        if b" 200 " not in first:
            rest = await reader.read()
            record.failure = (first + rest).decode(errors="replace")[-400:]
            return record
        tail = b""
        while chunk := await reader.read(1 << 16):
            now = time.perf_counter()
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                _take(record, line, now)
    except OSError as error:
        record.failure = repr(error)
    finally:
        writer.close()
    if not record.done and record.failure is None:
        record.failure = "the stream ended without [DONE]"
    return record


def _take(record: StreamRecord, line: bytes, now: float) -> None:
    if not line.startswith(b"data: "):
        return
    if line.startswith(b"data: [DONE]"):
        record.done = True
    elif b'"error"' in line[:20]:
        record.failure = line.decode(errors="replace")
    elif b'"usage":{' in line or b'"usage": {' in line:
        record.usage = json.loads(line[6:])["usage"]
    else:
        record.arrivals.append(now)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; NaN when there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def lateness(record: StreamRecord, period_s: float) -> list[float]:
    """How much later than the stream's own best each event came, seconds, for a source of one event per period."""
    offsets = [at - index * period_s for index, at in enumerate(record.arrivals)]
    best = min(offsets, default=0.0)
    return [offset - best for offset in offsets]
