"""Streams that change replicas, end badly, or are read slowly; links that are refused, moved or restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from plane_fakes import LIMITS, ROOT, SECRET, FakeReplica, collect, expected_stream, job, start_router, until
from prometheus_client import CollectorRegistry, generate_latest

from replica.server import TokenServer
from router.backend import DeadlineExceeded, EngineFault, Job, Overloaded, Refused, Unavailable
from router.connection import ConnectionOptions
from router.dispatch import Dispatcher, DispatchOptions
from router.link import LinkOptions
from router.plane_metrics import PlaneCollector
from router.retry_budget import RetryBudget
from router.streams import StreamsOptions
from router.ticket import StreamTicket, Work
from router.wire import Code, EventBatch, Finish, Load, Logprob, Refusal, Sampling, Submit, TokenDelta

PROMPT = list(range(100, 140))


class Scripted:
    """An engine that does what the test says, on the test's own thread."""

    def __init__(self, name: str, epoch: int = 1, *, root=ROOT) -> None:
        self.name, self.epoch, self.seq = name, epoch, 0
        self.submits: list[tuple[object, Submit]] = []
        self.cancelled: list[str] = []
        self.refuse: list[Refusal | Exception | None] = []
        self.server = TokenServer(SECRET, replica_id=name, root=root, limits=LIMITS, engine=self)

    async def start(self, port: int = 0) -> Scripted:
        self.beat()
        self.address = await self.server.start("127.0.0.1", port)
        return self

    def beat(self) -> None:
        self.server.on_events(EventBatch(self.name, self.epoch, self.seq, self.seq, load=Load(free_pages=100)))
        self.server.send_out()
        self.seq += 1

    def submit(self, owner, request) -> None:
        answer = self.refuse.pop(0) if self.refuse else None
        if answer is not None:
            raise answer
        self.submits.append((owner, request))

    def cancel(self, owner, request_id) -> None:
        self.cancelled.append(request_id)

    def replay(self, from_seq):
        return []

    def snapshot(self):
        from router.wire import Snapshot

        return [Snapshot(self.name, self.epoch, self.seq - 1, 0, 1, 0, b"", [(0, 0), (0, 0)])]

    def drain(self) -> None: ...

    def idle(self) -> bool:
        return True

    def info(self):
        return {"unsendable": object()}

    def say(self, ids, finish=None, *, which: int = -1, **more) -> None:
        owner, request = self.submits[which]
        self.server.on_deltas([(owner, TokenDelta(request.request_id, ids, finish, **more))])
        self.server.send_out()


@contextlib.asynccontextmanager
async def cluster(
    *names: str, options: DispatchOptions | None = None
) -> AsyncIterator[tuple[Dispatcher, dict[str, Scripted]]]:
    engines = {name: await Scripted(name).start() for name in names}
    router = await start_router(*engines.values(), options=options)
    try:
        await until(lambda: sum(state.accepting for state in router.placement.replicas.values()) == len(names))
        yield router, engines
        router.check_invariants()
    finally:
        await router.close()
        for engine in engines.values():
            await engine.server.close()


async def read(ticket) -> tuple[list[int], str | None]:
    ids, finish = [], None
    async for delta in ticket.deltas():
        ids += delta.ids
        finish = delta.finish
    return ids, finish


@pytest.mark.parametrize("caching", [1, 0])
async def test_pages_under_way_count_only_where_they_are_kept(caching: int) -> None:
    engine = Scripted("r1")
    engine.server._limits["prefix_caching"] = caching
    router = await start_router(await engine.start())
    try:
        await until(lambda: router.ready())
        for name in ("a", "b"):
            await router.admit(job(name, PROMPT))
        assert router.counters["matched_tokens"] == 32 * caching
        router.check_invariants()
    finally:
        await router.close()
        await engine.server.close()


async def test_abort_by_the_replica_goes_on_elsewhere_with_the_same_prompt_boundary() -> None:
    async with cluster("r1", "r2") as (router, engines):
        ticket = await router.admit(Job("a", PROMPT, Sampling(max_tokens=5, prompt_logprobs=0), deadline_s=60.0))
        first = engines[ticket.replica]
        first.say([1, 2], num_cached=16, prompt_logprobs=[None])
        await until(lambda: router.counters["tokens"] == 2)
        first.say([3], str(Finish.ABORT))
        await until(lambda: sum(len(engine.submits) for engine in engines.values()) == 2)
        second = engines[ticket.replica]
        resumed = second.submits[-1][1]
        assert resumed.num_tokens == 43 and resumed.num_prompt == 40 and len(resumed.hashes) == 2 * 16
        assert resumed.sampling == Sampling(max_tokens=5), "prompt logprobs were delivered already"
        assert resumed.request_id != first.submits[0][1].request_id and 0 < resumed.deadline_ms <= 60_000
        second.say([4, 5], str(Finish.LENGTH), num_cached=32)
        assert await read(ticket) == ([1, 2, 3, 4, 5], "length")
        assert ticket.num_cached == 16


async def test_faults_and_deadlines_raise_after_the_tokens_that_came() -> None:
    async with cluster("r1") as (router, engines):
        ends = ((Finish.ERROR, EngineFault), (Finish.DEADLINE, DeadlineExceeded), (Finish.REFUSED, Refused))
        for finish, error in ends:
            ticket = await router.admit(job("f", PROMPT))
            engines["r1"].say([7], str(finish), error="non-finite logits")
            got = []
            with pytest.raises(error, match="non-finite logits"):
                async for delta in ticket.deltas():
                    got += delta.ids
            assert got == [7]
        await until(lambda: not len(router.streams))


async def test_an_end_without_tokens_that_overtakes_the_acceptance_is_the_answer() -> None:
    async with cluster("r1") as (router, engines):
        engine = engines["r1"]
        take = engine.submit
        for finish, error in ((Finish.ERROR, EngineFault), (Finish.DEADLINE, DeadlineExceeded)):

            def submit(owner, request, finish=finish) -> None:
                take(owner, request)
                engine.say([], str(finish), error="the engine step failed")  # its thread was quicker than ours

            engine.submit = submit
            before = len(engine.submits)
            started = asyncio.get_running_loop().time()
            with pytest.raises(error, match="step failed"):
                await read(await router.admit(job("o", PROMPT)))
            assert asyncio.get_running_loop().time() - started < 2.0 and len(engine.submits) == before + 1


async def test_one_silent_replica_does_not_keep_the_others_from_being_described() -> None:
    async with cluster("r1", "r2") as (router, engines):
        engines["r1"].server._handlers[15] = lambda router, frame: None
        started = asyncio.get_running_loop().time()
        first, second = await router.engines(0.2)
        assert asyncio.get_running_loop().time() - started < 2.0
        assert first["error"] == "no answer in time" and "can't be sent" in second["error"]


async def test_too_many_tokens_and_impossible_ids_are_faults() -> None:
    async with cluster("r1") as (router, engines):
        for ids, text in (([1] * 9, "more than max_tokens = 8"), ([-1], "token ids"), (["x"], "token ids")):
            ticket = await router.admit(job("m", PROMPT))
            engines["r1"].say(ids)
            with pytest.raises(EngineFault, match=text):
                await read(ticket)
            await until(lambda: engines["r1"].submits[-1][1].request_id in engines["r1"].cancelled)


async def test_a_request_that_kills_replicas_is_stopped() -> None:
    options = DispatchOptions(streams=StreamsOptions(max_deaths=2, resume_wait_s=10.0))
    async with cluster("r1", "r2", "r3", "r4", options=options) as (router, engines):
        ticket = await router.admit(job("poison", PROMPT))
        reading = asyncio.create_task(read(ticket))
        for count in range(1, 4):
            await until(lambda count=count: sum(len(engine.submits) for engine in engines.values()) == count)
            victim = engines[ticket.replica]
            victim.say([count])
            await until(lambda count=count: router.counters["tokens"] == count)
            await victim.server.close(abort=True)
        with pytest.raises(EngineFault, match="3 replicas in a row"):
            await reading
        assert sum(len(engine.submits) for engine in engines.values()) == 3


async def test_refusals_are_told_apart() -> None:
    async with cluster("r1", "r2") as (router, engines):
        for engine in engines.values():
            engine.refuse = [Refusal(Code.OVERLOADED, "full", retry_after_s=3.0)]
        with pytest.raises(Overloaded, match="full") as info:
            await router.admit(job("o", PROMPT))
        assert info.value.retry_after_s == 3.0
        for engine in engines.values():
            engine.refuse = [Refusal(Code.DRAINING, "not now")]
        assert await router.admit(job("d", PROMPT)), "a drain that passes turns nobody away"
        for engine in engines.values():
            engine.refuse = [ValueError("engine bug")]
        with pytest.raises(EngineFault, match="engine bug"):
            await router.admit(job("b", PROMPT))
        for engine in engines.values():
            engine.refuse = [Refusal(Code.INVALID, "no such grammar", "response_format")]
        with pytest.raises(Refused, match="no such grammar"):
            await router.admit(job("i", PROMPT))
        with pytest.raises(Refused, match="no tokens"):
            await router.admit(job("e", []))
        router.streams.close()


async def test_a_leaving_replica_that_refuses_its_last_request_is_let_go() -> None:
    async with cluster("r1", "r2") as (router, engines):
        held: dict[str, str] = {}
        handlers = {name: engine.server._handlers for name, engine in engines.items()}
        real = {name: mine[10] for name, mine in handlers.items()}
        for name, mine in handlers.items():
            mine[10] = lambda _, frame, name=name: held.update({name: frame[1]})
        admitted = asyncio.create_task(router.admit(job("l", PROMPT)))
        await until(lambda: bool(held))
        ((leaving, request),) = held.items()
        (stays,) = engines.keys() - {leaving}
        handlers[stays][10] = real[stays]
        router.update_replicas({stays: engines[stays].address})
        await until(lambda: not router.links[leaving].replica.accepting)
        refusal = Refusal(Code.DRAINING, "this replica drains").to_frame(request)
        for connection in list(engines[leaving].server._routers):
            connection.send(refusal)
        assert (await admitted).replica == stays
        await until(lambda: set(router.links) == {stays})


async def test_no_answer_within_the_limit_counts_as_overload() -> None:
    options = DispatchOptions(streams=StreamsOptions(accept_timeout_s=0.2))
    async with cluster("r1", options=options) as (router, engines):
        engines["r1"].server._handlers[10] = lambda router, frame: None
        with pytest.raises(Overloaded, match=r"no answer within 0\.2 s"):
            await router.admit(job("n", PROMPT))
        assert not len(router.streams)


async def test_a_deadline_passes_while_a_replica_has_not_answered() -> None:
    async with cluster("r1") as (router, engines):
        engines["r1"].server._handlers[10] = lambda router, frame: None
        started = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="before a replica answered"):
            await router.admit(Job("d", PROMPT, Sampling(max_tokens=5), deadline_s=0.3))
        assert asyncio.get_running_loop().time() - started < 2.0 and not len(router.streams)


async def test_engine_restart_behind_an_open_connection_resumes_its_streams() -> None:
    async with cluster("r1") as (router, engines):
        engine = engines["r1"]
        ticket = await router.admit(job("r", PROMPT, max_tokens=3))
        engine.say([1])
        await until(lambda: router.counters["tokens"] == 1)
        old = router.placement.replicas["r1"].slot
        engine.epoch, engine.seq = 2, 0
        engine.beat()
        await until(lambda: len(engine.submits) == 2)
        slot = router.placement.replicas["r1"].slot
        assert slot is not old and slot.epoch == 2
        engine.say([2, 3], "length")
        assert await read(ticket) == ([1, 2, 3], "length")


async def test_replicas_that_disagree_are_refused_and_said_so(caplog) -> None:
    other = replace(ROOT, kv_dtype="float16")
    async with cluster("r1") as (router, engines):
        odd = await Scripted("odd", root=other).start()
        router.update_replicas({"r1": engines["r1"].address, "odd": odd.address})
        await until(lambda: len(router.links) == 2 and router.links["odd"].state == "refused")
        reason = router.links["odd"].describe()["reason"]
        assert "kv_dtype" in reason and "'float16'" in reason and "'float32'" in reason
        assert not router.placement.replicas["odd"].accepting and not odd.submits
        await odd.server.close()
    strict = Dispatcher(SECRET, expect={"model": "another model"}, options=_impatient())
    engine = await Scripted("r1").start()
    strict.update_replicas({"r1": engine.address})
    await strict.start()
    with pytest.raises(Unavailable, match=r"another model.*model-fp|model-fp.*another model"):
        await strict.admit(job("x", PROMPT))
    await strict.close()
    await engine.server.close()
    with pytest.raises(ValueError, match="modle"):
        Dispatcher(SECRET, expect={"modle": "x"})


def _impatient() -> DispatchOptions:
    return DispatchOptions(streams=StreamsOptions(admit_wait_s=0.3, resume_wait_s=0.3))


async def test_wrong_secret_or_wrong_name_is_never_used() -> None:
    engine = await Scripted("r1").start()
    router = Dispatcher(b"not the replicas' secret", options=_impatient())
    router.update_replicas({"r1": engine.address})
    await router.start()
    with pytest.raises(Unavailable, match="wrong token-plane secret"):
        await router.admit(job("x", PROMPT))
    await router.close()
    router = Dispatcher(SECRET, options=_impatient())
    router.update_replicas({"r2": engine.address, "nowhere": ("127.0.0.1", 1)})
    await router.start()
    with pytest.raises(Unavailable, match="is replica r1, not r2"):
        await router.admit(job("x", PROMPT))
    assert not engine.submits
    await router.close()
    await engine.server.close()


async def test_silent_replica_is_avoided_then_dropped() -> None:
    quick = ConnectionOptions(dead_after_s=0.8, tick_s=0.02, heartbeat_s=0.1)
    options = DispatchOptions(tick_s=0.02, link=LinkOptions(suspicious_after_s=0.25, connection=quick))
    async with cluster("r1", "r2", options=options) as (router, engines):
        ticket = await router.admit(job("s", PROMPT, max_tokens=2))
        silent = ticket.replica
        (other,) = set(engines) - {silent}
        for connection in engines[silent].server._routers:
            connection.send = lambda frame: True  # what a dead node sends: nothing, not even a FIN
        await until(lambda: router.placement.replicas[silent].suspicious)
        for index in range(6):
            assert (await router.admit(job(f"t{index}", [index] * 40))).replica == other
        await until(lambda: len(engines[other].submits) == 7, 3.0)
        resumed = next(s for s in engines[other].submits if s[1].request_id.startswith("s~"))
        engines[other].server.on_deltas([(resumed[0], TokenDelta(resumed[1].request_id, [8, 9], "length"))])
        engines[other].server.send_out()
        assert await read(ticket) == ([8, 9], "length")
        router.streams.close()


async def test_moved_and_renamed_members() -> None:
    async with cluster("r1") as (router, _):
        moved = await Scripted("r1", epoch=9).start()
        router.update_replicas({"r1": moved.address})
        await until(lambda: router.links["r1"].stream.epoch == 9)
        ticket = await router.admit(job("m", PROMPT, max_tokens=1))
        router.update_replicas({})
        await asyncio.sleep(0.05)
        assert router.links["r1"].num_inflight == 1, "a leaving replica finishes what it has"
        router.update_replicas({"r1": moved.address})
        await asyncio.sleep(0.02)
        assert router.ready()
        router.update_replicas({})
        await asyncio.sleep(0.02)
        assert not router.ready()
        moved.say([1], "length")
        assert await read(ticket) == ([1], "length")
        assert [state.name for state in router.placement.retiring()] == ["r1"], "kept while there is no other"
        await moved.server.drain(1.0)
        await until(lambda: not router.links)
        assert not router.placement.replicas and not router.placement.directory.slots()
        await moved.server.close()


async def test_slow_reader_costs_its_max_tokens_and_nobody_elses_time() -> None:
    async with cluster("r1") as (router, engines):
        slow = await router.admit(job("slow", PROMPT, max_tokens=5000))
        quick = await router.admit(job("quick", PROMPT, max_tokens=5000))
        reading = asyncio.create_task(read(quick))
        for index in range(5000):
            finish = "length" if index == 4999 else None
            for which in (0, 1):
                engines["r1"].say([index], finish, which=which)
            if index % 500 == 0:
                await asyncio.sleep(0)
        assert (await reading)[0] == list(range(5000))
        assert len(slow._buffer.ids) == 5000
        deltas = [delta async for delta in slow.deltas()]
        assert len(deltas) == 1 and deltas[0].ids == list(range(5000)) and deltas[0].finish == "length"


async def test_merging_keeps_logprobs_and_the_first_cache_count() -> None:
    class Nobody:
        def drop(self, ticket) -> None: ...

    ticket = StreamTicket(Work(job("x", PROMPT), ROOT), Nobody())
    first, second = Logprob(-1.0, 1), Logprob(-2.0, 2)
    ticket.push(TokenDelta("x", [1], None, 16, [first], [None]))
    ticket.push(TokenDelta("x", [2], None, None, [second]))
    ticket.push(TokenDelta("x", [3], "stop", 32))
    (delta,) = [delta async for delta in ticket.deltas()]
    assert (delta.ids, delta.finish, delta.num_cached) == ([1, 2, 3], "stop", 16)
    assert delta.logprobs == [first, second] and delta.prompt_logprobs == [None] and ticket.num_cached == 16


async def test_next_shapes_what_comes_while_it_waits_in_order_and_merges_the_rest() -> None:
    class Nobody:
        def drop(self, ticket) -> None: ...

    ticket = StreamTicket(Work(job("x", PROMPT), ROOT), Nobody())
    shaped: list[list[int]] = []

    def shape(delta: TokenDelta) -> tuple[list[int], str | None]:
        shaped.append(delta.ids)
        return delta.ids, delta.finish

    reading = asyncio.create_task(ticket.next(shape))
    await asyncio.sleep(0)
    ticket.push(TokenDelta("x", [1]))
    assert shaped == [[1]], "shaped at once: the reader was waiting"
    ticket.push(TokenDelta("x", [2]))
    ticket.push(TokenDelta("x", [3], "stop"))
    assert shaped == [[1]], "the reader has something to do first"
    assert await reading == ([1], None)
    assert await ticket.next(shape) == ([2, 3], "stop")
    ticket.cancel()
    assert await ticket.next(shape) is None


async def test_next_passes_on_what_its_shape_raises_and_lets_it_cancel() -> None:
    class Nobody:
        def drop(self, ticket) -> None: ...

    def refuse(delta: TokenDelta) -> str:
        raise KeyError(delta.ids[0])

    ticket = StreamTicket(Work(job("x", PROMPT), ROOT), Nobody())

    def stop(delta: TokenDelta) -> str:
        ticket.cancel()
        return "matched"

    for shape, outcome in ((refuse, pytest.raises(KeyError)), (stop, contextlib.nullcontext())):
        reading = asyncio.create_task(ticket.next(shape))
        await asyncio.sleep(0)
        ticket.push(TokenDelta("x", [9]))
        with outcome:
            assert await reading == "matched"
    ticket.fail(EngineFault("broken"))
    with pytest.raises(EngineFault, match="broken"):
        await ticket.next(stop)


async def test_retry_budget_serves_everyone_in_turn() -> None:
    live = 100
    budget = RetryBudget(lambda: live, floor=2, ratio=0.05)
    running, most, order = 0, 0, []

    async def resubmit(index: int) -> None:
        nonlocal running, most
        async with budget:
            running += 1
            most = max(most, running)
            order.append(index)
            await asyncio.sleep(0.001)
            running -= 1
        budget.check_invariants()

    tasks = [asyncio.create_task(resubmit(index)) for index in range(40)]
    await asyncio.sleep(0)
    for task in tasks[10:20]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == budget.limit == 5
    assert order == [*range(10), *range(20, 40)] and budget._used == 0
    with pytest.raises(ValueError, match="floor 0"):
        RetryBudget(lambda: 1, floor=0)


async def test_unsendable_info_is_said_so_and_metrics_are_scraped() -> None:
    async with cluster("r1") as (router, engines):
        (info,) = await router.engines()
        assert "can't be sent" in info["error"]
        ticket = await router.admit(job("m", PROMPT, max_tokens=1))
        engines["r1"].say([1], "length")
        await read(ticket)
        registry = CollectorRegistry()
        registry.register(PlaneCollector(router, "ew"))
        text = generate_latest(registry).decode()
        for line in (
            'ew:directory_in_sync{replica="r1"} 1.0',
            'ew:dispatch_total{event="admitted"} 1.0',
            'ew:dispatch_tokens_total{kind="emitted"} 1.0',
            'ew:dispatch_tokens_total{kind="placed"} 40.0',
            'ew:event_stream_total{kind="gaps",replica="r1"} 0.0',
            "ew:live_streams 0.0",
        ):
            assert line in text, line


async def test_resume_waits_out_a_full_cluster() -> None:
    replicas = {name: await FakeReplica(name).start() for name in ("r1", "r2")}
    router = await start_router(*replicas.values())
    try:
        await until(lambda: router.directory(0)["in_sync"])
        streams = [asyncio.create_task(collect(router, job(f"w{i}", [i] * 50, max_tokens=80))) for i in range(8)]
        await until(lambda: router.counters["tokens"] > 80)
        replicas["r2"].engine.max_waiting = 0
        await replicas["r1"].kill()
        await asyncio.sleep(0.4)
        replicas["r2"].engine.max_waiting = 100
        assert await asyncio.gather(*streams) == [expected_stream([i] * 50, 0, 80) for i in range(8)]
        router.check_invariants()
    finally:
        await router.close()
        await replicas["r2"].close()
