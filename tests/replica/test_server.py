"""The token server around the real engine (stub runner): frames per step, repair, slow and vanished routers, drain."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager

from replica.config import EngineConfig, ModelFacts, resolve
from replica.loop import Engine
from replica.server import ServerOptions, TokenServer
from replica.stub import StubRunner, expected_ids
from router.backend import Job
from router.connection import Connection, ConnectionOptions
from router.directory import Directory
from router.dispatch import Dispatcher
from router.handshake import RouterHandshake
from router.pages import RootFields, chain, pack_tokens
from router.placement import ReplicaState
from router.stream_state import Phase, StreamState
from router.wire import EventBatch, Kind, Load, Refusal, Sampling, Snapshot, Submit, TokenDelta, encode

SECRET = b"secret of these tests"
ROOT = RootFields("m", "t", "float32", 16)
VOCAB = 499
FACTS = ModelFacts(max_position=4096, num_layers=2, num_kv_heads=2, head_dim=16)


class Replica:
    def __init__(self, name: str = "r1", *, step_ms: float = 2.0, options: ServerOptions | None = None, **engine):
        engine.setdefault("max_num_pages", 400)
        config = resolve(EngineConfig(**engine), FACTS)
        self.runner = StubRunner(
            num_pages=config.num_pages, vocab_size=VOCAB, max_model_len=config.max_model_len, step_ms=step_ms
        )
        limits = {"max_model_len": config.max_model_len, "page_size": 16, "chunk_size": config.chunk_size}
        self.server = TokenServer(SECRET, replica_id=name, root=ROOT, limits=limits, options=options)
        self.engine = Engine(
            config,
            self.runner,
            root=ROOT,
            replica_id=name,
            on_deltas=self.server.on_deltas,
            on_events=self.server.on_events,
            on_said=self.server.send_out,
        )
        self.server.attach(self.engine)
        self.address = ("", 0)

    async def start(self):
        self.engine.start()
        self.address = await self.server.start("127.0.0.1")
        return self

    async def close(self, *, abort: bool = False) -> None:
        await self.server.close(abort=abort)
        await asyncio.to_thread(self.engine.stop)


@asynccontextmanager
async def replica(**options):
    started = await Replica(**options).start()
    try:
        yield started
    finally:
        await started.close()


class RawRouter:
    """A router's end of one connection that records frames by kind."""

    def __init__(self) -> None:
        self.frames: list[list] = []
        self.opened: asyncio.Future = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future = asyncio.get_running_loop().create_future()

    @classmethod
    async def dial(cls, address) -> RawRouter:
        self = cls()
        self.transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: Connection(lambda: RouterHandshake(SECRET, "raw", [None] * 4), self), *address
        )
        self.connection = await self.opened
        return self

    def on_open(self, connection, peer) -> None:
        self.peer = peer
        self.opened.set_result(connection)

    def on_frame(self, connection, frame) -> None:
        self.frames.append(frame)

    def on_close(self, connection, reason, refused) -> None:
        self.closed.set_result(reason)

    def on_idle(self, connection) -> None:
        connection.send(encode(Kind.PING, 0))

    def connection_port(self) -> int:
        return self.transport.get_extra_info("sockname")[1]

    def of(self, kind: Kind) -> list[list]:
        return [frame for frame in self.frames if frame[0] == kind]

    def ids(self, request: str) -> list[int]:
        deltas = [TokenDelta.from_wire(raw) for frame in self.of(Kind.TOKENS) for raw in frame[1]]
        return [token for delta in deltas if delta.request_id == request for token in delta.ids]

    def submit(self, request: str, prompt: list[int], **sampling) -> None:
        packed = pack_tokens(prompt)
        root = ROOT.root()
        hashes = b"".join(chain(root, packed, 16))
        self.connection.send(Submit(request, packed, len(prompt), root, hashes, Sampling(**sampling)).to_frame())


async def until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        await asyncio.sleep(0.005)


def prompt_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


async def test_accept_then_tokens_one_frame_per_step() -> None:
    async with replica(step_ms=5.0) as served:
        router = await RawRouter.dial(served.address)
        assert router.peer.name == "r1" and router.peer.epoch == served.engine.events.epoch
        for index in range(12):
            router.submit(f"q{index}", prompt_of(index, 20), max_tokens=30, seed=index)
        await until(lambda: sum(len(router.ids(f"q{index}")) for index in range(12)) == 360)
        for index in range(12):
            assert router.ids(f"q{index}") == expected_ids(prompt_of(index, 20), 30, seed=index, vocab_size=VOCAB)
        assert {frame[1] for frame in router.of(Kind.ACCEPT)} == {f"q{index}" for index in range(12)}
        frames = router.of(Kind.TOKENS)
        assert len(frames) <= served.engine.num_steps
        assert max(len(frame[1]) for frame in frames) >= 12, "a full batch travels in one frame"
        kinds = [frame[0] for frame in router.frames if frame[0] in (Kind.ACCEPT, Kind.TOKENS)]
        assert kinds[0] == Kind.ACCEPT
        served.server.check_invariants()


async def test_rejects_name_the_limit_and_hostile_submits_cost_one_request() -> None:
    async with replica() as served:
        router = await RawRouter.dial(served.address)
        router.submit("long", prompt_of(1, 5000), max_tokens=1)
        router.submit("twice", prompt_of(1, 20), max_tokens=500)
        router.submit("twice", prompt_of(1, 20), max_tokens=500)
        root = ROOT.root()
        for number, frame in enumerate(
            (
                [b"tokens" * 4, 2, root, b"", {"temprature": 1.0}, None, 0, None],
                [b"tokens" * 4, 2, root, b"", {"max_tokens": "9"}, None, 0, None],
                [b"tokens", 2, root, b"", {}, None, 0, None],
                [5, 2, root, b"", {}, None, 0, None],
                [pack_tokens([1, 2]), 3, root, b"", {}, None, 0, None],
                [pack_tokens([1, 2]), 2, b"root", b"", {}, None, 0, None],
                [],
            )
        ):
            router.connection.send(encode(Kind.SUBMIT, f"bad{number}", *frame))
        await until(lambda: len(router.of(Kind.REJECT)) == 9)
        refusals = dict(Refusal.from_frame(frame) for frame in router.of(Kind.REJECT))
        assert all(refusal.code == "invalid" for refusal in refusals.values())
        assert "4096" in refusals["long"].message and "running already" in refusals["twice"].message
        assert "temprature" in refusals["bad0"].message and "max_tokens" in refusals["bad1"].message
        router.submit("good", prompt_of(2, 20), max_tokens=4)
        await until(lambda: len(router.ids("good")) == 4)


async def test_events_replay_and_snapshot_keep_a_consumer_in_sync() -> None:
    async with replica(step_ms=1.0, max_num_pages=60) as served:
        router = await RawRouter.dial(served.address)
        directory = Directory()
        state = StreamState("r1", directory, ReplicaState("r1", directory, 16))
        router.connection.send(state.attach(router.peer.epoch, 0.0).to_frame())
        rng = random.Random(4)
        dropped, now = 0, 0.0
        for index in range(40):
            router.submit(f"e{index}", prompt_of(index % 9, 40 + 16 * (index % 5)), max_tokens=6)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            now += 0.01
            frames, router.frames = router.frames, [f for f in router.frames if f[0] == Kind.TOKENS]
            asks = [state.tick(now)]
            for frame in frames:
                if frame[0] == Kind.EVENTS:
                    if dropped < 30 and rng.random() < 0.3:
                        dropped += 1
                        continue
                    asks.append(state.on_batch(EventBatch.from_frame(frame), now))
                elif frame[0] == Kind.SNAPSHOT:
                    asks.append(state.on_snapshot(Snapshot.from_frame(frame), now))
            for ask in asks:
                if ask is not None:
                    router.connection.send(ask.to_frame())
            state.check_invariants()
            done = len({f for f in range(40) if len(router.ids(f"e{f}")) == 6}) == 40
            if done and dropped >= 10 and state.phase == Phase.SYNCED and not directory.pending.bits:
                break
        assert state.phase == Phase.SYNCED and state.counters.gaps > 0 and state.counters.snapshots > 0
        snapshot = await asyncio.to_thread(served.engine.snapshot)
        assert directory.digests(state.slot) == snapshot[-1].digests
        directory.sweep(1.0)
        directory.check_invariants()


async def test_gone_router_frees_its_requests_at_once() -> None:
    async with replica(step_ms=5.0) as served:
        routers = [await RawRouter.dial(served.address) for _ in range(2)]
        for index in range(10):
            routers[index % 2].submit(f"g{index}", prompt_of(index, 30), max_tokens=300)
        await until(lambda: all(len(router.ids("g0")) + len(router.ids("g1")) > 3 for router in routers))
        routers[0].connection.abort("vanished")
        await until(lambda: len(served.engine._live) == 5, 1.0)
        routers[1].connection.send(encode(Kind.CANCEL, "g1"))
        routers[1].connection.send(encode(Kind.CANCEL, "g1"))
        routers[1].connection.send(encode(Kind.CANCEL, "unknown"))
        await until(lambda: len(served.engine._live) == 4, 1.0)
        routers[1].connection.abort("vanished")
        await until(served.engine.idle, 1.0)
        served.engine.check_invariants()
        served.server.check_invariants()


async def test_slow_router_misses_events_but_not_tokens_and_is_dropped_in_the_end() -> None:
    options = ServerOptions(
        event_backlog=20_000, connection=ConnectionOptions(heartbeat_s=0.05, max_write_buffer=200_000)
    )
    async with replica(step_ms=1.0, options=options) as served:
        slow, quick = await RawRouter.dial(served.address), await RawRouter.dial(served.address)
        end = next(c for c in served.server._routers if c.address.endswith(str(slow.connection_port())))
        held = served.server._routers[end]
        slow.transport.pause_reading()
        for index in range(16):
            slow.submit(f"s{index}", prompt_of(index, 200), max_tokens=3000)
        for turn in range(1500):
            if not end.is_open:
                break
            # the kernel's buffers are large: fill them with answers to pings rather than wait for tokens
            for _ in range(30):
                slow.connection.send(encode(Kind.PING, "x" * 2000))
            quick.submit(f"k{turn}", prompt_of(turn, 20), max_tokens=2)
            await asyncio.sleep(0.01)
        assert not end.is_open, "a router that never reads must be dropped"
        assert held.skipped_batches > 0, "its events were skipped before that"
        await until(lambda: len(quick.ids("k0")) == 2)
        assert not quick.closed.done()
        await until(served.engine.idle)


async def test_drain_refuses_new_work_and_waits_for_the_old() -> None:
    async with replica(step_ms=2.0) as served:
        router = await RawRouter.dial(served.address)
        router.submit("old", prompt_of(1, 20), max_tokens=100)
        await until(lambda: len(router.ids("old")) > 2)
        drained = asyncio.create_task(served.server.drain(20.0))
        await until(lambda: router.of(Kind.DRAINING))
        router.submit("new", prompt_of(2, 20), max_tokens=1)
        await until(lambda: router.of(Kind.REJECT))
        assert Refusal.from_frame(router.of(Kind.REJECT)[0])[1].code == "draining"
        assert not drained.done() and await drained
        await until(lambda: len(router.ids("old")) == 100)
        late = await RawRouter.dial(served.address)
        await until(lambda: late.of(Kind.DRAINING))
        assert not await _drain_in_vain(served)


async def _drain_in_vain(served: Replica) -> bool:
    served.engine._live[0, "stuck"] = None  # type: ignore[index, assignment]
    try:
        return await served.server.drain(0.1)
    finally:
        served.engine._live.clear()


async def test_info_and_heartbeat() -> None:
    async with replica() as served:
        router = await RawRouter.dial(served.address)
        router.connection.send(encode(Kind.INSPECT, 5))
        router.connection.send(encode(Kind.PING, 77))
        await until(lambda: router.of(Kind.INFO) and router.of(Kind.PONG))
        assert router.of(Kind.INFO)[0][1] == 5 and router.of(Kind.INFO)[0][2]["replica"] == "r1"
        pong = next(frame for frame in router.of(Kind.PONG) if frame[1] == 77)
        assert pong[2] == served.engine.events.epoch and 0 <= pong[4] < 1000
        await asyncio.sleep(0.5)
        assert len(router.of(Kind.EVENTS)) >= 5, "an event frame at least every 50 ms, idle or not"


def slow_sends(served: Replica, pause_s: float) -> None:
    """The engine's thread loses the processor right after each frame that it sends."""
    for router in served.server._routers.values():
        send = router.connection.send

        def slow(frame: bytes, send=send) -> bool:
            sent = send(frame)
            if threading.current_thread() is not threading.main_thread():
                time.sleep(pause_s)
            return sent

        router.connection.send = slow  # type: ignore[method-assign]


async def test_a_heartbeat_speaks_of_the_batch_before_it_on_the_connection() -> None:
    async with replica() as served:
        router = await RawRouter.dial(served.address)
        slow_sends(served, 0.01)
        for turn in range(150):
            router.connection.send(encode(Kind.PING, turn))
            await asyncio.sleep(0.004)
        await until(lambda: any(frame[1] == 149 for frame in router.of(Kind.PONG)))
        seq = None
        for frame in router.frames:
            if frame[0] == Kind.EVENTS:
                seq = EventBatch.from_frame(frame).seq
            elif frame[0] == Kind.PONG and seq is not None:
                assert frame[3] == seq, "a router would take this for a gap or for a wrong seq, and ask for everything"


async def test_a_replay_holds_nothing_that_has_not_been_sent_yet() -> None:
    async with replica() as served:
        router = await RawRouter.dial(served.address)
        await until(lambda: router.of(Kind.EVENTS))
        await asyncio.to_thread(served.engine.stop)
        sent = served.engine.events.next_seq - 1
        served.engine.events.emit(Load())  # on its way to the server
        await asyncio.sleep(0.05)
        router.frames.clear()
        router.connection.send(encode(Kind.REPLAY, sent))
        await until(lambda: router.of(Kind.EVENTS))
        router.connection.send(encode(Kind.PING, 1))
        await until(lambda: any(frame[1] == 1 for frame in router.of(Kind.PONG)))
        assert [EventBatch.from_frame(frame).seq for frame in router.of(Kind.EVENTS)] == [sent]
        assert router.of(Kind.PONG)[-1][3] == sent


async def test_requests_that_end_while_their_router_goes_do_not_hide_the_others() -> None:
    """The engine's thread forgets a finished request while the event loop cancels those of a router that is gone."""
    async with replica(step_ms=20.0) as served:
        router = await RawRouter.dial(served.address)
        for index in range(8):
            router.submit(f"q{index}", prompt_of(index, 20), max_tokens=2000)
        await until(lambda: len(router.of(Kind.ACCEPT)) == 8)
        cancel, owner = served.engine.cancel, next(iter(served.server._routers.values()))

        def cancel_slowly(of, request: str) -> None:
            cancel(of, request)
            served.server._outbox.append([(owner, TokenDelta(request, [1], "length"))])
            served.server.send_out()

        served.engine.cancel = cancel_slowly  # type: ignore[method-assign]
        router.connection.abort("vanished")
        await until(served.engine.idle, 3.0)


async def test_tokens_that_can_not_be_told_cost_one_router_its_connection() -> None:
    async with replica(step_ms=5.0) as served:
        unlucky, other = await RawRouter.dial(served.address), await RawRouter.dial(served.address)
        unlucky.submit("a", prompt_of(1, 20), max_tokens=300)
        other.submit("b", prompt_of(2, 20), max_tokens=60)
        await until(lambda: unlucky.ids("a") and other.ids("b"))
        owner = next(router for router in served.server._routers.values() if "a" in router.requests)
        on_deltas, once = served.server.on_deltas, ["the engine step failed: \udcff"]

        def faulty(deltas) -> None:
            if once:
                deltas = [*deltas, (owner, TokenDelta("a", [], "error", error=once.pop()))]
            on_deltas(deltas)

        served.engine.outbox.on_deltas = faulty
        await unlucky.closed
        await until(lambda: len(other.ids("b")) == 60)
        assert other.ids("b") == expected_ids(prompt_of(2, 20), 60, seed=0, vocab_size=VOCAB)
        await until(served.engine.idle)


async def test_strangers_cannot_exhaust_it() -> None:
    async with replica(options=ServerOptions(max_handshakes=4)) as served:
        mute = [await asyncio.open_connection(*served.address) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert len(served.server._handshaking) == 4
        for _, writer in mute:
            writer.close()
        await until(lambda: not served.server._handshaking)
        await RawRouter.dial(served.address)
        served.server.check_invariants()


async def test_two_dispatchers_two_engines_kill_one() -> None:
    """The whole plane with the real engine: the stub's ids depend on every token and page, so equality is proof."""
    replicas = [await Replica(name, step_ms=4.0, max_batch_size=16).start() for name in ("r1", "r2")]
    routers = [Dispatcher(SECRET) for _ in range(2)]
    for router in routers:
        router.update_replicas({r.engine.events.replica_id: r.address for r in replicas})
        await router.start()
    try:
        await until(lambda: all(len(router.directory(0)["replicas"]) == 2 and router.directory(0)["in_sync"]
                                for router in routers))  # fmt: skip
        shared = prompt_of(0, 100)
        prompts = [[*shared, *prompt_of(index + 1, 30)] for index in range(16)]

        async def run(index: int) -> list[int]:
            job = Job(f"job{index}", prompts[index], Sampling(max_tokens=150, temperature=index % 2, seed=index))
            ticket = await routers[index % 2].admit(job)
            return [token async for delta in ticket.deltas() for token in delta.ids]

        streams = [asyncio.create_task(run(index)) for index in range(16)]
        await until(lambda: sum(router.counters["tokens"] for router in routers) > 16 * 20)
        placed = Counter(ticket.replica for router in routers for ticket in router.streams._live)
        assert set(placed) == {"r1", "r2"}
        await replicas[0].close(abort=True)
        for index, stream in enumerate(streams):
            assert await stream == expected_ids(prompts[index], 150, seed=index, vocab_size=VOCAB)
        assert sum(router.counters["resumed"] for router in routers) == placed["r1"]
        await until(lambda: all(not len(router.placement.directory.pending) for router in routers))
        for router in routers:
            router.check_invariants()
        replicas[1].engine.check_invariants()
    finally:
        for router in routers:
            await router.close()
        await replicas[1].close()
