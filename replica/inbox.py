"""How other threads reach the engine's: calls that its loop runs between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Inbox:
    """``post`` and ``ask`` may be called from any thread; ``run``, ``wait`` and ``close`` belong to the loop's.

    While no loop serves it (before ``open``, after ``close``), ``ask`` runs the function in the calling thread.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._wake = threading.Event()
        self._gate = threading.Lock()
        self._server: threading.Thread | None = None

    def open(self, server: threading.Thread) -> None:
        """``server`` will serve this inbox from now on."""
        with self._gate:
            self._server = server

    def close(self) -> None:
        with self._gate:
            self._server = None
        self.run()

    def post(self, function: Callable[[Any], None], argument: Any) -> None:
        """``function(argument)``, soon, on the loop."""
        self._calls.append((function, argument))
        self._wake.set()

    def ask(self, function: Callable[[], Any], timeout: float | None = 60.0) -> Any:
        """What ``function()`` returns or raises when the loop runs it. Raises TimeoutError after ``timeout`` s."""
        future: Future[Any] = Future()
        with self._gate:
            remote = self._server is not None and self._server is not threading.current_thread()
            if remote:
                self.post(_answer, (function, future))
        return future.result(timeout) if remote else function()

    def run(self) -> None:
        while self._calls:
            function, argument = self._calls.popleft()
            function(argument)

    def wait(self, timeout: float) -> None:
        """Until somebody posts, at most ``timeout`` seconds."""
        if not self._calls:
            self._wake.wait(timeout)
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def pending(self, function: Callable[[Any], None]) -> list[Any]:
        """Arguments of the calls of ``function`` not yet run."""
        return [argument for posted, argument in list(self._calls) if posted == function]


def _answer(call: tuple[Callable[[], Any], Future[Any]]) -> None:
    function, future = call
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
