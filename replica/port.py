"""What the token server needs of an engine, and the slow part of a submission, done off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from router.wire import EventBatch, Snapshot, Submit


class EnginePort(Protocol):
    """What the server needs of :class:`replica.loop.Engine`. All thread-safe; ``owner`` is the connection."""

    def prepare(self, request: Submit) -> None:
        """Whatever is slow about submitting it, so that :meth:`submit` is quick. Raises nothing."""
        ...

    def submit(self, owner: Any, request: Submit) -> None:
        """Raises Refusal."""
        ...

    def cancel(self, owner: Any, request_id: str) -> None: ...

    def replay(self, from_seq: int) -> list[EventBatch] | None: ...

    def snapshot(self) -> list[Snapshot]:
        """May wait for the engine's loop."""
        ...

    def drain(self) -> None: ...

    def idle(self) -> bool: ...

    def info(self) -> dict[str, Any]: ...


class Preparer:
    """Submissions on their way to the engine. Those with a grammar wait for a thread that compiles it: up to a second
    in which heartbeats and other streams must go on. Used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: set[tuple[Any, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: tuple[Any, str]) -> bool:
        return key in self._waiting

    def run(self, engine: EnginePort, owner: Any, request: Submit, then: Callable[[Any, Submit], None]) -> None:
        """Calls ``then`` at once or, unless it is cancelled, once the engine is prepared."""
        if request.sampling.grammar is None:
            then(owner, request)
            return
        task = asyncio.get_running_loop().create_task(self._prepare(engine, owner, request, then))
        self._waiting.add((owner, request.request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, owner: Any, request_id: str) -> None:
        self._waiting.discard((owner, request_id))

    def cancel_all(self, owner: Any) -> None:
        self._waiting -= {key for key in self._waiting if key[0] is owner}

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _prepare(
        self, engine: EnginePort, owner: Any, request: Submit, then: Callable[[Any, Submit], None]
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, engine.prepare, request)
        if (key := (owner, request.request_id)) in self._waiting:
            self._waiting.discard(key)
            then(owner, request)
