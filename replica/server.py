"""The replica's end of the token plane: routers' connections on one side, the engine's thread on the other.

The engine calls :meth:`TokenServer.on_deltas`, :meth:`TokenServer.on_events` and then :meth:`TokenServer.send_out`
from its own thread, which also writes the sockets: per step and router one write with one TOKENS frame, and an event
batch encoded once for all routers. The event loop has what routers send, heartbeats, and what a socket did not take.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from replica.port import EnginePort, Preparer
from router.connection import Connection, ConnectionOptions
from router.handshake import Peer, ReplicaHandshake, check_secret
from router.pages import RootFields
from router.wire import (
    Code,
    EventBatch,
    Kind,
    ProtocolError,
    Refusal,
    Snapshot,
    Submit,
    TokenDelta,
    encode,
    rechunk,
)

log = logging.getLogger(__name__)

SNAPSHOT_KEYS = 4096
"""Per chunk sent: taking one in doesn't hold up a router's streams."""
SNAPSHOT_PAUSE_S = 0.002
"""Between two chunks: tokens of the same router go first."""


@dataclass(frozen=True)
class ServerOptions:
    """Seconds and bytes. ``event_backlog``: a router with more unsent misses event batches and catches up by replay
    or snapshot."""

    event_backlog: int = 1 << 20
    max_handshakes: int = 64
    max_routers: int = 256
    first_batch_timeout_s: float = 60.0
    connection: ConnectionOptions = field(default_factory=lambda: ConnectionOptions(heartbeat_s=0.05))


class _Refusing(asyncio.Protocol):
    """Too many connections, or too many that have not said who they are."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _Router:
    """One connection. Its id is the owner of its requests in the engine, so nothing outlives it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.requests: set[str] = set()
        self.repairing = False
        self.skipped_batches = 0


def _collect(deltas: list[tuple[Any, TokenDelta]], to: dict[_Router, list[list[Any]]]) -> None:
    for owner, delta in deltas:
        router: _Router = owner
        if delta.request_id not in router.requests:
            continue  # cancelled meanwhile, or its router is gone
        if delta.finish is not None:
            router.requests.discard(delta.request_id)
        to.setdefault(router, []).append(delta.to_wire())


def _encode_deltas(deltas: dict[_Router, list[list[Any]]], to: dict[_Router, list[bytes]]) -> None:
    """A router whose tokens can't be told is dropped: it has its streams go on elsewhere, instead of missing some."""
    for router, parts in deltas.items():
        try:
            frame = encode(Kind.TOKENS, parts)
        except (TypeError, ValueError, OverflowError) as error:
            log.exception("tokens for the router at %s", router.connection.address)
            router.connection.drop(f"its tokens can't be encoded: {error}")
        else:
            to.setdefault(router, []).append(frame)
    deltas.clear()


class TokenServer:
    """``limits``: ints told to every router (max_model_len, max_batch_size, num_pages, page_size, chunk_size,
    host_page_us, prefix_caching)."""

    def __init__(
        self,
        secret: bytes,
        *,
        replica_id: str,
        root: RootFields,
        limits: dict[str, int],
        engine: EnginePort | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        self._secret = check_secret(secret)
        self._replica_id = replica_id
        self._root = root
        self._limits = dict(limits)
        self._engine = engine
        self._options = options or ServerOptions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._routers: dict[Connection, _Router] = {}
        self._handshaking: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparer = Preparer()
        self._draining = False
        self._first_batch = threading.Event()
        self._epoch = 0
        self._seq = 0
        self._batch_at = time.monotonic()
        self._outbox: list[list[tuple[Any, TokenDelta]] | EventBatch] = []
        self._sending = threading.Lock()
        """Held while something is neither in the outbox nor with its connection, or a heartbeat is on its way."""
        self._handlers: dict[int, Callable[[_Router, list[Any]], None]] = {
            Kind.SUBMIT: self._on_submit,
            Kind.CANCEL: self._on_cancel,
            Kind.PING: self._on_ping,
            Kind.REPLAY: self._on_replay,
            Kind.SNAPSHOT_REQUEST: self._on_snapshot_request,
            Kind.INSPECT: self._on_inspect,
        }

    # --- life

    def attach(self, engine: EnginePort) -> None:
        """Give it the engine, whose callbacks need the server first. Before :meth:`start`."""
        self._engine = engine

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Serve on the node's address once the engine has spoken; returns (host, port) as bound.

        Raises TimeoutError when the engine's first event batch doesn't come, OSError when the address can't be bound.
        """
        assert self._engine is not None, "attach an engine first"
        self._loop = asyncio.get_running_loop()
        until = time.monotonic() + self._options.first_batch_timeout_s
        while not self._first_batch.is_set():
            if time.monotonic() >= until:
                raise TimeoutError(f"the engine said nothing in {self._options.first_batch_timeout_s} s")
            await asyncio.sleep(0.01)
        self._server = await self._loop.create_server(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def await_departure(self, timeout_s: float) -> None:
        """Serve on until no router is connected, or for ``timeout_s``: those that know another replica leave."""
        until = time.monotonic() + timeout_s
        while self._routers and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def drain(self, timeout_s: float) -> bool:
        """Tell routers to send nothing new and wait for what runs; True when all of it ended in time."""
        assert self._engine is not None and self._loop is not None
        if not self._draining:
            self._draining = True
            self._engine.drain()
            for router in self._routers.values():
                router.connection.send(encode(Kind.DRAINING))
        until = self._loop.time() + timeout_s
        while not self._quiet():
            if self._loop.time() >= until:
                return False
            await asyncio.sleep(0.02)
        return True

    def _quiet(self) -> bool:
        assert self._engine is not None
        if not self._engine.idle() or self._preparer or not self._sending.acquire(blocking=False):
            return False
        try:
            unsent = any(router.requests or router.connection.unsent for router in self._routers.values())
            return not self._outbox and not unsent
        finally:
            self._sending.release()

    async def close(self, *, abort: bool = False) -> None:
        """End every connection, with what is unsent unless ``abort``; the engine cancels what they had running."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._routers, *self._handshaking]:
            if abort:
                connection.abort("the replica closes")
            else:
                connection.close("the replica closes")
        await asyncio.sleep(0)
        self._preparer.close()
        for task in list(self._tasks):
            task.cancel()

    def _accept(self) -> asyncio.Protocol:
        if len(self._handshaking) >= self._options.max_handshakes or len(self._routers) >= self._options.max_routers:
            return _Refusing()
        connection = Connection(self._greet, self, self._options.connection)
        self._handshaking.add(connection)
        return connection

    def _greet(self) -> ReplicaHandshake:
        return ReplicaHandshake(self._secret, self._replica_id, self._epoch, self._root, self._limits)

    # --- from the engine's thread

    def on_deltas(self, deltas: list[tuple[Any, TokenDelta]]) -> None:
        """One step's deltas with their owners. They leave with :meth:`send_out`."""
        self._outbox.append(deltas)

    def on_events(self, batch: EventBatch) -> None:
        """The next batch of the event stream, which must not change afterwards. It leaves with :meth:`send_out`."""
        self._outbox.append(batch)

    def send_out(self) -> None:
        """Everything that waits, in order, as one write per router. The thread of the two above; never blocks."""
        deltas: dict[_Router, list[list[Any]]] = {}
        frames: dict[_Router, list[bytes]] = {}
        last: EventBatch | None = None
        with self._sending:
            outbox, self._outbox = self._outbox, []
            for item in outbox:
                if isinstance(item, EventBatch):
                    last = item
                    _encode_deltas(deltas, frames)
                    self._add_events(item, frames)
                else:
                    _collect(item, deltas)
            _encode_deltas(deltas, frames)
            for router, parts in frames.items():
                router.connection.send(b"".join(parts) if len(parts) > 1 else parts[0])
            if last is not None:
                self._epoch, self._seq, self._batch_at = last.epoch, last.seq, time.monotonic()
                self._first_batch.set()

    def _add_events(self, batch: EventBatch, frames: dict[_Router, list[bytes]]) -> None:
        routers = list(self._routers.values())  # in one go: the event loop adds and removes
        if not routers:
            return
        frame = batch.to_frame()
        for router in routers:
            if router.connection.unsent > self._options.event_backlog:
                router.skipped_batches += 1
            else:
                frames.setdefault(router, []).append(frame)

    # --- router.connection.Handler

    def on_open(self, connection: Connection, peer: Peer) -> None:
        self._handshaking.discard(connection)
        self._routers[connection] = _Router(connection)
        if self._draining:
            connection.send(encode(Kind.DRAINING))
        log.info("router %s connected from %s", peer.name, connection.address)

    def on_frame(self, connection: Connection, frame: list[Any]) -> None:
        router = self._routers.get(connection)
        handle = self._handlers.get(frame[0])
        if router is None or handle is None:
            return
        try:
            handle(router, frame)
        except (IndexError, ValueError) as error:
            raise ProtocolError(f"bad frame of kind {frame[0]}: {error}") from error

    def on_close(self, connection: Connection, reason: str, refused: bool) -> None:
        self._handshaking.discard(connection)
        router = self._routers.pop(connection, None)
        if router is None:
            log.log(logging.WARNING if refused else logging.DEBUG, "no router at %s: %s", connection.address, reason)
            return
        assert self._engine is not None
        log.info("router at %s is gone (%s); %d requests cancelled", connection.address, reason, len(router.requests))
        self._preparer.cancel_all(router)
        for request in list(router.requests):  # in one go: the engine's thread discards what ends meanwhile
            self._engine.cancel(router, request)
        router.requests.clear()

    def on_idle(self, connection: Connection) -> None:
        self._pong(connection, None)

    def _pong(self, connection: Connection, echo: Any) -> None:
        """A PONG speaks of the batch before it on the connection: to a router, any other is a gap or a wrong seq."""
        with self._sending:
            silent_ms = int((time.monotonic() - self._batch_at) * 1e3)
            connection.send(encode(Kind.PONG, echo, self._epoch, self._seq, silent_ms))

    # --- frames

    def _on_submit(self, router: _Router, frame: list[Any]) -> None:
        assert self._engine is not None
        request = frame[1]
        if not isinstance(request, str):
            raise ProtocolError("SUBMIT without a request id")
        try:
            submit = Submit.from_frame(frame)
            if request in router.requests or (router, request) in self._preparer:
                raise Refusal(Code.INVALID, f"request id {request!r} is running already", "request_id")
        except ProtocolError as error:
            router.connection.send(Refusal(Code.INVALID, str(error)).to_frame(request))
        except Refusal as refusal:
            router.connection.send(refusal.to_frame(request))
        else:
            self._preparer.run(self._engine, router, submit, self._submit)

    def _submit(self, router: _Router, submit: Submit) -> None:
        assert self._engine is not None
        request = submit.request_id
        router.requests.add(request)  # before its first delta can come
        try:
            if self._draining:
                raise Refusal(Code.DRAINING, "this replica drains")
            self._engine.submit(router, submit)
        except Refusal as refusal:
            router.requests.discard(request)
            router.connection.send(refusal.to_frame(request))
        except Exception as error:  # one request's fault ends that request only
            log.exception("submitting %s failed", request)
            router.requests.discard(request)
            router.connection.send(Refusal(Code.FAULT, f"the engine failed on it: {error!r}").to_frame(request))
        else:
            router.connection.send(encode(Kind.ACCEPT, request))

    def _on_cancel(self, router: _Router, frame: list[Any]) -> None:
        assert self._engine is not None
        request = frame[1]
        if not isinstance(request, str):
            return
        self._preparer.cancel(router, request)
        if request in router.requests:
            router.requests.discard(request)
            self._engine.cancel(router, request)

    def _on_ping(self, router: _Router, frame: list[Any]) -> None:
        self._pong(router.connection, frame[1])

    def _on_replay(self, router: _Router, frame: list[Any]) -> None:
        from_seq = frame[1]
        if type(from_seq) is not int:
            raise ProtocolError("REPLAY without a seq")
        self._repair(router, from_seq)

    def _on_snapshot_request(self, router: _Router, frame: list[Any]) -> None:
        self._repair(router, None)

    def _repair(self, router: _Router, from_seq: int | None) -> None:
        """Answer off the event loop: a snapshot may wait for the engine. One at a time per router."""
        if not router.repairing:
            router.repairing = True
            self._spawn(self._answer_repair(router, from_seq))

    async def _answer_repair(self, router: _Router, from_seq: int | None) -> None:
        engine = self._engine
        assert engine is not None
        try:
            answer: Sequence[EventBatch | Snapshot] | None = None
            if from_seq is not None:
                batches = await asyncio.to_thread(engine.replay, from_seq)
                if batches is not None:  # what has not been sent yet would be ahead of the heartbeats
                    answer = [batch for batch in batches if batch.seq <= self._seq]
            if answer is None:
                answer = rechunk(await asyncio.to_thread(engine.snapshot), SNAPSHOT_KEYS)
            for part in answer:
                if not router.connection.send(part.to_frame()):
                    return
                if isinstance(part, Snapshot):
                    await asyncio.sleep(SNAPSHOT_PAUSE_S)
        finally:
            router.repairing = False

    def _on_inspect(self, router: _Router, frame: list[Any]) -> None:
        tag = frame[1]
        if type(tag) is not int:
            raise ProtocolError("INSPECT without a tag")
        self._spawn(self._answer_inspect(router, tag))

    async def _answer_inspect(self, router: _Router, tag: int) -> None:
        assert self._engine is not None
        info = await asyncio.to_thread(self._engine.info)
        try:
            frame = encode(Kind.INFO, tag, info)
        except (TypeError, ValueError, OverflowError) as error:
            frame = encode(Kind.INFO, tag, {"error": f"the engine's description can't be sent: {error}"})
        router.connection.send(frame)

    def _spawn(self, coroutine: Any) -> None:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("token plane: an answer failed", exc_info=error)

    def check_invariants(self) -> None:
        assert all(connection is router.connection for connection, router in self._routers.items())
        assert not self._handshaking & self._routers.keys()
