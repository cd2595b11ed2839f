"""The router's end of one replica: its connection, its event stream and the requests in flight there.

A link reconnects for as long as the replica is a member. When the connection is lost every attempt in flight is told
at once; what happens to its stream then is the dispatcher's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from router.connection import Connection, ConnectionOptions
from router.handshake import HandshakeError, Peer, RouterHandshake
from router.pages import RootFields
from router.placement import ReplicaState
from router.stream_state import Ask, Phase, StreamOptions, StreamState
from router.wire import EventBatch, Kind, ProtocolError, Refusal, Snapshot, TokenDelta, encode

log = logging.getLogger(__name__)
Address = tuple[str, int]


class LinkState(StrEnum):
    CONNECTING = "connecting"
    OPEN = "open"
    DRAINING = "draining"
    REFUSED = "refused"
    """The handshake failed for good reason; tried again rarely, in case one side is redeployed."""
    CLOSED = "closed"


@dataclass(frozen=True)
class LinkOptions:
    """Seconds. ``suspicious_after_s``: silence after which a replica is used only if no other is there.
    ``engine_stall_s``: the same for an engine whose process answers but whose loop emits nothing.
    ``forget_after_s``: a replica unreachable for so long loses its place in the directory."""

    connect_timeout_s: float = 3.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 1.0
    refused_retry_s: float = 5.0
    suspicious_after_s: float = 0.25
    engine_stall_s: float = 2.0
    forget_after_s: float = 30.0
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    stream: StreamOptions = field(default_factory=StreamOptions)


class Attempt(Protocol):
    """One submission of one request. Called on the event loop; none may raise."""

    def on_accept(self) -> None: ...

    def on_reject(self, refusal: Refusal) -> None: ...

    def on_delta(self, delta: TokenDelta) -> None: ...

    def on_lost(self, reason: str) -> None: ...


class Host(Protocol):
    """What a link needs of the dispatcher."""

    def greet(self) -> RouterHandshake: ...

    def check_root(self, replica: str, root: RootFields) -> None:
        """Raises HandshakeError when this replica's hashes would not match the others'."""
        ...

    def on_link_change(self, link: Link) -> None: ...


class Link:
    def __init__(self, name: str, address: Address, state: ReplicaState, host: Host, options: LinkOptions) -> None:
        self.name = name
        self.address = address
        self.state = LinkState.CONNECTING
        self.reason = ""
        """Why it is not open."""
        self.limits: dict[str, int] = {}
        self.lost_connections = 0
        self.replica = state
        self.stream = StreamState(name, state.directory, state, options.stream)
        self._host = host
        self._options = options
        self._connection: Connection | None = None
        self._closed = asyncio.Event()
        self._retry = asyncio.Event()
        self._leaving = False
        self._inflight: dict[str, Attempt] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_tag = 0
        self._engine_silent_s = 0.0
        self._down_since = self.now()
        self._task = asyncio.get_running_loop().create_task(self._connect_forever(), name=f"link {name}")
        self._handlers: dict[int, Callable[[list[Any]], None]] = {
            Kind.TOKENS: self._on_tokens,
            Kind.EVENTS: self._on_events,
            Kind.ACCEPT: self._on_accept,
            Kind.REJECT: self._on_reject,
            Kind.PONG: self._on_pong,
            Kind.SNAPSHOT: self._on_snapshot,
            Kind.INFO: self._on_info,
            Kind.DRAINING: self._on_draining,
        }

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def silent_s(self) -> float:
        return self._connection.silent_s if self._connection is not None else self.now() - self._down_since

    # --- requests

    def submit(self, request: str, frame: bytes, attempt: Attempt) -> bool:
        """Send a SUBMIT frame; False (and ``attempt`` is not registered) when there is no connection to send it on."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return False
        self._inflight[request] = attempt
        # a full write buffer aborts the connection, and the loss is then reported through the attempt
        connection.send(frame)
        return True

    def cancel(self, request: str) -> None:
        """Forget a request and tell the replica. Idempotent."""
        if self._inflight.pop(request, None) is not None and self._connection is not None:
            self._connection.send(encode(Kind.CANCEL, request))
            self._leave_if_done()

    async def inspect(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The engine's own description. Raises TimeoutError or ConnectionError."""
        connection = self._connection
        if connection is None or not connection.is_open:
            raise ConnectionError(f"replica {self.name} is {self.state}: {self.reason}")
        self._next_tag += 1
        tag = self._next_tag
        answer = self._asked[tag] = asyncio.get_running_loop().create_future()
        try:
            connection.send(encode(Kind.INSPECT, tag))
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            self._asked.pop(tag, None)

    # --- life

    def leave(self, *, last_resort: bool = False) -> None:
        """No longer a member: no new work, and close once the last stream has ended.

        ``last_resort``: take new work still, until the replica says that it drains or this is called without.
        """
        self._leaving = True
        self.replica.accepting = False
        self.replica.retiring = last_resort and self.state == LinkState.OPEN
        self._leave_if_done()

    def rejoin(self, address: Address) -> None:
        """A member (again), possibly elsewhere."""
        moved = address != self.address
        self.address = address
        if self._leaving:
            self._leaving = self.replica.retiring = False
            self.replica.accepting = self.state == LinkState.OPEN
        if moved and self._connection is not None:
            self._connection.abort("the replica has moved")

    def retry(self) -> None:
        """What it was refused for may have changed: try again now."""
        if self.state == LinkState.REFUSED:
            self._retry.set()

    def close(self, reason: str = "router closed") -> None:
        if self.state == LinkState.CLOSED:
            return
        self._task.cancel()
        if self._connection is not None:
            self._connection.abort(reason)
        self._down(reason, LinkState.CLOSED)
        self.stream.close()
        self._host.on_link_change(self)

    def tick(self) -> None:
        """Every few tens of milliseconds: repeat unanswered questions, judge silence."""
        now = self.now()
        options = self._options
        connection = self._connection
        if connection is None:
            if now - self._down_since > options.forget_after_s and self.stream.slot is not None:
                self.stream.close()
            return
        self._ask(self.stream.tick(now))
        self.replica.suspicious = (
            connection.silent_s > options.suspicious_after_s or self._engine_silent_s > options.engine_stall_s
        )

    async def _connect_forever(self) -> None:
        loop = asyncio.get_running_loop()
        pause = self._options.reconnect_min_s
        while True:
            self._closed.clear()
            lost_before = self.lost_connections
            try:
                connecting = loop.create_connection(
                    lambda: Connection(self._host.greet, self, self._options.connection), *self.address
                )
                await asyncio.wait_for(connecting, self._options.connect_timeout_s)
            except (OSError, ValueError, OverflowError) as error:  # TimeoutError is an OSError
                self.reason = f"cannot connect to {self.address[0]}:{self.address[1]}: {error or 'timed out'}"
            else:
                await self._closed.wait()
                if self.lost_connections > lost_before:
                    pause = self._options.reconnect_min_s
            if self.state == LinkState.REFUSED:
                pause = self._options.refused_retry_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self._retry.wait(), pause)
            self._retry.clear()
            pause = min(2 * pause, self._options.reconnect_max_s)

    def _down(self, reason: str, state: LinkState) -> None:
        was_open = self._connection is not None
        self._connection = None
        self.state, self.reason = state, reason
        if not was_open:
            return
        self.lost_connections += 1
        self._down_since = now = self.now()
        self.stream.detach()
        self.replica.on_lost(now)
        attempts, self._inflight = self._inflight, {}
        if state != LinkState.CLOSED or attempts:
            log.warning("replica %s lost (%s); %d requests go on elsewhere", self.name, reason, len(attempts))
        for attempt in attempts.values():
            attempt.on_lost(reason)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError(reason))

    def _leave_if_done(self) -> None:
        if self._leaving and not self._inflight and not self.replica.retiring:
            self.close("no longer a member")

    def _ask(self, ask: Ask | None) -> None:
        if ask is not None and self._connection is not None:
            self._connection.send(ask.to_frame())

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    # --- router.connection.Handler

    def on_open(self, connection: Connection, peer: Peer) -> None:
        if self.state == LinkState.CLOSED:  # while the handshake was under way
            connection.abort(self.reason)
            return
        if peer.name != self.name:
            raise ProtocolError(f"{connection.address} is replica {peer.name}, not {self.name}")
        assert peer.root is not None
        try:
            self._host.check_root(self.name, peer.root)
        except HandshakeError as error:
            connection.abort(f"refused: {error}", refused=True)
            return
        self._connection = connection
        self.limits = peer.limits
        self.replica.page_size = peer.root.page_size
        self.replica.chunk = max(1, peer.limits.get("chunk_size", self.replica.chunk))
        self.replica.host_page_ms = peer.limits.get("host_page_us", 50) / 1e3
        self.replica.caches = bool(peer.limits.get("prefix_caching", 1))
        self.state, self.reason = LinkState.OPEN, ""
        self.replica.accepting = not self._leaving
        self.replica.suspicious = False
        self._engine_silent_s = 0.0
        self._ask(self.stream.attach(peer.epoch, self.now()))
        self._host.on_link_change(self)

    def on_frame(self, connection: Connection, frame: list[Any]) -> None:
        handle = self._handlers.get(frame[0])
        if handle is None or connection is not self._connection:
            return
        try:
            handle(frame)
        except (IndexError, TypeError, ValueError) as error:
            raise ProtocolError(f"bad frame of kind {frame[0]}: {error}") from error

    def on_close(self, connection: Connection, reason: str, refused: bool) -> None:
        if self.state != LinkState.CLOSED and (self._connection is connection or self._connection is None):
            if refused and self.reason != reason:
                log.error("replica %s at %s:%d: %s", self.name, *self.address, reason)
            self._down(reason, LinkState.REFUSED if refused else LinkState.CONNECTING)
            self._host.on_link_change(self)
            self._leave_if_done()
        self._closed.set()

    def on_idle(self, connection: Connection) -> None:
        connection.send(encode(Kind.PING, int(self.now() * 1e6)))

    # --- frames

    def _on_tokens(self, frame: list[Any]) -> None:
        inflight = self._inflight
        for raw in frame[1]:
            attempt = inflight.get(raw[0])
            if attempt is None:
                continue
            delta = TokenDelta(raw[0], raw[1]) if len(raw) == 2 else TokenDelta.from_wire(raw)
            if delta.finish is not None:
                del inflight[delta.request_id]
            attempt.on_delta(delta)
        if self._leaving:
            self._leave_if_done()

    def _on_accept(self, frame: list[Any]) -> None:
        if (attempt := self._inflight.get(frame[1])) is not None:
            attempt.on_accept()

    def _on_reject(self, frame: list[Any]) -> None:
        request, refusal = Refusal.from_frame(frame)
        if (attempt := self._inflight.pop(request, None)) is not None:
            attempt.on_reject(refusal)
            self._leave_if_done()

    def _on_events(self, frame: list[Any]) -> None:
        batch = EventBatch.from_frame(frame)
        self._engine_silent_s = 0.0
        self._follow(batch.replica, batch.epoch)
        self._ask(self.stream.on_batch(batch, self.now()))

    def _on_snapshot(self, frame: list[Any]) -> None:
        chunk = Snapshot.from_frame(frame)
        self._follow(chunk.replica, chunk.epoch)
        self._ask(self.stream.on_snapshot(chunk, self.now()))

    def _follow(self, replica: str, epoch: int) -> None:
        if replica != self.name:
            raise ProtocolError(f"an event of replica {replica} on the connection of {self.name}")
        if epoch != self.stream.epoch:
            # the engine restarted behind an open connection: our requests died with it, so start over as a whole
            raise ProtocolError(f"engine epoch went from {self.stream.epoch} to {epoch}")

    def _on_pong(self, frame: list[Any]) -> None:
        _, _, epoch, seq, engine_ms = frame[:5]
        self._engine_silent_s = float(engine_ms) / 1e3
        self._ask(self.stream.on_heartbeat(int(epoch), int(seq), self.now()))

    def _on_info(self, frame: list[Any]) -> None:
        answer = self._asked.get(frame[1])
        if answer is not None and not answer.done() and isinstance(frame[2], dict):
            answer.set_result(frame[2])

    def _on_draining(self, frame: list[Any]) -> None:
        if self.state == LinkState.OPEN:
            self.state, self.reason = LinkState.DRAINING, "the replica drains"
            self.replica.accepting = self.replica.retiring = False
            self._host.on_link_change(self)
            self._leave_if_done()

    def describe(self) -> dict[str, Any]:
        """For ``/v1/directory``."""
        load = self.replica.load
        slot = self.stream.slot
        return {
            "replica": self.name,
            "address": f"{self.address[0]}:{self.address[1]}",
            "state": str(self.state),
            "reason": self.reason or None,
            "in_sync": self.stream.phase == Phase.SYNCED,
            "stream": str(self.stream.phase),
            "epoch": f"{self.stream.epoch:016x}",
            "seq": self.stream.seq,
            "digests": [[digest.count, f"{digest.xor:016x}"] for digest in slot.digests] if slot else [],
            "seen_and_repaired": vars(self.stream.counters).copy(),
            "silent_s": round(self.silent_s, 3),
            "suspicious": self.replica.suspicious,
            "in_flight_from_here": self.num_inflight,
            "queue_ms": round(self.replica.backlog.queue_ms(self.now()), 3),
            "waiting": len(self.replica.backlog),
            "load": {
                "queued_uncached_tokens": load.queued_uncached_tokens,
                "running": load.running,
                "waiting": load.waiting,
                "context_tokens": load.context_tokens,
                "free_pages": load.free_pages,
                "evictable_pages": load.evictable_pages,
            },
            "coefficients_ms": list(load.coefficients),
            "lost_connections": self.lost_connections,
        }
