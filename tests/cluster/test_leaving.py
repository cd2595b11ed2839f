"""Whoever leaves, in whatever way, holds nothing a second later: engines, token plane and HTTP in one process."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from http_client import long_answer, post
from stack import Stack, stack, until

pytestmark = pytest.mark.alone
WITHIN_S = 1.0


@asynccontextmanager
async def listening(made: Stack) -> AsyncIterator[str]:
    """The HTTP surface on a loopback port, in this event loop."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(made.api, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        server.should_exit = True
        await serving


def held(made: Stack, gone: str | None = None) -> dict[str, int]:
    out = {"in flight": made.api.services.in_flight, "watchers": len(made.api.services.watchers)}
    out |= {"streams": len(made.dispatcher.streams), "reservations": len(made.dispatcher.placement.directory.pending)}
    for name, (engine, _) in made.replicas.items():
        if name != gone:
            out |= {f"{name} pages": engine.pool.counts()["held"], f"{name} running": len(engine.scheduler.running)}
    return out


async def seconds_until_free(made: Stack, gone: str | None = None) -> float:
    started = time.monotonic()
    while any(held(made, gone).values()):
        assert time.monotonic() - started < 20, held(made, gone)
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def running(made: Stack, least: int) -> None:
    await until(lambda: sum(len(engine.scheduler.running) for engine, _ in made.replicas.values()) >= least)


def check_invariants(made: Stack, gone: str | None = None) -> None:
    made.dispatcher.check_invariants()
    for name, (engine, _) in made.replicas.items():
        if name != gone:
            engine.check_invariants()


async def test_200_clients_that_vanish(tiny: Path) -> None:
    async with stack(str(tiny), 2, max_num_pages=1024) as made, listening(made) as url:
        connections = [post(url, long_answer(i, stream=i % 2 == 0, n=1 + i % 3 // 2)) for i in range(200)]
        # Reading and tokenizing 200 prompts is not part of the second.
        await until(lambda: made.api.services.in_flight == 200)
        await running(made, 16)
        for connection in connections:
            connection.close()
        assert await seconds_until_free(made) < WITHIN_S
        check_invariants(made)


async def test_clients_that_read_a_byte_a_second(tiny: Path) -> None:
    async with stack(str(tiny), 1, max_num_pages=1024) as made, listening(made) as url:
        slow = [
            post(url, long_answer(i, stream=True, logprobs=20, max_tokens=400), receive_buffer=2048) for i in range(4)
        ]
        await running(made, 4)
        for _ in range(2):
            assert all([await asyncio.to_thread(connection.recv, 1) for connection in slow])
            quick = await made.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
            assert quick.status_code == 200
            await asyncio.sleep(1)
        # Their answers are made at the engine's pace, whatever they read; then the engine holds nothing for them.
        await until(lambda: not made.replicas["replica-0"][0].scheduler.running, 60)
        assert held(made)["replica-0 pages"] == 0
        for connection in slow:
            connection.close()
        assert await seconds_until_free(made) < WITHIN_S
        check_invariants(made)


async def test_a_drain_ends_with_its_last_client(tiny: Path) -> None:
    async with stack(str(tiny), 2, max_num_pages=1024) as made, listening(made) as url:
        connections = [post(url, long_answer(i, stream=i % 2 == 0)) for i in range(24)]
        await running(made, 24)
        draining = asyncio.create_task(made.replicas["replica-0"][1].drain(30))
        await asyncio.sleep(0.1)
        assert not draining.done()
        for connection in connections:
            connection.close()
        assert await seconds_until_free(made) < WITHIN_S
        assert await asyncio.wait_for(draining, WITHIN_S)
        check_invariants(made)


@pytest.mark.parametrize("how", ["killed", "draining"])
async def test_a_replica_that_leaves_holds_no_stream_up(tiny: Path, how: str) -> None:
    """Every stream ends in full, on it or elsewhere, and then nobody holds anything."""
    rng = random.Random(3)

    async def ask(made: Stack, index: int) -> list[int]:
        prompt = [rng.randrange(256) for _ in range(30 + index)]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True, "return_token_ids": True}
        answer = (await made.http.post("/v1/completions", json=body)).json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    async with stack(str(tiny), 2, max_num_pages=1024) as made:
        asked = [asyncio.create_task(ask(made, index)) for index in range(12)]
        await running(made, 12)
        engine, server = made.replicas["replica-0"]
        draining = None
        if how == "killed":
            await server.close(abort=True)
            await asyncio.to_thread(engine.stop)
        else:
            draining = asyncio.create_task(server.drain(30))
        assert [len(ids) for ids in await asyncio.gather(*asked)] == [150] * 12
        gone = "replica-0" if how == "killed" else None
        assert await seconds_until_free(made, gone) < WITHIN_S
        if draining is not None:
            assert await draining
        check_invariants(made, gone)
