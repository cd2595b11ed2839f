"""Connections between honest peers, strangers, liars and the dead."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import asynccontextmanager

import msgpack
import pytest

from router.connection import Connection, ConnectionOptions
from router.handshake import HandshakeError, ReplicaHandshake, RouterHandshake, root_to_wire
from router.pages import RootFields
from router.wire import MAX_FRAME, VERSION, FrameBuffer, Kind, ProtocolError, encode, proof
from tests.frames import frames_in

SECRET = b"0123456789abcdef"
ROOT = RootFields("m", "t", "bfloat16", 16)
FAST = ConnectionOptions(handshake_timeout_s=0.3, dead_after_s=0.3, tick_s=0.01, heartbeat_s=0.05)


class End:
    """A handler that records."""

    def __init__(self) -> None:
        self.opened: asyncio.Future = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future = asyncio.get_running_loop().create_future()
        self.frames: list = []
        self.fail_on: int | None = None

    def on_open(self, connection, peer) -> None:
        self.opened.set_result((connection, peer))

    def on_frame(self, connection, frame) -> None:
        if frame[0] == self.fail_on:
            raise RuntimeError("handler bug")
        self.frames.append(frame)

    def on_close(self, connection, reason, refused) -> None:
        self.closed.set_result((reason, refused))

    def on_idle(self, connection) -> None:
        connection.send(encode(Kind.PING, 1))


@asynccontextmanager
async def listening(options: ConnectionOptions = FAST, secret: bytes = SECRET, root: RootFields = ROOT):
    ends: list[End] = []
    accepted: list[Connection] = []

    def accept() -> Connection:
        ends.append(End())
        accepted.append(
            Connection(lambda: ReplicaHandshake(secret, "r1", 7, root, {"page_size": 16}), ends[-1], options)
        )
        return accepted[-1]

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], ends
    finally:
        server.close()
        for connection in accepted:
            connection.abort("the test is over")
        await asyncio.sleep(0.01)


async def dial(port: int, *, secret: bytes = SECRET, root=None, options: ConnectionOptions = FAST) -> End:
    end = End()
    wanted = root if root is not None else root_to_wire(ROOT)
    await asyncio.get_running_loop().create_connection(
        lambda: Connection(lambda: RouterHandshake(secret, "router-1", wanted), end, options), "127.0.0.1", port
    )
    return end


async def test_handshake_tells_both_who_the_other_is() -> None:
    async with listening() as (port, ends):
        end = await dial(port, root=[None, "t", None, None])
        connection, peer = await end.opened
        assert (peer.name, peer.epoch, peer.root, peer.limits) == ("r1", 7, ROOT, {"page_size": 16})
        other, router = await ends[0].opened
        assert router.name == "router-1"
        connection.send(encode(Kind.CANCEL, "x"))
        other.send(encode(Kind.ACCEPT, "y"))
        await asyncio.sleep(0.02)
        assert ends[0].frames[0] == [Kind.CANCEL, "x"] and end.frames[0] == [Kind.ACCEPT, "y"]
        connection.close("done")
        assert (await ends[0].closed)[0] == "closed by the peer"
        assert (await end.closed) == ("done", False)
        assert not connection.send(b"") and not connection.is_open


async def test_wrong_secret_wrong_root_and_wrong_version_name_both_values() -> None:
    async with listening() as (port, ends):
        end = await dial(port, secret=b"another secret of 16+")
        reason, refused = await end.closed
        assert refused and "wrong token-plane secret" in reason and not end.opened.done()
        end = await dial(port, root=["m", "t", "float16", 64])
        reason, refused = await end.closed
        assert refused
        for part in ("kv_dtype", "'float16'", "'bfloat16'", "page_size", "64", "16", "router-1", "r1"):
            assert part in reason
        assert (await ends[1].closed)[1]
    with pytest.raises(HandshakeError, match=rf"99.*{VERSION}"):
        RouterHandshake(SECRET, "x", [None] * 4).on_frame([int(Kind.HELLO), 99, b"n" * 16])
    with pytest.raises(ValueError, match="at least 16"):
        RouterHandshake(b"short", "x", [None] * 4)


async def test_a_replica_without_the_secret_is_refused_by_the_router() -> None:
    hello = RouterHandshake(SECRET, "x", root_to_wire(ROOT))
    hello.on_frame([int(Kind.HELLO), VERSION, b"n" * 16])
    with pytest.raises(HandshakeError, match="does not know"):
        hello.on_frame([int(Kind.WELCOME), b"p" * 32, "r1", 1, root_to_wire(ROOT), {}])


def test_a_proof_cannot_be_reflected() -> None:
    assert proof(SECRET, "router", b"a", b"b") != proof(SECRET, "replica", b"a", b"b")


async def raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def closed_by_peer(reader: asyncio.StreamReader) -> bool:
    try:
        while await asyncio.wait_for(reader.read(4096), 2.0):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_strangers_get_small_frames_and_little_time() -> None:
    async with listening() as (port, ends):
        reader, writer = await raw(port)
        started = asyncio.get_running_loop().time()
        assert await closed_by_peer(reader)
        assert 0.2 < asyncio.get_running_loop().time() - started < 1.0
        assert "no handshake" in (await ends[0].closed)[0]
        reader, writer = await raw(port)
        writer.write(struct.pack("<I", 5000))
        assert await closed_by_peer(reader)
        assert "at most 4096" in (await ends[1].closed)[0]
        writer.close()


@pytest.mark.parametrize("seed", range(40))
async def test_hostile_bytes_close_that_connection_only(seed: int) -> None:
    rng = random.Random(seed)
    async with listening() as (port, ends):
        honest = await dial(port)
        await honest.opened
        reader, writer = await raw(port)
        choices = [
            rng.randbytes(rng.randrange(1, 3000)),
            encode(Kind.SUBMIT, "x"),
            encode(Kind.AUTH, VERSION, "evil", b"n" * 16, rng.randbytes(32), root_to_wire(ROOT)),
            encode(Kind.AUTH, "1", None, 5, [], {}),
            encode(Kind.AUTH),
            struct.pack("<I", 8) + b"\xdd\xff\xff\xff\xff\x00\x00\x00",
            struct.pack("<I", 0),
            struct.pack("<I", 3) + msgpack.packb(["a"]),
            struct.pack("<I", 2000) + b"\x91" * 2000,
        ]
        writer.write(rng.choice(choices))
        assert await closed_by_peer(reader)
        reason = (await asyncio.wait_for(ends[1].closed, 1.0))[0]
        assert reason and not ends[1].opened.done()
        assert not honest.closed.done()
        again = await dial(port)
        await asyncio.wait_for(again.opened, 1.0)
        writer.close()


async def test_handler_bug_costs_the_connection_not_the_process(caplog) -> None:
    async with listening() as (port, ends):
        end = await dial(port)
        connection, _ = await end.opened
        ends[0].fail_on = Kind.CANCEL
        connection.send(encode(Kind.CANCEL, "x"))
        assert "handler bug" in (await ends[0].closed)[0]
        await (await dial(port)).opened


async def test_idle_connections_stay_and_dead_ones_go() -> None:
    async with listening() as (port, ends):
        end = await dial(port)
        connection, _ = await end.opened
        await asyncio.sleep(0.6)  # twice the silence limit, kept alive by heartbeats
        assert connection.is_open and connection.silent_s < 0.2
        other, _ = await ends[0].opened
        other._timer.cancel()  # from here on the peer is a dead node: no bytes, no FIN
        started = asyncio.get_running_loop().time()
        reason, refused = await asyncio.wait_for(end.closed, 2.0)
        assert reason == "silent for 0.3 s" and not refused
        assert 0.2 < asyncio.get_running_loop().time() - started < 0.8


async def test_our_own_standstill_is_not_the_peers_death() -> None:
    import time

    async with listening() as (port, ends):
        end = await dial(port)
        connection, _ = await end.opened
        await asyncio.sleep(0.1)
        time.sleep(0.5)  # noqa: ASYNC251 - the standstill under test
        await asyncio.sleep(0.15)
        assert connection.is_open and not ends[0].closed.done()


async def test_a_peer_that_stops_reading_is_dropped_at_the_limit() -> None:
    options = ConnectionOptions(tick_s=0.01, max_write_buffer=1 << 20)
    async with listening(options) as (port, ends):
        reader, writer = await raw(port)
        hello, *_ = frames_in(await reader.read(4096))
        nonce = b"c" * 16
        writer.write(
            encode(Kind.AUTH, VERSION, "slow", nonce, proof(SECRET, "router", hello[2], nonce), root_to_wire(ROOT))
        )
        connection, _ = await ends[0].opened
        chunk = encode(Kind.EVENTS, b"x" * 65536)
        sent = 0
        while connection.send(chunk):
            sent += len(chunk)
            assert connection.unsent <= (1 << 20) + len(chunk)
            assert sent < 64 << 20, "never dropped"
        assert "slow reader" in (await asyncio.wait_for(ends[0].closed, 1.0))[0]
        writer.close()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="heartbeat_s"):
        ConnectionOptions(heartbeat_s=5.0)


@pytest.mark.parametrize("seed", range(20))
def test_frames_survive_any_cutting(seed: int) -> None:
    rng = random.Random(seed)
    frames = [[int(Kind.TOKENS), rng.randbytes(rng.randrange(300)), i] for i in range(50)]
    stream = b"".join(encode(Kind(frame[0]), *frame[1:]) for frame in frames)
    buffer, got, at = FrameBuffer(), [], 0
    while at < len(stream):
        step = rng.randrange(1, 200)
        got += frames_in(stream[at : at + step], buffer)
        at += step
    assert got == frames and not len(buffer)
    with pytest.raises(ProtocolError, match=f"at most {MAX_FRAME}"):
        frames_in(struct.pack("<I", MAX_FRAME + 1), buffer)


async def test_who_waits_for_tokens_goes_before_the_frames_behind_them() -> None:
    """One write of two batches: what is woken by tokens runs before the events behind them, and the order stays."""
    async with listening() as (port, ends):
        end = await dial(port)
        await end.opened
        sender, _ = await ends[0].opened
        heard: list[str] = []
        both = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_frame(connection, frame) -> None:
            heard.append(Kind(frame[0]).name)
            if frame[0] == Kind.TOKENS:
                loop.call_soon(heard.append, "woken")
            if heard.count("INFO") == 2:
                both.set()

        end.on_frame = on_frame
        sender.send(2 * (encode(Kind.TOKENS, []) + encode(Kind.EVENTS, 1) + encode(Kind.INFO, 1, {})))
        await asyncio.wait_for(both.wait(), 5)
        names = [name for name in heard if name != "PING"]
        assert names[:3] == ["TOKENS", "woken", "EVENTS"]
        assert [name for name in names if name != "woken"] == 2 * ["TOKENS", "EVENTS", "INFO"]


async def test_frames_behind_tokens_do_not_pile_up_in_a_busy_loop() -> None:
    """However many tokens are among what has arrived, they wait once: a turn of a busy loop may take 10 ms."""
    async with listening() as (port, ends):
        end = await dial(port)
        await end.opened
        sender, _ = await ends[0].opened
        loop, turns = asyncio.get_running_loop(), [0]
        seen: list[int] = []
        everything = asyncio.Event()

        def turn() -> None:
            turns[0] += 1
            if not everything.is_set():
                loop.call_soon(turn)

        def on_frame(connection, frame) -> None:
            if frame[0] != Kind.PING:
                seen.append(turns[0])
            if len(seen) == 1000:
                everything.set()

        loop.call_soon(turn)
        end.on_frame = on_frame
        sender.send(b"".join(encode(Kind.TOKENS, [i]) + encode(Kind.INFO, i, {}) for i in range(500)))
        await asyncio.wait_for(everything.wait(), 5)
        assert len(set(seen)) < 20, "a thousand turns of the loop if each waits"


async def test_frames_behind_tokens_are_handled_before_the_end() -> None:
    """They wait for a moment; the peer's closing does not overtake them."""
    async with listening() as (port, ends):
        end = await dial(port)
        await end.opened
        sender, _ = await ends[0].opened
        sender.send(b"".join(encode(Kind.TOKENS, [i]) + encode(Kind.INFO, i, {}) for i in range(500)))
        sender.close("all said")
        await asyncio.wait_for(end.closed, 5)
        frames = [frame[:2] for frame in end.frames if frame[0] != Kind.PONG]
        assert frames == [[kind, [i] if kind == Kind.TOKENS else i] for i in range(500) for kind in (32, 36)]


async def test_any_thread_sends_and_close_waits_for_what_was_sent() -> None:
    """A megabyte to a reader that pauses, sent by another thread, arrives whole although the sender closes at once."""
    async with listening() as (port, ends):
        end = await dial(port)
        await end.opened
        sender, _ = await ends[0].opened
        numbers = list(range(300))

        def send() -> None:
            for number in numbers:
                assert sender.send(encode(Kind.INFO, number, b"x" * 4000))

        await asyncio.to_thread(send)
        sender.close("all said")
        assert not sender.send(b"") and not sender.is_open
        reason, _ = await asyncio.wait_for(end.closed, 5)
        assert reason == "closed by the peer"
        assert [frame[1] for frame in end.frames if frame[0] == Kind.INFO] == numbers


async def test_a_slow_reader_is_dropped_whoever_sends() -> None:
    options = ConnectionOptions(dead_after_s=5.0, max_write_buffer=100_000)
    async with listening(options) as (port, ends):
        end = await dial(port, options=options)
        reader, _ = await end.opened
        sender, _ = await ends[0].opened
        reader._transport.pause_reading()

        def send() -> bool:
            return all(sender.send(encode(Kind.INFO, 0, b"x" * 50_000)) for _ in range(400))

        assert not await asyncio.to_thread(send)
        reason, _ = await asyncio.wait_for(ends[0].closed, 5)
        assert "slow reader" in reason
