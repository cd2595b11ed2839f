"""Requests in flight: placing them, streaming their tokens, and carrying a stream over to another replica.

Place (directory, queues, policy), reserve at once, submit, wait for the replica's word; then stream. A stream whose
replica dies is resubmitted with its prompt and emitted tokens, unchanged sampling and an unchanged ``num_prompt``;
attempts have ids of their own, so a late token of a dead attempt can't be taken for one of the living.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import inf

from router.backend import BackendError, DeadlineExceeded, EngineFault, Job, Overloaded, Refused, Unavailable
from router.hot_prefixes import HotPrefixes
from router.link import Link
from router.pages import RootFields
from router.placement import Placement
from router.policy import Decision
from router.retry_budget import RetryBudget
from router.ticket import FAULTS, StreamTicket, Work
from router.wire import Code, Finish, Refusal, TokenDelta

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamsOptions:
    """Seconds unless named otherwise.

    ``admit_wait_s``: a new request waits so long for a replica when none is there. ``resume_wait_s``: a stream that
    lost its replica waits so long for another before it ends with an error. ``max_ttft_s``: a first token predicted
    later than this is refused as overloaded. ``max_deaths``: so many replicas may be lost in a row with fewer than
    ``progress_tokens`` tokens in between; one more, and the request itself is suspected. ``retry_ratio`` and
    ``retry_floor``: see :class:`router.retry_budget.RetryBudget`.
    """

    admit_wait_s: float = 5.0
    resume_wait_s: float = 60.0
    accept_timeout_s: float = 5.0
    max_ttft_s: float = 300.0
    max_deaths: int = 3
    progress_tokens: int = 32
    retry_ratio: float = 0.1
    retry_floor: int = 16


class Changes:
    """Wakes everyone who waits for the set of usable replicas to change."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Raises TimeoutError."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait_for(waiter, max(0.0, timeout_s))
        finally:
            self._waiting.discard(waiter)


class Attempt:
    """One submission of a ticket's work to one replica; see :class:`router.link.Attempt`."""

    __slots__ = ("answer", "link", "num_tokens", "request", "streams", "ticket")

    def __init__(self, streams: Streams, ticket: StreamTicket, link: Link, request: str) -> None:
        self.streams = streams
        self.ticket = ticket
        self.link = link
        self.request = request
        self.num_tokens = 0
        self.answer: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        """None: accepted. ConnectionError: the replica was lost first."""

    def on_accept(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)

    def on_reject(self, refusal: Refusal) -> None:
        self.streams.ended(self)
        if not self.answer.done():
            self.answer.set_result(refusal)

    def on_delta(self, delta: TokenDelta) -> None:
        self.streams.on_delta(self, delta)

    def on_lost(self, reason: str) -> None:
        if self.answer.done():
            self.streams.on_lost(self, reason)
        else:
            self.answer.set_exception(ConnectionError(reason))


class Streams:
    """All live tickets of one router. ``links`` is the dispatcher's own, by replica."""

    def __init__(
        self,
        placement: Placement,
        links: Mapping[str, Link],
        hot: HotPrefixes,
        counters: Counter[str],
        options: StreamsOptions,
    ) -> None:
        self.options = options
        self.changes = Changes()
        self._placement = placement
        self._links = links
        self._hot = hot
        self._counters = counters
        self._live: dict[StreamTicket, Attempt | None] = {}
        """Ticket -> the attempt whose deltas count; None between attempts."""
        self._resuming: dict[StreamTicket, asyncio.Task[None]] = {}
        self._budget = RetryBudget(lambda: len(self._live), floor=options.retry_floor, ratio=options.retry_ratio)
        self._tag = secrets.token_hex(4)
        self._ids = count()

    def __len__(self) -> int:
        return len(self._live)

    def close(self) -> None:
        for ticket in list(self._live):
            ticket.fail(Unavailable("this router shuts down"))
            self.drop(ticket)

    # --- placing

    async def admit(self, job: Job, root: RootFields, until: float, deadline: float | None) -> StreamTicket:
        """See :meth:`router.backend.Backend.admit`. What raises leaves nothing behind."""
        if not job.prompt:
            raise Refused("the prompt has no tokens; at least 1 is needed", param="prompt")
        try:
            work = Work(job, root)
        except ValueError as error:
            raise Refused(str(error), param="prompt") from None
        ticket = StreamTicket(work, self, deadline=deadline, spread=next(self._ids))
        self._live[ticket] = None
        try:
            await self._place(ticket, until, first=True)
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    async def wait_for_replica(self, until: float, deadline: float | None) -> None:
        """Until some link changed. Raises Unavailable at ``until``, DeadlineExceeded at ``deadline``."""
        limit = until if deadline is None else min(until, deadline)
        try:
            await self.changes.wait(limit - self._now())
        except TimeoutError:
            if deadline is not None and self._now() >= deadline:
                raise DeadlineExceeded("the request's deadline passed while no replica was there") from None
            reasons = sorted({link.reason for link in self._links.values() if link.reason})
            raise Unavailable("no replica is there" + (": " + "; ".join(reasons) if reasons else "")) from None

    async def _place(self, ticket: StreamTicket, until: float, *, first: bool) -> None:
        """Have some replica accept the ticket's work. Raises BackendError."""
        tried: dict[str, Refusal] = {}
        pause = 0.05
        while not ticket.closed:
            if ticket.deaths > self.options.max_deaths:
                raise EngineFault(f"{ticket.deaths} replicas in a row were lost under this request")
            decision = self._decide(ticket, tried, first)
            if decision is not None:
                refusal = await self._try(ticket, decision)
                if refusal is None:
                    return
                if refusal.code == Code.INVALID:
                    raise Refused(refusal.message, param=refusal.param)
                if refusal.code not in (Code.OVERLOADED, Code.DRAINING):
                    raise EngineFault(refusal.message)
                tried[decision.replica] = refusal
            elif not self._placement.takers():
                await self.wait_for_replica(until, ticket.deadline)
            elif first and (not tried or any(refusal.code == Code.OVERLOADED for refusal in tried.values())):
                raise self._overloaded(ticket, tried)
            else:  # a stream already begun outwaits overload; nobody is turned away by a drain
                await self._sleep(pause, until, ticket)
                pause = min(1.0, 2 * pause)
                tried.clear()

    def _decide(self, ticket: StreamTicket, tried: Mapping[str, Refusal], first: bool) -> Decision | None:
        limit_s = None
        if first:
            limit_s = min(ticket.work.job.ttft_slo_s or self.options.max_ttft_s, self.options.max_ttft_s)
        return self._placement.decide(
            ticket.work.keys,
            ticket.work.num_tokens,
            self._now(),
            fallback_key=ticket.spread,
            exclude=tried,
            slo_ms=None if limit_s is None else limit_s * 1e3,
        )

    async def _try(self, ticket: StreamTicket, decision: Decision) -> Refusal | None:
        """Submit there and wait for the answer; None: accepted. A lost replica counts as one that drains."""
        link = self._links[decision.replica]
        request = f"{ticket.work.job.request_id[:64]}~{self._tag}{next(self._ids):x}"
        attempt = Attempt(self, ticket, link, request)
        now = self._now()
        left_s = inf if ticket.deadline is None else ticket.deadline - now
        remaining_ms = None if ticket.deadline is None else max(1, int(left_s * 1e3))
        frame = ticket.work.submit(request, remaining_ms).to_frame()
        self._placement.commit(decision, request, ticket.work.keys, now)
        self._note(ticket.work, decision)
        self._live[ticket] = attempt
        ticket.replica = decision.replica
        try:
            if not link.submit(request, frame, attempt):
                raise ConnectionError("no connection")
            refusal = await asyncio.wait_for(attempt.answer, min(left_s, self.options.accept_timeout_s))
        except ConnectionError as error:
            ticket.deaths += 1
            refusal = Refusal(Code.DRAINING, f"the replica was lost: {error}")
        except TimeoutError:
            if left_s < self.options.accept_timeout_s:  # the ticket ends, and the attempt with it
                raise DeadlineExceeded("the request's deadline passed before a replica answered") from None
            refusal = Refusal(Code.OVERLOADED, f"no answer within {self.options.accept_timeout_s} s")
        except asyncio.CancelledError:
            self._abandon(attempt)
            raise
        if refusal is not None:
            self._abandon(attempt)
            if self._live.get(ticket) is attempt:
                self._live[ticket] = None
        return refusal

    def _note(self, work: Work, decision: Decision) -> None:
        page_size = self._placement.page_size
        if depth := decision.best_cached // page_size:
            self._hot.hit(work.keys[depth - 1], work.hashes[depth - 1], depth * page_size)
        self._counters["placed"] += 1
        self._counters["placed_tokens"] += work.num_tokens
        self._counters["matched_tokens"] += decision.cached
        self._counters["best_matched_tokens"] += min(decision.best_cached, work.num_tokens - 1)

    def _overloaded(self, ticket: StreamTicket, tried: Mapping[str, Refusal]) -> BackendError:
        said = [refusal.retry_after_s for refusal in tried.values() if refusal.retry_after_s]
        retry_after_s = min(said) if said else max(1.0, self._placement.shortest_queue_ms(self._now()) / 1e3)
        if tried:
            return Overloaded(next(iter(tried.values())).message, retry_after_s=retry_after_s)
        slo_s, most_s = ticket.work.job.ttft_slo_s, self.options.max_ttft_s
        if slo_s is not None and slo_s < most_s:
            param, wanted = "x-ttft-slo-ms", f"x-ttft-slo-ms = {slo_s * 1e3:.15g}"
        else:
            param, wanted = None, f"max_ttft_s = {most_s}"
        message = f"no replica is predicted to send a first token within {wanted}"
        return Overloaded(message, retry_after_s=retry_after_s, param=param)

    async def _sleep(self, pause_s: float, until: float, ticket: StreamTicket) -> None:
        await asyncio.sleep(pause_s)
        now = self._now()
        if ticket.deadline is not None and now >= ticket.deadline:
            raise DeadlineExceeded("the request's deadline passed while every replica was full")
        if now >= until:
            raise Unavailable("every replica was full or draining for too long")

    # --- streaming

    def on_delta(self, attempt: Attempt, delta: TokenDelta) -> None:
        """From the link, for every delta of a live attempt; the hot path."""
        ticket = attempt.ticket
        if self._live.get(ticket) is not attempt:
            return
        if not attempt.num_tokens and (delta.ids or delta.finish is not None):
            attempt.on_accept()  # the engine may be quicker than the word that it took the request
        if delta.ids:
            if not attempt.num_tokens:
                self._placement.first_token(attempt.link.name, attempt.request, self._now())
            attempt.num_tokens += len(delta.ids)
            self._counters["tokens"] += len(delta.ids)
            try:
                ticket.work.note(delta)
            except BackendError as error:
                self._fail(ticket, error)
                return
        if delta.finish is None:
            ticket.push(delta)
        else:
            self._on_finish(attempt, delta, delta.finish)

    def _on_finish(self, attempt: Attempt, delta: TokenDelta, finish: str) -> None:
        ticket = attempt.ticket
        self._counters[f"finished_{finish}"] += 1
        fault = FAULTS.get(finish)
        if fault is None and finish != Finish.ABORT:
            self._forget(attempt)
            ticket.push(delta)
            return
        delta.finish = None
        if delta.ids:
            ticket.push(delta)
        if fault is not None:
            self._forget(attempt)
            ticket.fail(fault(delta.error or ""))
        else:  # nobody here asked for it: the replica let go of the stream, so it goes on elsewhere
            attempt.on_lost("aborted by the replica")

    def on_lost(self, attempt: Attempt, reason: str) -> None:
        """An accepted attempt is gone with its replica: resume elsewhere."""
        ticket = attempt.ticket
        self.ended(attempt)
        if self._live.get(ticket) is not attempt:
            return
        self._live[ticket] = None
        ticket.deaths = 1 if attempt.num_tokens >= self.options.progress_tokens else ticket.deaths + 1
        self._counters["lost"] += 1
        log.debug("request %s lost replica %s: %s", attempt.request, attempt.link.name, reason)
        self._resuming[ticket] = asyncio.get_running_loop().create_task(self._resume(ticket))

    async def _resume(self, ticket: StreamTicket) -> None:
        until = self._now() + self.options.resume_wait_s
        try:
            async with self._budget:
                await self._place(ticket, until, first=False)
            self._counters["resumed"] += 1
        except Refused as error:
            self._fail(ticket, EngineFault(f"the stream could not go on elsewhere: {error.message}"))
        except BackendError as error:
            self._fail(ticket, error)
        finally:
            if self._resuming.get(ticket) is asyncio.current_task():
                del self._resuming[ticket]

    def _fail(self, ticket: StreamTicket, error: BackendError) -> None:
        self._counters[f"failed_{type(error).__name__}"] += 1
        ticket.fail(error)
        self.drop(ticket)

    def _forget(self, attempt: Attempt) -> None:
        self.ended(attempt)
        self._live.pop(attempt.ticket, None)
        self._resuming.pop(attempt.ticket, None)  # the end may come before the task knows that it was accepted

    # --- router.ticket.Owner

    def drop(self, ticket: StreamTicket) -> None:
        if ticket not in self._live:
            return
        attempt = self._live.pop(ticket)
        self._counters["dropped"] += 1
        if attempt is not None:
            self._abandon(attempt)
        task = self._resuming.pop(ticket, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def ended(self, attempt: Attempt) -> None:
        """Its reservation and its place in the queue go."""
        self._placement.end(attempt.link.name, attempt.request, self._now())

    def _abandon(self, attempt: Attempt) -> None:
        attempt.link.cancel(attempt.request)
        self.ended(attempt)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def check_invariants(self) -> None:
        own = {request for state in self._placement.replicas.values() for request in state.own}
        live = {attempt.request for attempt in self._live.values() if attempt is not None}
        assert own == live, f"reservations of dead requests: {sorted(own - live)}; missing: {sorted(live - own)}"
        # A stream may end before the task that resumed it has heard that it was accepted.
        assert all(ticket in self._live or not task.done() for ticket, task in self._resuming.items())
        self._budget.check_invariants()
