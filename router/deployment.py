"""The Serve ingress deployment: one router process with the HTTP surface, fed with members by Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router import registry
from router.api import Api
from router.dispatch import Dispatcher

log = logging.getLogger("everwarm.router")

FEED = "replica"
"""Name under which :class:`router.membership.Membership` publishes in this process."""

FIRST_REPLICA_S = 1800.0
"""Longest wait for the first replica, whose weights may take minutes; then ``/ready`` says what is missing."""


def current_app() -> Any:
    """Called by ``serve.ingress`` in the replica process, right after the constructor."""
    return registry.current_app.get()


class RouterActor:
    """``make`` gets the router's name, runs in a thread and returns what serves it: backend and HTTP surface."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        replicas: DeploymentHandle[Any],
        make: Callable[[str], tuple[Dispatcher, Api]],
        drain_timeout_s: float,
    ) -> None:
        self._drain_timeout_s = drain_timeout_s
        name = serve.get_replica_context().replica_id.unique_id
        self._dispatcher, self._api = await asyncio.to_thread(make, name)
        self._api.behind_serve = True
        await self._dispatcher.start()
        self._stop_listening = registry.membership.listen(FEED, self._dispatcher.update_replicas)
        # ``options`` starts the handle's router, and with it the membership feed; no call is ever made through it.
        self._replicas = replicas.options(method_name="check_health")
        registry.current_app.set(self._api)
        await self._await_replica()
        log.info("router %s is up", name)

    async def _await_replica(self) -> None:
        """Until a replica is admitted, or for ``FIRST_REPLICA_S``.

        Serve sends requests to a router, and ends the one that it replaces, as soon as it is up. In an update to
        another model it may be up long before a replica of that model is.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPLICA_S):
                while not self._dispatcher.ready():
                    await self._dispatcher.streams.changes.wait(FIRST_REPLICA_S)

    async def __del__(self) -> None:
        """Called and awaited by Serve before it ends the process; its own drain counts HTTP requests."""
        if not hasattr(self, "_stop_listening"):
            return
        await self._api.drain(self._drain_timeout_s)
        self._stop_listening()
        await self._dispatcher.close()
