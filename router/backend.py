"""What the HTTP layer asks of the cluster behind it: admit a job, then stream its deltas.

The HTTP code knows only this module; :mod:`router.dispatch` implements it over the token plane, and tests
implement it with a script.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from router.wire import Sampling, TokenDelta


@dataclass(frozen=True)
class Job:
    """A request as tokens. ``salt`` separates tenants' page hashes; it comes from the principal, not the body."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    ttft_slo_s: float | None = None
    trace: str | None = None


class BackendError(Exception):
    """Base of what ``admit`` and a stream can raise. ``message`` is fit for a client."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Refused(BackendError):
    """The request can never be served as it is (too long for the pool, unsupported option, ...)."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(BackendError):
    """No room now; retry later."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.param = param


class Unavailable(BackendError):
    """No replica is admitted, or the cluster is draining."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(BackendError):
    status = 408


class EngineFault(BackendError):
    """The engine gave this request up (non-finite logits, ...)."""

    status = 500


T = TypeVar("T")


class Ticket(Protocol):
    """An admitted job. Iterate it once; ``cancel`` (idempotent, never raises) or closing ends it in the engine."""

    @property
    def num_cached(self) -> int: ...

    @property
    def replica(self) -> str: ...

    def deltas(self) -> AsyncIterator[TokenDelta]: ...

    async def next(self, shape: Callable[[TokenDelta], T]) -> T | None:
        """``shape`` of the next delta, None at the end: another way to iterate, with less work per token."""
        ...

    def cancel(self) -> None: ...


class Backend(Protocol):
    async def admit(self, job: Job) -> Ticket:
        """Place the job and have a replica accept it. Raises Refused, Overloaded or Unavailable."""
        ...

    def ready(self) -> bool:
        """At least one replica is admitted."""
        ...

    def limits(self) -> dict[str, int]:
        """Smallest over the admitted replicas: max_model_len, max_batch_size, num_pages, page_size."""
        ...

    def directory(self, top: int) -> dict[str, Any]:
        """JSON for ``GET /v1/directory``: replicas, sync state, hottest prefixes. Never prompt text."""
        ...

    async def engines(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """JSON for ``GET /v1/engine``, one object per replica; one that doesn't answer in time has an ``error``."""
        ...
