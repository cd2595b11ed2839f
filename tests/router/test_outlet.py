"""The sending half of a connection: any thread, whole frames, in order, and a reader that lags."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from router.outlet import Outlet


@contextlib.asynccontextmanager
async def pair(on_sent: Callable[[], None] = lambda: None) -> AsyncIterator[tuple[Outlet, socket.socket]]:
    """An outlet with a small kernel buffer, and the socket that reads what it sends."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    theirs.setblocking(False)
    outlet = Outlet(ours, asyncio.get_running_loop(), on_sent)
    try:
        yield outlet, theirs
    finally:
        outlet.close()
        ours.close()
        theirs.close()


def frame(sender: int, number: int, size: int) -> bytes:
    return struct.pack("<III", size, sender, number) + bytes([number % 251]) * size


def cut(data: bytes) -> list[tuple[int, int, bytes]]:
    """(sender, number, body) of every frame; what isn't one raises."""
    found, at = [], 0
    while at < len(data):
        size, sender, number = struct.unpack_from("<III", data, at)
        body = data[at + 12 : at + 12 + size]
        assert len(body) == size and body == bytes([number % 251]) * size, f"frame {number} of {sender} is torn"
        found.append((sender, number, body))
        at += 12 + size
    return found


async def read(sock: socket.socket, count: int, rng: random.Random) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < count:
        data += await asyncio.wait_for(loop.sock_recv(sock, rng.randrange(1, 50_000)), 10)
        if rng.random() < 0.1:
            await asyncio.sleep(0.001)  # a reader that lags
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
async def test_frames_of_several_threads_arrive_whole_and_in_each_ones_order(seed: int) -> None:
    rng = random.Random(seed)
    plans = [[rng.choice((0, 1, 30, 500, 9000, 300_000)) for _ in range(60)] for _ in range(3)]
    async with pair() as (outlet, theirs):

        def send(sender: int) -> None:
            for number, size in enumerate(plans[sender]):
                outlet.send(frame(sender, number, size))
                outlet.check_invariants()

        threads = [threading.Thread(target=send, args=(sender,)) for sender in range(len(plans))]
        for thread in threads:
            thread.start()
        data = await read(theirs, sum(12 + size for plan in plans for size in plan), rng)
        for thread in threads:
            thread.join()
        found = cut(data)
        for sender, plan in enumerate(plans):
            assert [(n, len(b)) for s, n, b in found if s == sender] == list(enumerate(plan))
        assert outlet.unsent == 0
        outlet.check_invariants()


async def test_what_waits_is_counted_and_its_end_is_told() -> None:
    told: list[bool] = []
    async with pair(lambda: told.append(True)) as (outlet, theirs):
        outlet.send(b"x" * 10)
        assert outlet.unsent == 0 and not told
        outlet.send(b"y" * 1_000_000)
        waiting = outlet.unsent
        assert 0 < waiting < 1_000_000
        outlet.send(b"z" * 7)
        assert outlet.unsent == waiting + 7, "it must not overtake"
        data = await read(theirs, 1_000_017, random.Random(0))
        assert data == b"x" * 10 + b"y" * 1_000_000 + b"z" * 7
        await asyncio.sleep(0.01)
        assert told == [True] and outlet.unsent == 0


async def test_a_broken_connection_swallows_and_a_closed_outlet_too() -> None:
    async with pair() as (outlet, theirs):
        outlet.send(b"y" * 1_000_000)
        theirs.close()
        await asyncio.sleep(0.01)
        outlet.send(b"more")
        await asyncio.sleep(0.01)
        assert outlet.unsent == 0
        outlet.close()
        outlet.close()
        outlet.send(b"late")
        outlet.check_invariants()
