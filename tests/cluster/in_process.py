"""A router and its replicas as in production, but in this process, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from cluster.build import open_replica, open_router
from replica.config import EngineConfig
from replica.loop import Engine
from router.api.options import ApiOptions
from router.dispatch import DispatchOptions

SECRET = "a secret of these tests"


@asynccontextmanager
async def served(model: str, count: int, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[Engine]]]:
    """A client of the HTTP application over ``count`` replicas of the checkpoint, and their engines."""
    config = EngineConfig(device="cpu", threads=1, max_num_pages=512, **options)
    replicas = [await asyncio.to_thread(open_replica, model, config, SECRET, f"r{i}") for i in range(count)]
    router, app = open_router(model, "tiny", ApiOptions(), DispatchOptions(), SECRET, "router")
    try:
        for engine, _ in replicas:
            engine.start()
        router.update_replicas({f"r{i}": await server.start("127.0.0.1") for i, (_, server) in enumerate(replicas)})
        await router.start()
        while not router.directory(0)["in_sync"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://everwarm", timeout=60) as client:
            yield client, [engine for engine, _ in replicas]
    finally:
        await router.close()
        for engine, server in replicas:
            await server.close()
            await asyncio.to_thread(engine.stop)
