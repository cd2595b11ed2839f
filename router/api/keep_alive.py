"""Signs of life in a stream that has nothing to say: proxies and clients drop connections that stay silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from router.api.call import Call


@contextmanager
def kept_alive(call: Call, sign: bytes, period_s: float | None) -> Iterator[None]:
    """Sends ``sign`` whenever nothing was sent for ``period_s`` seconds; None: never."""
    if period_s is None:
        yield
        return
    keeper = _Keeper(call, sign, period_s)
    try:
        yield
    finally:
        keeper.stop()


class _Keeper:
    """One timer per stream, armed anew when it fires: a token costs it nothing but the time that it was sent at."""

    def __init__(self, call: Call, sign: bytes, period_s: float) -> None:
        self._call, self._sign, self._period_s = call, sign, period_s
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(period_s, self._fire)

    def _fire(self) -> None:
        left = self._call.last_sent_s + self._period_s - time.monotonic()
        if left <= 0:
            left = self._period_s
            # A reader that takes nothing gets one sign at most.
            if self._sending is None or self._sending.done():
                self._sending = self._loop.create_task(self._send())
        self._timer = self._loop.call_later(left, self._fire)

    async def _send(self) -> None:
        with suppress(Exception):  # the client is gone, which the request's own task learns by itself
            await self._call.event(self._sign)

    def stop(self) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
