"""One token-plane connection, either end: framing, handshake, heartbeat and a bounded write buffer.

A peer that stops reading is dropped, never buffered without bound; a peer that goes silent is dropped, because a
dead node sends no FIN; bytes that break the protocol close the connection and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from router.handshake import HandshakeError, Peer
from router.outlet import Outlet
from router.wire import MAX_FRAME, FrameBuffer, Kind, ProtocolError, encode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionOptions:
    """Seconds and bytes. ``heartbeat_s``: after so long without a frame sent the handler is to send one."""

    handshake_timeout_s: float = 5.0
    dead_after_s: float = 3.0
    tick_s: float = 0.05
    heartbeat_s: float = 0.25
    max_unauthenticated_frame: int = 4096
    max_frame: int = MAX_FRAME
    max_write_buffer: int = 32 << 20

    def __post_init__(self) -> None:
        if not 0 < self.tick_s <= self.heartbeat_s < self.dead_after_s:
            given = (self.tick_s, self.heartbeat_s, self.dead_after_s)
            raise ValueError(f"need 0 < tick_s <= heartbeat_s < dead_after_s, got {given}")


class Handshake(Protocol):
    def start(self) -> bytes: ...

    def on_frame(self, frame: list[Any]) -> tuple[bytes, Peer | None]: ...


class Handler(Protocol):
    """Called on the connection's event loop. What ``on_frame`` raises closes the connection."""

    def on_open(self, connection: Connection, peer: Peer) -> None: ...

    def on_frame(self, connection: Connection, frame: list[Any]) -> None: ...

    def on_close(self, connection: Connection, reason: str, refused: bool) -> None:
        """Once per connection, opened or not. ``refused``: by the handshake, so trying again won't help by itself."""
        ...

    def on_idle(self, connection: Connection) -> None:
        """Nothing was sent for ``heartbeat_s``: send a sign of life."""
        ...


class Connection(asyncio.Protocol):
    """Everything on the event loop, except :meth:`send` and :meth:`drop`."""

    def __init__(
        self, handshake: Callable[[], Handshake], handler: Handler, options: ConnectionOptions | None = None
    ) -> None:
        self._options = options or ConnectionOptions()
        self._handshake: Handshake | None = handshake()
        self._handler = handler
        self._frames = FrameBuffer(self._options.max_unauthenticated_frame)
        self._pausing = False
        """Between tokens and the frames that came behind them."""
        self._transport: asyncio.Transport | None = None
        self._outlet: Outlet | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._silent_s = 0.0
        self._idle_s = 0.0
        self._ticked_at = 0.0
        self._reason = ""
        self._refused = False
        self.peer: Peer | None = None
        self.address = ""

    @property
    def is_open(self) -> bool:
        """Handshake done, not closing."""
        transport = self._transport
        return self.peer is not None and transport is not None and not (self._closing or transport.is_closing())

    @property
    def silent_s(self) -> float:
        """How long the peer has sent nothing."""
        return self._silent_s

    @property
    def unsent(self) -> int:
        """Bytes in the write buffer."""
        return self._outlet.unsent if self._outlet is not None else 0

    def send(self, frame: bytes) -> bool:
        """Send a frame; False when the connection is closing or the peer has stopped reading (it is dropped then).
        Any thread, in the order of the calls; never blocks."""
        transport, outlet = self._transport, self._outlet
        if transport is None or outlet is None or self._closing or transport.is_closing():
            return False
        outlet.send(frame)
        self._idle_s = 0.0
        if outlet.unsent > self._options.max_write_buffer:
            self.drop(f"slow reader: over {self._options.max_write_buffer} bytes unsent")
            return False
        return True

    def drop(self, reason: str) -> None:
        """:meth:`abort` from any thread."""
        if threading.get_ident() == self._thread:
            self.abort(reason)
        elif self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the connection with it
                self._loop.call_soon_threadsafe(self.abort, reason)

    def abort(self, reason: str, *, refused: bool = False) -> None:
        """Drop the connection now, with whatever is unsent."""
        self._note(reason, refused)
        if self._transport is not None:
            self._transport.abort()

    def close(self, reason: str) -> None:
        """Close after what is buffered was sent; the silence limit bounds how long that may take."""
        self._note(reason, False)
        self._closing = True
        if self._transport is not None and not self.unsent:
            self._transport.close()

    def _on_sent(self) -> None:
        if self._closing and self._transport is not None:
            self._transport.close()

    def _note(self, reason: str, refused: bool) -> None:
        if not self._reason:
            self._reason, self._refused = reason, refused

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peername = transport.get_extra_info("peername")
        self.address = f"{peername[0]}:{peername[1]}" if isinstance(peername, tuple) else str(peername)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._outlet = Outlet(sock, loop, self._on_sent)
        self._ticked_at = loop.time()
        self._timer = loop.call_later(self._options.handshake_timeout_s, self._handshake_timeout)
        assert self._handshake is not None
        if first := self._handshake.start():
            self.send(first)

    def data_received(self, data: bytes) -> None:
        self._silent_s = 0.0
        self._frames.append(data)
        if not self._pausing:
            self._handle_frames(pausing=True)

    def eof_received(self) -> bool:
        self._go_on()
        self._note("closed by the peer", False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._outlet is not None:
            self._outlet.close()
        self._go_on()
        self._note(f"connection lost: {exc}" if exc else "closed by the peer", False)
        self._handler.on_close(self, self._reason, self._refused)

    # --- inside

    def _handle_frames(self, pausing: bool) -> None:
        """In order. What comes behind tokens, often a batch of events that takes longer than they do, is handled when
        those who wait for the tokens have passed them on: with ``pausing``, and once for all that came meanwhile, so
        that nothing piles up in a loop whose turns are long."""
        try:
            while not self._reason and (frame := self._frames.take()) is not None:
                if self._handshake is None:
                    self._handler.on_frame(self, frame)
                else:
                    self._shake(self._handshake, frame)
                if pausing and frame[0] == Kind.TOKENS and len(self._frames):
                    self._pause()
                    return
        except ProtocolError as error:
            self.abort(f"protocol error: {error}")
        except Exception as error:
            log.exception("token plane: frame from %s failed", self.address)
            self.abort(f"internal error: {error!r}")

    def _pause(self) -> None:
        assert self._loop is not None
        self._pausing = True
        # Two turns of the loop: in the first they write, and some loops send what was written at the turn's end.
        self._loop.call_soon(self._loop.call_soon, self._go_on)

    def _go_on(self) -> None:
        if self._pausing:
            self._pausing = False
            self._handle_frames(pausing=False)

    def _shake(self, handshake: Handshake, frame: list[Any]) -> None:
        try:
            reply, peer = handshake.on_frame(frame)
        except HandshakeError as error:
            if frame[0] == Kind.AUTH:
                self.send(encode(Kind.REFUSED, str(error)))
            self._note(f"refused: {error}", True)
            self.close(self._reason)
            return
        if reply:
            self.send(reply)
        if peer is not None:
            self.peer = peer
            self._handshake = None
            self._frames.max_frame = self._options.max_frame
            if self._timer is not None:
                self._timer.cancel()
            self._ticked_at = asyncio.get_running_loop().time()
            self._schedule_tick()
            self._handler.on_open(self, peer)

    def _handshake_timeout(self) -> None:
        self.abort(f"no handshake within {self._options.handshake_timeout_s} s")

    def _schedule_tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._options.tick_s, self._tick)

    def _tick(self) -> None:
        if self._transport is None:
            return
        now = asyncio.get_running_loop().time()
        # a late tick means that *we* stood still: the peer's bytes may be waiting, so no more than two ticks count
        passed = min(now - self._ticked_at, 2 * self._options.tick_s)
        self._ticked_at = now
        self._silent_s += passed
        self._idle_s += passed
        if self._silent_s > self._options.dead_after_s:
            self.abort(f"silent for {self._options.dead_after_s} s")
            return
        if self._idle_s >= self._options.heartbeat_s:
            self._handler.on_idle(self)
        self._schedule_tick()
