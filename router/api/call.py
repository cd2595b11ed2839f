"""One HTTP exchange: what came in, how it is answered, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.api import sse
from router.api.errors import ApiError, messages_body
from router.api.http import Headers, Message, Receive, Send, dumps, parse_object, read_body, send_bytes
from router.api.services import Services


@dataclass
class Call:
    services: Services
    method: str
    path: str
    query: bytes
    headers: Mapping[str, str]
    receive: Receive
    raw_send: Send
    request_id: str
    salt: str = ""
    extra_headers: Headers = field(default_factory=list)
    """Of every answer: CORS, ignored fields."""
    status: int | None = None
    """Set once the response has started."""
    complete: bool = False
    gone: bool = False
    last_sent_s: float = 0.0
    """When the last event was handed to the server; monotonic."""
    own_request_id: bool = True
    """The client named none in a header."""
    echoed_id: str | None = None
    """What whoever runs the app sends back as ``x-request-id`` anyway."""
    _watcher: asyncio.Task[None] | None = None

    def use_request_id(self, request_id: str) -> None:
        """A body's request_id counts where no header gave one."""
        if self.own_request_id:
            self.request_id = request_id

    def _headers(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> Headers:
        own = [(b"x-request-id", self.request_id.encode("latin-1"))] if self.request_id != self.echoed_id else []
        return [*own, *self.extra_headers, *headers]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            # Before the await: servers report a disconnect to whoever still listens after the last byte.
            self.complete = True
        await self.raw_send(message)

    async def send_json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.send_body(status, dumps(value), headers=headers)

    async def send_body(
        self, status: int, body: bytes, content_type: str = "application/json", headers: Mapping[str, str] | None = None
    ) -> None:
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        if self.method == "HEAD":
            body = b""
        await send_bytes(self.send, status, body, self._headers(more), content_type)

    async def error(self, error: ApiError) -> None:
        ours = self.path.startswith("/v1/messages")
        body = messages_body(error) if ours else error.body()
        await self.send_body(error.status, body, headers=error.headers)

    async def start_events(self) -> None:
        self.last_sent_s = time.monotonic()
        await self.send({"type": "http.response.start", "status": 200, "headers": self._headers(sse.HEADERS)})

    def event(self, data: bytes) -> Awaitable[None]:
        self.last_sent_s = time.monotonic()
        return self.raw_send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def read_object(self) -> dict[str, Any]:
        """The request's JSON object. From here on the client's leaving cancels the task that handles it."""
        body = await read_body(self.receive, self.headers, self.services.options.max_body_bytes)
        task = asyncio.current_task()
        assert task is not None, "ASGI servers run applications in tasks"
        watcher = self._watcher = asyncio.create_task(self._watch(task))
        self.services.watchers.add(watcher)
        watcher.add_done_callback(self.services.watchers.discard)
        return parse_object(body)

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self.complete:
            self.gone = True
            task.cancel()

    def stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # it keeps the call in its traceback: a cycle would wait for the garbage collector
