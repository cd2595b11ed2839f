"""One admitted job as the HTTP layer holds it, and the memory of its stream that lets another replica go on.

Buffering is bounded per ticket: undelivered deltas are merged into one, so a reader that stalls costs at most its
``max_tokens`` ids (and their logprobs), and stalls nobody else.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from router.backend import BackendError, DeadlineExceeded, EngineFault, Job, Refused
from router.pages import HASH_BYTES, RootFields, chain, keys64, pack_tokens
from router.wire import Finish, Submit, TokenDelta

T = TypeVar("T")


class Work:
    """Prompt plus everything emitted so far, packed, with the hashes of its full pages.

    ``keys`` are the directory keys of the pages. Raises Refused-worthy ValueError for ids outside [0, 2**32).
    """

    def __init__(self, job: Job, root: RootFields) -> None:
        self.job = job
        self.emitted = array("I")
        self._root = root.root(salt=job.salt)
        self._page_size = root.page_size
        self._prompt = pack_tokens(job.prompt)
        self.hashes = chain(self._root, self._prompt, root.page_size)
        self.keys = keys64(self.hashes)
        self._prompt_logprobs_sent = False
        self._max_tokens = job.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self._prompt) // 4 + len(self.emitted)

    def note(self, delta: TokenDelta) -> None:
        """Tokens on their way to the client. Raises EngineFault when there are more than were asked for."""
        try:
            self.emitted.extend(delta.ids)
        except (OverflowError, TypeError) as error:
            raise EngineFault(f"the replica sent token ids that are none: {error}") from None
        if len(self.emitted) > self._max_tokens:
            raise EngineFault(f"the replica sent more than max_tokens = {self._max_tokens} tokens")
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs_sent = True

    def submit(self, request_id: str, deadline_ms: int | None) -> Submit:
        """The request from here on: nothing that was emitted is sampled again, and positions go on counting."""
        tokens = self._prompt
        if self.emitted:
            tokens += pack_tokens(self.emitted)
            done = len(self.hashes)
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes += chain(parent, tokens, self._page_size, start=done)
            self.keys += keys64(self.hashes[done:])
        sampling = self.job.sampling
        if self._prompt_logprobs_sent:
            sampling = replace(sampling, prompt_logprobs=None)
        return Submit(
            request_id,
            tokens,
            len(self.job.prompt),
            self._root,
            b"".join(self.hashes),
            sampling,
            deadline_ms,
            self.job.priority,
            self.job.trace,
        )

    def check_invariants(self) -> None:
        assert len(self.hashes) == len(self.keys) and all(len(page) == HASH_BYTES for page in self.hashes)


class Owner(Protocol):
    def drop(self, ticket: StreamTicket) -> None:
        """The stream is over for its reader: free everything it holds, here and on the replica. Idempotent."""
        ...


class StreamTicket:
    """Implements :class:`router.backend.Ticket`."""

    def __init__(self, work: Work, owner: Owner, *, deadline: float | None = None, spread: int = 0) -> None:
        self.work = work
        self.deadline = deadline
        """On the event loop's clock."""
        self.spread = spread
        """Breaks placement ties where no page can."""
        self.replica = ""
        self.num_cached = 0
        self.deaths = 0
        """Replicas lost under it in a row; see :class:`router.streams.StreamsOptions`."""
        self.closed = False
        self._owner = owner
        self._cached_known = False
        self._buffer: TokenDelta | None = None
        self._error: BackendError | None = None
        self._waiter: asyncio.Future[Any] | None = None
        self._shape: Callable[[TokenDelta], Any] | None = None
        """Of the reader that waits in :meth:`next`."""

    async def next(self, shape: Callable[[TokenDelta], T]) -> T | None:
        """What ``shape`` makes of the next delta (never None); None at the stream's end. Raises what it raises, and
        EngineFault, DeadlineExceeded or Unavailable.

        ``shape`` is applied as the delta comes in, while this waits: so all streams of a step are shaped before the
        first of them is sent, and their writes come in one burst.
        """
        while True:
            if (delta := self._buffer) is not None:
                self._buffer = None
                return shape(delta)
            if self._error is not None:
                raise self._error
            if self.closed:
                return None
            self._shape = shape
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                if (shaped := await self._waiter) is not None:
                    return shaped
            finally:
                self._shape = None

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """Raises EngineFault, DeadlineExceeded or Unavailable; a stream that just ends was cancelled."""
        try:
            while True:
                if (delta := self._buffer) is not None:
                    self._buffer = None
                    yield delta
                    if delta.finish is not None:
                        return
                elif self._error is not None:
                    raise self._error
                elif self.closed:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self.cancel()

    def cancel(self) -> None:
        if not self.closed:
            self.closed = True
            self._owner.drop(self)
            self._wake()

    # --- fed by the dispatcher

    def push(self, delta: TokenDelta) -> None:
        """A delta of the attempt that counts. ``finish`` is stop or length, or None."""
        if delta.num_cached is not None:
            if self._cached_known:
                delta.num_cached = None  # a later attempt's cache hits include what this stream emitted itself
            else:
                self.num_cached, self._cached_known = delta.num_cached, True
        held = self._buffer
        if held is None:
            waiter, shape = self._waiter, self._shape
            if shape is not None and waiter is not None and not waiter.done():
                self._waiter = None  # ``shape`` may cancel this ticket
                try:
                    waiter.set_result(shape(delta))
                except Exception as error:
                    waiter.set_exception(error)
                return
            self._buffer = delta
        else:
            _merge(held, delta)
        self._wake()

    def fail(self, error: BackendError) -> None:
        if self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _merge(held: TokenDelta, delta: TokenDelta) -> None:
    """Append ``delta`` to an undelivered one of the same request, in place: a stalled reader's list grows long."""
    if delta.logprobs is not None:
        if held.logprobs is None:
            held.logprobs = []
        held.logprobs += delta.logprobs
    held.ids += delta.ids
    held.finish = delta.finish
    if delta.num_cached is not None:
        held.num_cached = delta.num_cached
    if delta.prompt_logprobs is not None:
        held.prompt_logprobs = delta.prompt_logprobs


FAULTS: dict[str, Callable[[str], BackendError]] = {
    Finish.ERROR: lambda text: EngineFault(text or "the engine gave this request up"),
    Finish.REFUSED: lambda text: Refused(text or "the request can't be served as it is"),
    Finish.DEADLINE: lambda text: DeadlineExceeded(text or "the request's deadline has passed"),
}
"""Finish reasons that end a stream with an error."""
