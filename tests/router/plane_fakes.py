"""A stand-in engine with a real thread, a real page cache and real events; its tokens are a function of the prompt.

It checks what it is given: a resumed request whose emitted tokens are not the ones it would have sampled is faulted,
so a test that compares streams also proves that a resume carried exactly what the client had.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from hashlib import blake2b

from replica.events import EventLog
from replica.server import ServerOptions, TokenServer
from router.backend import Job
from router.dispatch import Dispatcher, DispatchOptions
from router.pages import RootFields, key64, unpack_tokens
from router.wire import Code, Finish, Load, Refusal, Sampling, Submit, TokenDelta

SECRET = b"a secret of the test's own"
ROOT = RootFields("model-fp", "tokenizer-fp", "float32", 16)
LIMITS = {"max_model_len": 4096, "max_batch_size": 64, "num_pages": 4096, "page_size": 16, "chunk_size": 256}
COEFFICIENTS = (0.05, 0.0, 1.0, 0.0, 0.0)


def expected_token(prompt: list[int], seed: int, index: int) -> int:
    digest = blake2b(repr((prompt, seed, index)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 50_000


def expected_stream(prompt: list[int], seed: int, count: int) -> list[int]:
    return [expected_token(prompt, seed, index) for index in range(count)]


@dataclass
class _Running:
    owner: object
    submit: Submit
    prompt: list[int]
    position: int
    """Tokens emitted, by whichever replica."""
    keys: list[int]
    todo: list[int]
    """Keys still to be computed, in order; a final 0 stands for the partial page."""
    num_cached: int
    first: bool = True
    held: list[int] = field(default_factory=list)


class FakeEngine:
    """One token per step and stream; ``pages_per_step`` pages of prefill per step in all."""

    def __init__(
        self, name: str, server: TokenServer, *, step_s: float = 0.004, capacity: int = 2000, pages_per_step: int = 16
    ) -> None:
        self.name = name
        self.log = EventLog(name)
        self.step_s = step_s
        self.capacity = capacity
        self.pages_per_step = pages_per_step
        self.max_waiting = 1000
        self.computed: list[int] = []
        """Every page ever computed, in order, repeats included."""
        self.submitted = 0
        self._server = server
        self._lock = threading.Lock()
        self._running: dict[tuple[int, str], _Running] = {}
        self._resident: dict[int, int] = {}
        """key -> parent key, least recently used first."""
        self._draining = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"engine {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    # --- what TokenServer calls

    def submit(self, owner: object, request: Submit) -> None:
        tokens = unpack_tokens(request.tokens)
        if len(tokens) > LIMITS["max_model_len"]:
            raise Refusal(Code.INVALID, f"{len(tokens)} tokens; max_model_len is 4096", "prompt")
        prompt, emitted = tokens[: request.num_prompt], tokens[request.num_prompt :]
        seed = request.sampling.seed
        if emitted != expected_stream(prompt, seed, len(emitted)):
            raise Refusal(Code.INVALID, "resumed with tokens that were never sampled")
        keys = [key64(request.hashes[i : i + 16]) for i in range(0, len(request.hashes), 16)]
        if len(keys) != len(tokens) // 16:
            raise Refusal(Code.INVALID, "hashes do not cover the full pages", "hashes")
        with self._lock:
            if self._draining:
                raise Refusal(Code.DRAINING, "draining")
            if sum(running.first for running in self._running.values()) >= self.max_waiting:
                raise Refusal(Code.OVERLOADED, "the queue is full", retry_after_s=2.0)
            cached = 0
            while cached < len(keys) and keys[cached] in self._resident and (cached + 1) * 16 < len(tokens):
                cached += 1
            running = _Running(owner, request, prompt, len(emitted), keys, [*keys[cached:], 0], cached * 16)
            self._running[id(owner), request.request_id] = running
            self.log.accept(request.request_id, keys[cached:])
            self.submitted += 1

    def cancel(self, owner: object, request_id: str) -> None:
        with self._lock:
            if self._running.pop((id(owner), request_id), None) is not None:
                self.log.end(request_id)

    def replay(self, from_seq: int):
        with self._lock:
            return self.log.replay(from_seq)

    def snapshot(self):
        with self._lock:
            self._server.on_events(self.log.emit(self._load()))
            self._server.send_out()
            return self.log.snapshot([list(self._resident), []], self._load())

    def drain(self) -> None:
        self._draining = True

    def idle(self) -> bool:
        return not self._running

    def info(self):
        return {"engine": self.name, "pages": len(self._resident)}

    # --- its own thread

    def _loop(self) -> None:
        beat = 0.0
        while not self._stop.is_set():
            time.sleep(self.step_s)
            with self._lock:
                deltas = self._step()
                if deltas:
                    self._server.on_deltas(deltas)
                if self.log.has_changes or time.monotonic() - beat > 0.05:
                    beat = time.monotonic()
                    self._server.on_events(self.log.emit(self._load()))
                self._server.send_out()

    def _step(self) -> list[tuple[object, TokenDelta]]:
        budget = self.pages_per_step
        deltas = []
        computing: set[int] = set()
        for key, running in list(self._running.items()):
            while running.todo and budget > 0:
                page = running.todo[0]
                if page and page not in self._resident:
                    if page in computing:
                        break  # single flight: wait for the request that computes it
                    budget -= 1
                    self.computed.append(page)
                    self._store(running, page)
                running.todo.pop(0)
            computing.update(running.todo)
            if not running.todo:
                deltas.append((running.owner, self._sample(running)))
                if deltas[-1][1].finish:
                    del self._running[key]
        return deltas

    def _store(self, running: _Running, page: int) -> None:
        index = running.keys.index(page)
        self._resident[page] = running.keys[index - 1] if index else 0
        self.log.stored(page, self._resident[page])
        needed = {key for other in self._running.values() for key in other.keys}
        while len(self._resident) > self.capacity:
            parents = set(self._resident.values())
            victim = next((k for k in self._resident if k not in parents and k not in needed), None)
            if victim is None:
                break
            del self._resident[victim]
            self.log.removed(victim)

    def _sample(self, running: _Running) -> TokenDelta:
        submit = running.submit
        token = expected_token(running.prompt, submit.sampling.seed, running.position)
        running.position += 1
        finish = str(Finish.LENGTH) if running.position >= submit.sampling.max_tokens else None
        num_cached = running.num_cached if running.first else None
        if running.first:
            running.first = False
            self.log.end(submit.request_id)
        return TokenDelta(submit.request_id, [token], finish, num_cached)

    def _load(self) -> Load:
        waiting = [running for running in self._running.values() if running.first]
        return Load(
            sum(len(running.todo) * 16 for running in waiting),
            len(self._running) - len(waiting),
            len(waiting),
            sum(len(running.keys) * 16 for running in self._running.values()),
            max(0, self.capacity - len(self._resident)),
            len(self._resident),
            COEFFICIENTS,
        )

    def resident(self) -> set[int]:
        with self._lock:
            return set(self._resident)


class FakeReplica:
    """Engine and token server; ``kill`` is what kill -9 looks like from outside."""

    def __init__(
        self, name: str, *, root: RootFields = ROOT, options: ServerOptions | None = None, **engine: float
    ) -> None:
        self.name = name
        self.server = TokenServer(SECRET, replica_id=name, root=root, limits=LIMITS, options=options)
        self.engine = FakeEngine(name, self.server, **engine)  # type: ignore[arg-type]
        self.server.attach(self.engine)
        self.address = ("127.0.0.1", 0)

    async def start(self, port: int = 0) -> FakeReplica:
        self.engine.start()
        self.address = await self.server.start("127.0.0.1", port)
        return self

    async def kill(self) -> None:
        self.engine.stop()
        await self.server.close(abort=True)

    async def close(self) -> None:
        self.engine.stop()
        await self.server.close()


async def start_router(*replicas: FakeReplica, options: DispatchOptions | None = None) -> Dispatcher:
    router = Dispatcher(SECRET, expect={"model": ROOT.model}, options=options)
    router.update_replicas({replica.name: replica.address for replica in replicas})
    await router.start()
    return router


def job(request_id: str, prompt: list[int], *, max_tokens: int = 8, seed: int = 0, **more) -> Job:
    return Job(request_id, prompt, Sampling(max_tokens=max_tokens, seed=seed), **more)


async def collect(router: Dispatcher, request: Job) -> list[int]:
    ticket = await router.admit(request)
    ids: list[int] = []
    last = None
    async for delta in ticket.deltas():
        ids += delta.ids
        last = delta.finish
    assert last == Finish.LENGTH
    return ids


async def until(condition, timeout_s: float = 5.0) -> None:
    """Polls a synchronous condition; fails the test when it does not come true."""
    import asyncio

    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        await asyncio.sleep(0.01)
