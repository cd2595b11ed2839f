"""The Serve actor around one engine: starts it, opens the token plane, proves that the loop advances, drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from replica.loop import Engine
from replica.server import TokenServer

log = logging.getLogger("everwarm.replica")

LINGER_S = 30.0
"""A replica that is told to end serves on for so long while a router still needs it, before it drains."""
METADATA_KEY = "token_plane"
"""Key of [host, port] in what a replica advertises through Serve."""


class ReplicaActor:
    """One engine replica.

    ``make`` gets the replica's name, runs in a thread (it may load weights for minutes) and returns engine and token
    server, neither started. ``load``: the number for autoscaling out of ``Engine.info()``. ``ports``: first and last
    port to try.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        make: Callable[[str], tuple[Engine, TokenServer]],
        load: Callable[[dict[str, Any]], float],
        host: str,
        ports: tuple[int, int],
        drain_timeout_s: float,
    ) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._load = load
        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine, self._server = await asyncio.to_thread(make, self._name)
        gc.freeze()  # full collections over the libraries' objects would show as long steps
        self._engine.start()
        self._address = await self._listen(ray.util.get_node_ip_address() if host == "auto" else host, ports)
        log.info("replica %s serves tokens at %s:%d, pid %d", self._name, *self._address, os.getpid())

    async def _listen(self, host: str, ports: tuple[int, int]) -> tuple[str, int]:
        """Raises OSError when no port of the range is free."""
        first, last = ports
        for port in range(first, last + 1):
            try:
                return await self._server.start(host, port)
            except TimeoutError:  # the engine's silence, which no other port ends; an OSError too
                raise
            except OSError as error:
                if port == last:
                    raise OSError(f"no free port in {first}-{last} on {host}: {error}") from error
        raise AssertionError("unreachable: an empty port range is refused by AppConfig")

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Serve once, when the replica is up; routers read it from their membership feed."""
        return {METADATA_KEY: list(self._address)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every few seconds while autoscaling is on."""
        return {"load": self._load(await asyncio.to_thread(self._engine.info))}

    async def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError when the engine loop does not advance."""
        health = await asyncio.to_thread(self._engine.health)
        if not health.ok:
            raise RuntimeError(f"replica {self._name}: {health.reason}")

    async def __del__(self) -> None:
        """Called and awaited by Serve before it ends the process: streams finish first, as Serve can't see them."""
        if not hasattr(self, "_address"):
            return
        await self._server.await_departure(LINGER_S)
        if not await self._server.drain(self._drain_timeout_s):
            log.warning("replica %s: streams were still running after %.0f s", self._name, self._drain_timeout_s)
        await self._server.close()
        await asyncio.to_thread(self._engine.stop)
