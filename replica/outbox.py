"""What an engine says: its requests' tokens, and event batches for the routers' directories."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from replica.events import EventLog
from replica.scheduler import Scheduler
from replica.status import load_of
from replica.step_time import StepTimeModel
from router.wire import EventBatch, Snapshot, TokenDelta

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.045  # between event batches at most, so that consumers see one every 50 ms


class Outbox:
    """Belongs to the loop's thread. The callbacks are the engine's; what they raise is logged and does no harm."""

    def __init__(
        self,
        events: EventLog,
        scheduler: Scheduler,
        step_time: StepTimeModel,
        *,
        on_deltas: Callable[[list[tuple[Any, TokenDelta]]], None],
        on_events: Callable[[EventBatch], None],
        on_said: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.events, self.scheduler, self.step_time = events, scheduler, step_time
        self.on_deltas, self.on_events, self.on_said = on_deltas, on_events, on_said
        self._clock = clock
        self.deltas: list[tuple[Any, TokenDelta]] = []
        """With their owners, not yet handed out."""
        self.fit = step_time.coefficients
        """As last told to routers."""
        self._fitted = self._last_batch = clock()

    def patience(self, now: float) -> float:
        """Seconds until the next heartbeat is due."""
        return max(0.0, self._last_batch + HEARTBEAT_S - now)

    @property
    def is_empty(self) -> bool:
        return not self.deltas and not self.events.has_changes

    def send(self, *, now: bool = False) -> None:
        """Hands out what there is to say; ``now``: an event batch in any case."""
        handed, emitted = self._hand_out(), self._emit(now)
        if handed or emitted:
            _tell(self.on_said)

    def send_tokens(self) -> None:
        """The tokens alone, ahead of what is still to be done for the events."""
        if self._hand_out():
            _tell(self.on_said)

    def snapshot(self, residency: Callable[[], list[list[int]]]) -> list[Snapshot]:
        """Of the keys per tier that ``residency()`` gives, at a batch that has been sent."""
        self.send(now=True)
        return self.events.snapshot(residency(), load_of(self.scheduler, self.fit))

    def _hand_out(self) -> bool:
        if not self.deltas:
            return False
        deltas, self.deltas = self.deltas, []
        _tell(self.on_deltas, deltas)
        return True

    def _emit(self, now: bool) -> bool:
        time = self._clock()
        if not (now or self.events.has_changes or time - self._last_batch >= HEARTBEAT_S):
            return False
        self._last_batch = time
        if time - self._fitted >= HEARTBEAT_S:  # not at every step: it costs some microseconds
            self.fit, self._fitted = self.step_time.coefficients, time
        _tell(self.on_events, self.events.emit(load_of(self.scheduler, self.fit)))
        return True


def _tell(callback: Callable[..., None], *said: Any) -> None:
    try:
        callback(*said)
    except Exception:
        log.exception("%r failed", callback)
