"""Steady streams against the cluster, each checked to its last byte."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import httpx


@dataclass
class Stream:
    """One request as its client saw it."""

    started: float
    status: int = 0
    text: str = ""
    finish: str | None = None
    done: bool = False
    tokens: int = 0
    longest_gap_s: float = 0.0
    ended: float = 0.0
    error: str = ""

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.done and self.finish == "length" and not self.error


@dataclass
class Load:
    """``width`` clients that each ask for one stream after another until the block ends."""

    url: Callable[[int], str]
    """Where the n-th request goes."""
    width: int = 8
    max_tokens: int = 64
    results: list[Stream] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._count = itertools.count()
        self._threads = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(self.width)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in self._threads), "a stream never ended"

    @property
    def completed(self) -> int:
        return sum(stream.whole for stream in self.results)

    def broken(self) -> list[Stream]:
        return [stream for stream in self.results if not stream.whole]

    def summary(self) -> str:
        gaps = sorted(stream.longest_gap_s for stream in self.results) or [0.0]
        return f"{len(self.results)} streams, {len(self.broken())} broken, longest gap {gaps[-1]:.2f} s"

    def _client(self, client: int) -> None:
        with httpx.Client(timeout=httpx.Timeout(60.0)) as http:
            while not self._stop.is_set():
                stream = Stream(started=time.monotonic())
                try:
                    self._ask(http, next(self._count), client, stream)
                except Exception as error:
                    stream.error = repr(error)
                stream.ended = time.monotonic()
                self.results.append(stream)

    def _ask(self, http: httpx.Client, number: int, client: int, stream: Stream) -> None:
        body = {
            "prompt": f"Client {client} tells a long story about a river:",
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with http.stream("POST", f"{self.url(number)}/v1/completions", json=body) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.error = response.read().decode(errors="replace")[:300]
                return
            last = time.monotonic()
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                stream.longest_gap_s, last = max(stream.longest_gap_s, now - last), now
                if line == "data: [DONE]":
                    stream.done = True
                    continue
                self._take(json.loads(line.removeprefix("data: ")), stream)

    @staticmethod
    def _take(event: dict[str, object], stream: Stream) -> None:
        if "error" in event:
            stream.error = json.dumps(event["error"])
        for choice in event.get("choices") or []:  # type: ignore[attr-defined]
            stream.text += choice.get("text") or ""
            stream.finish = choice.get("finish_reason") or stream.finish
        if usage := event.get("usage"):
            stream.tokens = usage["completion_tokens"]  # type: ignore[index]
