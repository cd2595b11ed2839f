"""The sending half of a connected socket, for any thread.

A frame goes straight from the thread that made it into the kernel. Handing it to the event loop first would cost a
wake-up of the loop's thread and its wait for the GIL per engine step: more than encoding and sending together.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

SEND_BYTES = 1 << 18
"""At most so much per call into the kernel."""


class Outlet:
    """Frames leave whole and in the order of the calls. What the kernel does not take at once waits here and leaves on
    the event loop; ``unsent`` bounds nothing by itself.

    Works on a duplicate of ``sock``'s descriptor, so it stays valid until :meth:`close` whatever the transport does.
    ``on_sent``: called on the event loop when what waited has left.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, on_sent: Callable[[], None]) -> None:
        self._sock = socket.socket(fileno=os.dup(sock.fileno()))
        self._sock.setblocking(False)
        self._loop = loop
        self._on_sent = on_sent
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self._closed = False
        self.unsent = 0
        """Bytes that wait."""

    def send(self, frame: bytes) -> None:
        """Any thread; never blocks. A broken connection swallows the frame: its reader hears of it."""
        with self._lock:
            if self._closed:
                return
            if not self._waiting:
                sent = self._offer(frame)
                if sent == len(frame):
                    return
                frame = frame[sent:]
                with suppress(RuntimeError):  # the loop is closed: nobody is left to read either
                    self._loop.call_soon_threadsafe(self._watch)
            self._waiting.append(memoryview(frame))
            self.unsent += len(frame)

    def _offer(self, data: bytes | memoryview) -> int:
        """How many bytes the kernel took; all of them when the connection is broken."""
        try:
            return self._sock.send(data[:SEND_BYTES] if len(data) > SEND_BYTES else data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _watch(self) -> None:
        with self._lock:
            if not self._closed and self._waiting:
                self._loop.add_writer(self._sock.fileno(), self._go_on)

    def _go_on(self) -> None:
        """The kernel takes bytes again. On the event loop."""
        with self._lock:
            while self._waiting:
                first = self._waiting[0]
                sent = self._offer(first)
                self.unsent -= sent
                if sent < len(first):
                    self._waiting[0] = first[sent:]
                    if sent < SEND_BYTES:
                        return
                else:
                    self._waiting.popleft()
            self._loop.remove_writer(self._sock.fileno())
        self._on_sent()

    def close(self) -> None:
        """Drops what waits and gives the descriptor up. On the event loop; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.remove_writer(self._sock.fileno())
                self._sock.close()
                self._waiting.clear()
                self.unsent = 0

    def check_invariants(self) -> None:
        with self._lock:
            assert self.unsent == sum(map(len, self._waiting)), "bytes that wait are miscounted"
            assert all(map(len, self._waiting)), "an empty rest waits"
