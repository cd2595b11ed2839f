"""The Serve ingress deployment: one router process with the HTTP surface, fed with members by Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router import registry
from router.api import Api
from router.dispatch import Dispatcher

log = logging.getLogger("everwarm.router")

FEED = "replica"
"""Name under which :class:`router.membership.Membership` publishes in this process."""


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
        await self._dispatcher.start()
        self._stop_listening = registry.membership.listen(FEED, self._dispatcher.update_replicas)
        # ``options`` starts the handle's router, and with it the membership feed; no call is ever made through it.
        self._replicas = replicas.options(method_name="check_health")
        registry.current_app.set(self._api)
        log.info("router %s is up", name)

    async def __del__(self) -> None:
        """Called and awaited by Serve before it ends the process; its own drain counts HTTP requests."""
        if not hasattr(self, "_stop_listening"):
            return
        await self._api.drain(self._drain_timeout_s)
        self._stop_listening()
        await self._dispatcher.close()
