"""How many streams may be in resubmission at one moment, so that a dying cluster isn't stormed by its own routers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class RetryBudget:
    """At most max(floor, ratio * live requests) permits; the others wait their turn, first come first served.

    Nobody fails for want of a permit: half of all streams may have lived on a replica that just died.
    """

    def __init__(self, live: Callable[[], int], *, floor: int = 16, ratio: float = 0.1) -> None:
        if floor < 1 or not 0 <= ratio <= 1:
            raise ValueError(f"retry budget floor {floor} (at least 1) and ratio {ratio} (0 to 1)")
        self._live = live
        self._floor = floor
        self._ratio = ratio
        self._used = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return max(self._floor, int(self._ratio * self._live()))

    async def __aenter__(self) -> None:
        if self._used < self.limit and not self._queue:
            self._used += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._used -= 1
            self._grant()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._used -= 1
        self._grant()

    def _grant(self) -> None:
        while self._queue and self._used < self.limit:
            turn = self._queue.popleft()
            if not turn.done():
                self._used += 1
                turn.set_result(None)

    def check_invariants(self) -> None:
        assert self._used >= 0
        assert not self._queue or self._used > 0
