"""A cluster that "generates" scripted token ids, a byte-level tokenizer to go with it, and a server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import httpx
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from router.api import ApiOptions, create_app
from router.backend import BackendError, Job, Refused, Unavailable
from router.text.card import ModelCard
from router.text.tokenizer import Tokenizer
from router.wire import Logprob, TokenDelta

T = TypeVar("T")
EOS = "<|im_end|>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", EOS]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital.",
    "Hello world, this is a test of 日本語 and العربية and emoji 👩‍👩‍👧 here. user assistant system",
] * 4


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """All 256 bytes, a few merges, three special tokens."""
    backend = Backend.from_str(_trained())
    return Tokenizer(backend, special={"eos_token": EOS, "bos_token": "<|im_start|>"}, chat_template=template)


@cache
def _trained() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def make_card(tokenizer: Tokenizer | None = None, **changes: Any) -> ModelCard:
    tokenizer = tokenizer or make_tokenizer()
    fields: dict[str, Any] = {
        "names": ("tiny", "tiny-alias"),
        "tokenizer": tokenizer,
        "vocab_size": tokenizer.vocab_size + 8,
        "max_model_len": 512,
        "eos_token_ids": tokenizer.eos_token_ids,
    }
    return ModelCard(**{**fields, **changes})


Script = Callable[[Job], Sequence[int]]


@dataclass
class FakeTicket:
    backend: FakeBackend
    job: Job
    ids: list[int]
    num_cached: int
    replica: str = "fake-0"
    cancelled_at: float | None = None
    done: bool = False
    iterated: int = 0
    _iterator: AsyncIterator[TokenDelta] | None = None

    def cancel(self) -> None:
        if not self.done and self.cancelled_at is None:
            self.cancelled_at = asyncio.get_running_loop().time()
            self.backend.cancelled.append(self.job.request_id)

    async def next(self, shape: Callable[[TokenDelta], T]) -> T | None:
        if self._iterator is None:
            self._iterator = self.deltas()
        try:
            return shape(await anext(self._iterator))
        except StopAsyncIteration:
            return None

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        self.iterated += 1
        backend, sampling, rid = self.backend, self.job.sampling, self.job.request_id
        for number, token_id in enumerate(self.ids):
            if self.cancelled_at is not None:
                return
            await backend.pause()
            if backend.fail_after is not None and number == backend.fail_after:
                self.done = True
                if isinstance(backend.failure, BackendError):
                    raise backend.failure
                yield TokenDelta(rid, [], finish=backend.failure, error="the replica broke")
                return
            stops = token_id in sampling.stop_token_ids and number >= sampling.min_tokens
            last = number + 1 >= sampling.max_tokens
            self.done = stops or last
            yield TokenDelta(
                rid,
                [token_id],
                "stop" if stops else "length" if last else None,
                self.num_cached if number == 0 else None,
                [backend.logprob(token_id, sampling.logprobs)] if sampling.logprobs is not None else None,
                self._prompt_logprobs() if number == 0 else None,
            )
            if self.done:
                return

    def _prompt_logprobs(self) -> list[Logprob | None] | None:
        k = self.job.sampling.prompt_logprobs
        if k is None:
            return None
        return [None, *(self.backend.logprob(token_id, k) for token_id in self.job.prompt[1:])]


@dataclass
class FakeBackend:
    """``script`` gives each job's ids; they repeat until max_tokens ends them, unless it stops by itself."""

    script: Script
    num_cached: int = 0
    delay_s: float = 0.0
    refuse: BackendError | None = None
    fail_after: int | None = None
    failure: str | BackendError = "error"
    is_ready: bool = True
    admit_delay_s: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    tickets: list[FakeTicket] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def pause(self) -> None:
        await asyncio.sleep(self.delay_s)

    def logprob(self, token_id: int, k: int) -> Logprob:
        # Distinct and exactly representable, so that tests can compare them.
        top = tuple(((token_id + j) % 300, -0.5 * (j + 1)) for j in range(k))
        return Logprob(-0.5, 1, top)

    async def admit(self, job: Job) -> FakeTicket:
        if self.admit_delay_s:
            await asyncio.sleep(self.admit_delay_s)
        self.jobs.append(job)
        if not self.is_ready:
            raise Unavailable("no replica is admitted")
        if self.refuse is not None:
            raise self.refuse
        ids = list(self.script(job))
        if not ids:
            raise Refused("the script has nothing to say")
        while len(ids) < job.sampling.max_tokens:
            ids += ids[: job.sampling.max_tokens - len(ids)]
        ticket = FakeTicket(self, job, ids, min(self.num_cached, len(job.prompt) - 1))
        self.tickets.append(ticket)
        return ticket

    def ready(self) -> bool:
        return self.is_ready

    def limits(self) -> dict[str, int]:
        return {"max_model_len": 512, "max_batch_size": 8, "num_pages": 100, "page_size": 16}

    def directory(self, top: int) -> dict[str, Any]:
        return {"replicas": [], "prefixes": [], "top": top}

    async def engines(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        pages = {"all": 8, "free": 5, "cached": 1, "held": 2}
        load = {"running": 2, "waiting": 1}
        return [
            {"replica": "fake-0", "waiting": 4, "load": load, "pages": pages, "counters": {"preemptions": 3}},
            {"replica": "lost"},
        ]


def saying(tokenizer: Tokenizer, text: str) -> Script:
    """A script that says ``text`` and ends its turn."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]]
    return lambda job: ids


def asgi_client(backend: FakeBackend, card: ModelCard | None = None, **options: Any) -> httpx.AsyncClient:
    """A client that calls the application in this process."""
    app = create_app(backend, card or make_card(), ApiOptions(**options))
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://everwarm")


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Runs an ASGI application on a loopback port, in a thread; gives its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            threading.Event().wait(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
