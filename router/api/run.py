"""From admitted jobs to pieces of text: one :class:`Run` per request, one :class:`Choice` per answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from uuid import uuid4

from router.api.errors import ApiError, deadline_passed
from router.api.metrics import Metrics
from router.api.reasoning_budget import BudgetWatch, ReasoningBudget
from router.api.sampling import for_choice
from router.backend import Backend, Job, Ticket
from router.text.output import OutputStream, Piece, TextOptions
from router.text.tokenizer import Tokenizer
from router.wire import Finish, Logprob, Sampling, TokenDelta


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    max_tokens: int
    text: str | None = None
    """As the client wrote it, when it was text."""


@dataclass(frozen=True)
class Plan:
    """Everything a request asks of the cluster; nothing here depends on the route."""

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    text: TextOptions
    salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    ttft_slo_s: float | None = None
    trace: str | None = None
    reasoning: ReasoningBudget | None = None


@dataclass
class Choice:
    index: int
    prompt: Prompt
    ticket: Ticket
    output: OutputStream
    num_cached: int = 0
    prompt_logprobs: list[Logprob | None] | None = None
    last_token_s: float | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None

    def as_dict(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass
class Run:
    """An admitted request. ``close`` (idempotent) ends whatever still runs in the engines."""

    plan: Plan
    choices: list[Choice]
    metrics: Metrics
    started_s: float
    backend: Backend
    prefix: str
    deadline_at_s: float | None = None
    first_token_s: float | None = None
    """Of any choice, on the monotonic clock as ``started_s``."""
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    async def admit(cls, backend: Backend, tokenizer: Tokenizer, plan: Plan, metrics: Metrics, prefix: str) -> Run:
        """Places every choice, or none: when one is refused, those already accepted are cancelled."""
        started = time.monotonic()
        jobs = [_job(plan, prompt, index, prefix) for prompt in plan.prompts for index in range(plan.n)]
        if len(jobs) == 1:
            tickets = [await backend.admit(jobs[0])]
        else:
            tickets = await _admit_all(backend, jobs)
        choices = [
            Choice(index, plan.prompts[index // plan.n], ticket, OutputStream(tokenizer, plan.text), ticket.num_cached)
            for index, ticket in enumerate(tickets)
        ]
        deadline = None if plan.deadline_s is None else started + plan.deadline_s
        return cls(plan, choices, metrics, started, backend, prefix, deadline)

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Pieces of all choices as they come. Raises ApiError or BackendError when an answer can't be finished."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            async for delta in self._deltas_of(choice):
                if piece := self._feed(choice, delta):
                    yield choice, piece
                if choice.output.finished:
                    return
            raise _broken_off()
        source = self._merged()
        try:
            async for choice, delta in source:
                if piece := self._feed(choice, delta):
                    yield choice, piece
        finally:
            await source.aclose()

    async def send(self, make: Callable[[Choice, Piece, Run], bytes], out: Callable[[bytes], Awaitable[None]]) -> None:
        """``out`` gets what ``make`` makes of every piece. Raises as :meth:`pieces` does."""
        if len(self.choices) > 1 or self.plan.reasoning is not None:
            async for choice, piece in self.pieces():
                if data := make(choice, piece, self):
                    await out(data)
            return
        # In a task of its own, a token wakes this coroutine and not the ten around it.
        task = asyncio.create_task(self._send_one(self.choices[0], make, out))
        self._pumps.append(task)
        await task

    async def _send_one(
        self, choice: Choice, make: Callable[[Choice, Piece, Run], bytes], out: Callable[[bytes], Awaitable[None]]
    ) -> None:
        def shape(delta: TokenDelta) -> bytes:
            piece = self._feed(choice, delta)
            return make(choice, piece, self) if piece.text or piece else b""

        ticket, output = choice.ticket, choice.output
        try:
            while not output.finished:
                data = await ticket.next(shape)
                if data is None:
                    raise _broken_off()
                if data:
                    await out(data)
        finally:
            ticket.cancel()

    @asynccontextmanager
    async def within_deadline(self) -> AsyncIterator[None]:
        """Raises the 408 when the request's deadline passes inside, whoever is being waited for."""
        try:
            async with asyncio.timeout_at(self._loop_deadline()):
                yield
        except TimeoutError:
            raise deadline_passed(f"the request's deadline of {self.plan.deadline_s:g} s passed") from None

    def usage(self) -> Usage:
        """Each prompt counts once, however many choices it has."""
        firsts = self.choices[:: self.plan.n]
        return Usage(
            sum(len(choice.prompt.ids) for choice in firsts),
            sum(choice.output.num_tokens for choice in self.choices),
            sum(choice.num_cached for choice in firsts),
        )

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for choice in self.choices:
            if not choice.output.finished:
                choice.ticket.cancel()

    def _loop_deadline(self) -> float | None:
        if self.deadline_at_s is None:
            return None
        return asyncio.get_running_loop().time() + self.deadline_at_s - time.monotonic()

    def _feed(self, choice: Choice, delta: TokenDelta) -> Piece:
        if delta.num_cached is not None:
            choice.num_cached = delta.num_cached
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None and delta.finish not in (Finish.STOP, Finish.LENGTH):
            raise _failure(delta, self.plan)
        output = choice.output
        before = output.num_tokens
        piece = output.feed(delta.ids, delta.logprobs, delta.finish)
        now = time.monotonic()
        if count := output.num_tokens - before:
            if choice.last_token_s is None:
                self.first_token_s = self.first_token_s or now
                self.metrics.first_tokens(count, now - self.started_s, len(choice.prompt.ids), choice.num_cached)
            else:
                self.metrics.tokens(count, now - choice.last_token_s)
            choice.last_token_s = now
        if piece.finish_reason is not None:
            choice.finish_reason = piece.finish_reason
            self.metrics.finished(piece.finish_reason, now - self.started_s, output.num_tokens)
            if delta.finish is None:
                choice.ticket.cancel()
        return piece

    def _deltas_of(self, choice: Choice) -> AsyncIterator[TokenDelta]:
        budget = self.plan.reasoning
        return choice.ticket.deltas() if budget is None else self._limited(choice, budget)

    async def _limited(self, choice: Choice, budget: ReasoningBudget) -> AsyncGenerator[TokenDelta, None]:
        """A choice's deltas; when its reasoning has used up the budget, the block is closed and the rest goes on."""
        watch, emitted = BudgetWatch(budget), list[int]()
        async for delta in choice.ticket.deltas():
            fits = watch.cut(delta.ids)
            if fits is None or (delta.finish is not None and fits == len(delta.ids)):  # it ends with its last token
                emitted += delta.ids
                yield delta
                continue
            choice.ticket.cancel()
            emitted += delta.ids[:fits]
            logprobs = delta.logprobs[:fits] if delta.logprobs is not None else None
            yield replace(delta, ids=delta.ids[:fits], logprobs=logprobs, finish=None)
            break
        else:
            return
        room = choice.prompt.max_tokens - len(emitted)
        closing = list(budget.closing[:room])
        left = room - len(closing)
        yield TokenDelta(choice.ticket.replica, closing, finish=None if left else Finish.LENGTH)
        if left:
            ids = [*choice.prompt.ids, *emitted, *closing]
            job = _job(self.plan, Prompt(ids, left), choice.index % self.plan.n, self.prefix)
            sampling = replace(job.sampling, prompt_logprobs=None)
            choice.ticket = await self.backend.admit(replace(job, sampling=sampling))
            async for delta in choice.ticket.deltas():
                # The second prompt's hits are the first's work, not something the client was spared.
                yield replace(delta, num_cached=None)

    async def _merged(self) -> AsyncGenerator[tuple[Choice, TokenDelta], None]:
        queue: asyncio.Queue[tuple[Choice, TokenDelta] | BaseException | None] = asyncio.Queue(64)

        async def pump(choice: Choice) -> None:
            try:
                async for delta in self._deltas_of(choice):
                    await queue.put((choice, delta))
                    if delta.finish is not None or choice.output.finished:
                        break
                else:
                    if not choice.output.finished:
                        raise _broken_off()
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        self._pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            running = len(self._pumps)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in self._pumps:
                task.cancel()


def _broken_off() -> ApiError:
    return ApiError(502, "the engine's stream ended before the answer did", code="engine_error")


def _job(plan: Plan, prompt: Prompt, index: int, prefix: str) -> Job:
    # The engine's id is always ours: a client may repeat its x-request-id.
    return Job(
        f"{prefix}-{uuid4().hex}",
        prompt.ids,
        for_choice(plan.sampling, index, prompt.max_tokens),
        plan.salt,
        plan.priority,
        plan.deadline_s,
        plan.ttft_slo_s,
        plan.trace,
    )


async def _admit_all(backend: Backend, jobs: Sequence[Job]) -> list[Ticket]:
    tasks = [asyncio.create_task(backend.admit(job)) for job in jobs]
    try:
        await asyncio.wait(tasks)
        return [task.result() for task in tasks]
    except BaseException:
        # Also when the client left meanwhile: what is admitted by now, or in spite of this, has no other owner.
        for task in tasks:
            if task.cancel():
                task.add_done_callback(_release)
            else:
                _release(task)
        raise


def _release(task: asyncio.Task[Ticket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()


def _failure(delta: TokenDelta, plan: Plan) -> ApiError:
    if delta.finish == Finish.DEADLINE:
        seconds = "" if plan.deadline_s is None else f" of {plan.deadline_s:g} s"
        return deadline_passed(f"the request's deadline{seconds} passed")
    if delta.finish == Finish.ABORT:
        return ApiError(503, "the request was aborted in the cluster", code="aborted", headers={"retry-after": "1"})
    return ApiError(500, delta.error or "the engine gave this request up", code="engine_error")
