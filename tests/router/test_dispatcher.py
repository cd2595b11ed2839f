"""Dispatchers and token servers over real sockets in one event loop: two routers, several replicas."""

from __future__ import annotations

import asyncio
import random

import pytest
from plane_fakes import FakeReplica, collect, expected_stream, job, start_router, until

from router.backend import Overloaded, Refused, Unavailable
from router.dispatch import Dispatcher, DispatchOptions
from router.streams import StreamsOptions
from tests.router.garbage import garbage_of


def prompt(seed: int, count: int) -> list[int]:
    return [random.Random(seed).randrange(50_000) for _ in range(count)]


async def in_sync(*routers: Dispatcher, replicas: int) -> None:
    def synced() -> bool:
        pictures = [router.directory(0) for router in routers]
        return all(picture["in_sync"] and len(picture["replicas"]) == replicas for picture in pictures)

    await until(synced)


async def test_two_routers_two_replicas_agree() -> None:
    replicas = [await FakeReplica(name).start() for name in ("r1", "r2")]
    routers = [await start_router(*replicas) for _ in range(2)]
    try:
        await in_sync(*routers, replicas=2)
        requests = [job(f"q{i}", [*prompt(i % 4, 200), i], seed=i) for i in range(24)]
        streams = await asyncio.gather(*(collect(routers[i % 2], request) for i, request in enumerate(requests)))
        for request, ids in zip(requests, streams, strict=True):
            assert ids == expected_stream(request.prompt, request.sampling.seed, 8)
        await until(lambda: all(not len(router.placement.directory.pending) for router in routers))
        await asyncio.sleep(0.1)

        def digests(router: Dispatcher) -> list[object]:
            return [(r["replica"], r["epoch"], r["digests"]) for r in router.directory(8)["replicas"]]

        await until(lambda: digests(routers[0]) == digests(routers[1]))
        for router in routers:
            router.check_invariants()
            for replica in replicas:
                slot = router.placement.replicas[replica.name].slot
                assert slot is not None and slot.digests[0].count == len(replica.engine.resident()) > 0
            top = router.directory(4)["prefixes"]
            assert top and all(entry["holders"] and entry["tokens"] == 192 for entry in top)
    finally:
        for router in routers:
            await router.close()
        for replica in replicas:
            await replica.close()


async def test_streams_leave_nothing_to_the_garbage_collector() -> None:
    replica = await FakeReplica("r1").start()
    router = await start_router(replica)
    try:
        await in_sync(router, replicas=1)
        with garbage_of("router") as left:
            await asyncio.gather(*(collect(router, job(f"q{i}", prompt(i, 40))) for i in range(4)))
            ticket = await router.admit(job("cancelled", prompt(9, 40)))
            ticket.cancel()
            del ticket
            await asyncio.sleep(0.05)
        assert not left
    finally:
        await router.close()
        await replica.close()


async def test_herd_on_a_new_prefix_stays_together() -> None:
    replicas = [await FakeReplica(f"r{i}", step_s=0.02).start() for i in range(4)]
    router = await start_router(*replicas)
    try:
        await in_sync(router, replicas=4)
        shared = prompt(99, 3200)
        await asyncio.gather(*(collect(router, job(f"h{i}", [*shared, i], max_tokens=2)) for i in range(8)))
        used = [replica for replica in replicas if replica.engine.computed]
        assert len(used) <= 2
        for replica in used:
            assert len(replica.engine.computed) == len(set(replica.engine.computed)) == 200
        router.check_invariants()
    finally:
        await router.close()
        for replica in replicas:
            await replica.close()


async def test_killed_replica_under_streams_changes_nothing_for_the_client() -> None:
    replicas = {name: await FakeReplica(name).start() for name in ("r1", "r2")}
    routers = [await start_router(*replicas.values()) for _ in range(2)]
    try:
        await in_sync(*routers, replicas=2)
        requests = [job(f"k{i}", prompt(i, 100), max_tokens=120, seed=i) for i in range(16)]
        streams = [asyncio.create_task(collect(routers[i % 2], request)) for i, request in enumerate(requests)]
        await until(lambda: sum(router.counters["tokens"] for router in routers) > 16 * 10)
        await replicas["r1"].kill()
        for request, stream in zip(requests, streams, strict=True):
            assert await stream == expected_stream(request.prompt, request.sampling.seed, 120)
        assert sum(router.counters["resumed"] for router in routers) > 0
        for router in routers:
            router.check_invariants()
            assert not len(router.streams)
    finally:
        for router in routers:
            await router.close()
        await replicas["r2"].close()


async def test_the_only_replica_dies_and_comes_back() -> None:
    replica = await FakeReplica("r1").start()
    port = replica.address[1]
    router = await start_router(replica)
    try:
        await in_sync(router, replicas=1)
        stream = asyncio.create_task(collect(router, job("x", prompt(1, 100), max_tokens=200, seed=5)))
        await until(lambda: router.counters["tokens"] > 20)
        await replica.kill()
        await until(lambda: not router.ready())
        await asyncio.sleep(0.3)
        replica = await FakeReplica("r1").start(port)
        assert await stream == expected_stream(prompt(1, 100), 5, 200)
        router.check_invariants()
    finally:
        await router.close()
        await replica.close()


async def test_no_replica_ends_with_an_error_never_a_short_answer() -> None:
    replica = await FakeReplica("r1").start()
    options = DispatchOptions(streams=StreamsOptions(admit_wait_s=0.2, resume_wait_s=0.3))
    router = await start_router(replica, options=options)
    try:
        await in_sync(router, replicas=1)
        ticket = await router.admit(job("x", prompt(1, 50), max_tokens=500))
        with pytest.raises(Unavailable):
            async for _ in ticket.deltas():
                if router.counters["tokens"] > 5 and replica.engine._thread.is_alive():
                    await replica.kill()
        with pytest.raises(Unavailable):
            await router.admit(job("y", prompt(1, 50)))
        router.check_invariants()
    finally:
        await router.close()


async def test_vanished_clients_leave_nothing() -> None:
    replicas = [await FakeReplica(name, step_s=0.01).start() for name in ("r1", "r2")]
    routers = [await start_router(*replicas) for _ in range(2)]
    rng = random.Random(3)
    try:
        await in_sync(*routers, replicas=2)

        async def vanish(index: int) -> None:
            request = job(f"v{index}", [*prompt(index % 7, 300), index], max_tokens=200)
            router = routers[index % 2]
            way = rng.randrange(3)
            admitting = asyncio.create_task(router.admit(request))
            if way == 0:  # before the replica's answer
                await asyncio.sleep(rng.random() * 0.003)
                admitting.cancel()
            try:
                ticket = await admitting
            except asyncio.CancelledError:
                return
            stream = ticket.deltas()
            if way == 1:
                ticket.cancel()
            elif way == 2:
                await asyncio.wait_for(anext(stream), 10)
            await stream.aclose()
            ticket.cancel()

        await asyncio.gather(*(vanish(index) for index in range(200)))
        await until(lambda: all(replica.engine.idle() for replica in replicas))
        await until(lambda: all(not len(router.placement.directory.pending) for router in routers))
        for router in routers:
            router.check_invariants()
            assert not len(router.streams)
            assert all(not len(state.backlog) for state in router.placement.replicas.values())
        assert all(not connection.requests for r in replicas for connection in r.server._routers.values())
        assert await collect(routers[0], job("after", prompt(0, 40))) == expected_stream(prompt(0, 40), 0, 8)
    finally:
        for router in routers:
            await router.close()
        for replica in replicas:
            await replica.close()


async def test_overload_moves_on_then_refuses() -> None:
    replicas = [await FakeReplica(name, step_s=0.02).start() for name in ("r1", "r2")]
    for replica in replicas:
        replica.engine.max_waiting = 2
    router = await start_router(*replicas)
    try:
        await in_sync(router, replicas=2)
        results = await asyncio.gather(
            *(router.admit(job(f"o{i}", [*prompt(1, 2000), i])) for i in range(8)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, Overloaded)]
        assert len(refused) == 4 and all(error.retry_after_s == 2.0 for error in refused)
        assert all(replica.engine.submitted == 2 for replica in replicas)
        with pytest.raises(Refused, match="max_model_len is 4096") as info:
            await router.admit(job("long", prompt(1, 5000)))
        assert info.value.param == "prompt"
        with pytest.raises(Refused):
            await router.admit(job("bad", [1, -5]))
        for result in results:
            if not isinstance(result, BaseException):
                result.cancel()
        router.check_invariants()
    finally:
        await router.close()
        for replica in replicas:
            await replica.close()


async def test_slo_that_nobody_can_meet_is_refused_at_once() -> None:
    replica = await FakeReplica("r1").start()
    router = await start_router(replica)
    try:
        await in_sync(router, replicas=1)
        await until(lambda: router.placement.replicas["r1"].coefficients is not None)
        with pytest.raises(Overloaded, match=r"within x-ttft-slo-ms = 1$") as caught:
            await router.admit(job("s", prompt(1, 2000), ttft_slo_s=0.001))
        assert caught.value.param == "x-ttft-slo-ms"
        assert replica.engine.submitted == 0
        assert len(await collect(router, job("t", prompt(1, 2000), ttft_slo_s=10.0))) == 8
    finally:
        await router.close()
        await replica.close()


async def test_a_looser_slo_than_the_servers_own_limit_is_not_blamed() -> None:
    replica = await FakeReplica("r1").start()
    router = await start_router(replica, options=DispatchOptions(streams=StreamsOptions(max_ttft_s=0.001)))
    try:
        await in_sync(router, replicas=1)
        await until(lambda: router.placement.replicas["r1"].coefficients is not None)
        for slo_s in (None, 10.0):
            with pytest.raises(Overloaded, match=r"within max_ttft_s = 0\.001$"):
                await router.admit(job("s", prompt(1, 2000), ttft_slo_s=slo_s))
    finally:
        await router.close()
        await replica.close()


async def test_draining_replica_finishes_its_streams_and_gets_no_more() -> None:
    replicas = {name: await FakeReplica(name).start() for name in ("r1", "r2")}
    router = await start_router(*replicas.values())
    try:
        await in_sync(router, replicas=2)
        running = [asyncio.create_task(collect(router, job(f"d{i}", prompt(i, 40), max_tokens=60))) for i in range(8)]
        await until(lambda: all(replica.engine.submitted for replica in replicas.values()))
        await until(lambda: len(router.streams) == 8)
        before = replicas["r1"].engine.submitted
        drained = asyncio.create_task(replicas["r1"].server.drain(10.0))
        await until(lambda: router.directory(0)["replicas"][0]["state"] == "draining")
        await asyncio.gather(*(collect(router, job(f"n{i}", prompt(i, 40))) for i in range(8)))
        assert replicas["r1"].engine.submitted == before
        assert await drained
        router.update_replicas({"r2": replicas["r2"].address})
        await until(lambda: [r["replica"] for r in router.directory(0)["replicas"]] == ["r2"])
        streams = await asyncio.gather(*running)
        assert streams == [expected_stream(prompt(i, 40), 0, 60) for i in range(8)]
        assert router.counters["lost"] == 0
        router.check_invariants()
    finally:
        await router.close()
        for replica in replicas.values():
            await replica.close()


async def test_engines_limits_and_membership_from_a_thread() -> None:
    replicas = [await FakeReplica(name).start() for name in ("r1", "r2")]
    router = await start_router(replicas[0])
    try:
        await in_sync(router, replicas=1)
        assert router.limits() == replicas[0].server._limits
        await asyncio.to_thread(router.update_replicas, {replica.name: replica.address for replica in replicas})
        await in_sync(router, replicas=2)
        engines = await router.engines()
        assert [(e["replica"], e["engine"], e["state"]) for e in engines] == [
            ("r1", "r1", "open"),
            ("r2", "r2", "open"),
        ]
    finally:
        await router.close()
        for replica in replicas:
            await replica.close()


async def test_replica_that_leaves_serves_on_for_a_router_without_another() -> None:
    """Until it drains, or another replica is there; then it is let go."""
    replicas = {name: await FakeReplica(name).start() for name in ("r1", "r2")}
    router = await start_router(replicas["r1"])
    try:
        await in_sync(router, replicas=1)
        router.update_replicas({})
        await until(lambda: bool(router.placement.retiring()))
        assert not router.ready(), "nothing to count on"
        assert len(await collect(router, job("a", prompt(1, 40)))) == 8
        departed = asyncio.create_task(replicas["r1"].server.await_departure(30.0))
        router.update_replicas({"r2": replicas["r2"].address})
        await asyncio.wait_for(departed, 10.0)
        await in_sync(router, replicas=1)
        assert len(await collect(router, job("b", prompt(1, 40)))) == 8
        assert replicas["r1"].engine.submitted == 1 and replicas["r2"].engine.submitted == 1
        router.update_replicas({})
        await until(lambda: bool(router.placement.retiring()))
        assert await replicas["r2"].server.drain(10.0)
        await until(lambda: not router.links)
        router.check_invariants()
    finally:
        await router.close()
        for replica in replicas.values():
            await replica.close()


async def test_several_last_resorts_leave_together_once_another_replica_is_there() -> None:
    old = [await FakeReplica(name).start() for name in ("a", "b", "c")]
    new = await FakeReplica("d").start()
    router = await start_router(*old)
    try:
        await until(lambda: sum(state.accepting for state in router.placement.replicas.values()) == 3)
        router.update_replicas({})
        await until(lambda: len(router.placement.retiring()) == 3)
        assert await collect(router, job("r", list(range(40)))), "served on until another is there"
        router.update_replicas({"d": new.address})
        await until(lambda: set(router.links) == {"d"} and router.ready())
        assert router.links["d"].lost_connections == 0
        router.check_invariants()
    finally:
        await router.close()
        for replica in (*old, new):
            await replica.close()


async def test_any_number_of_replicas_may_leave_at_once() -> None:
    router = await start_router()
    try:
        router.update_replicas({f"r{index}": ("127.0.0.1", 9) for index in range(600)})
        await until(lambda: len(router.links) == 600)
        router.update_replicas({})
        await until(lambda: not router.links)
        router.check_invariants()
    finally:
        await router.close()


async def test_a_replica_that_leaves_during_the_handshake_stays_away() -> None:
    replica = await FakeReplica("r1").start()
    gate, waiting = asyncio.Event(), asyncio.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.set()
        await gate.wait()
        there, back = await asyncio.open_connection(*replica.address)
        await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)

    proxy = await asyncio.start_server(slow, "127.0.0.1", 0)
    router = await start_router()
    try:
        router.update_replicas({"r1": proxy.sockets[0].getsockname()})
        await waiting.wait()
        router.update_replicas({})
        await until(lambda: not router.links)
        gate.set()
        await asyncio.sleep(0.3)
        assert not replica.server._routers, "a connection that nobody knows of"
        assert not router.placement.directory.slots()
    finally:
        await router.close()
        proxy.close()
        await replica.close()
