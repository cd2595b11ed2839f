"""Everything but Ray in one process: HTTP surface, router, token plane, engines, models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.build import open_replica, open_router
from replica.config import EngineConfig
from replica.loop import Engine
from replica.server import TokenServer
from router.api import Api, ApiOptions
from router.dispatch import Dispatcher, DispatchOptions

SECRET = "0123456789abcdef0123456789abcdef"


@dataclass
class Stack:
    http: httpx.AsyncClient
    api: Api
    dispatcher: Dispatcher
    replicas: dict[str, tuple[Engine, TokenServer]]


@asynccontextmanager
async def stack(model: str | None, replicas: int, **engine: Any) -> AsyncIterator[Stack]:
    config = EngineConfig(threads=1, **engine)
    made: dict[str, tuple[Engine, TokenServer]] = {}
    members = {}
    for name in (f"replica-{index}" for index in range(replicas)):
        made[name] = await asyncio.to_thread(open_replica, model, config, SECRET, name)
        made[name][0].start()
        members[name] = await made[name][1].start("127.0.0.1")
    options = (None, ApiOptions(), DispatchOptions())
    dispatcher, api = await asyncio.to_thread(open_router, model, *options, SECRET, "router")
    await dispatcher.start()
    dispatcher.update_replicas(members)
    transport = httpx.ASGITransport(app=api)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://everwarm", timeout=600) as http:
            await until(lambda: sum(link.replica.accepting for link in dispatcher.links.values()) == replicas)
            yield Stack(http, api, dispatcher, made)
    finally:
        await dispatcher.close()
        for running, server in made.values():
            await server.close()
            await asyncio.to_thread(running.stop)
            running.runner.close()
        api.services.grammars.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
