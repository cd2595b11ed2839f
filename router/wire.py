"""The token plane's vocabulary: versioned msgpack frames between routers and replicas.

One TCP connection per (router, replica). A frame is a little-endian u32 length and a msgpack array whose first
element is its :class:`Kind`. Connection set-up, with a shared secret that never crosses the wire:

    replica -> router   HELLO    [version, nonce_s]
    router  -> replica  AUTH     [version, router_id, nonce_c, hmac(secret, "router" nonce_s nonce_c), root]
    replica -> router   WELCOME  [hmac(secret, "replica" nonce_c nonce_s), replica_id, epoch, root, limits]
                        REFUSED  [reason]   (bad secret, version or root: a hard error that names both values)

``root`` is [model, tokenizer, kv dtype, page_size]; a router may leave fields null that only replicas know. Then

    router  -> replica  SUBMIT (Submit)   CANCEL [request_id]   PING [t]   REPLAY [from_seq]   SNAPSHOT_REQUEST []
                        INSPECT [tag]
    replica -> router   ACCEPT [request_id]   REJECT (Refusal)   TOKENS [[TokenDelta, ...]]   EVENTS (EventBatch)
                        SNAPSHOT (Snapshot)   INFO [tag, info]   DRAINING []
                        PONG [t or null, epoch, last seq, ms since the engine's last batch]; also unasked, when
                        nothing else was sent for 50 ms

TOKENS is at most one frame per engine step and router, whatever the batch. Unknown kinds and trailing elements are
ignored, so that a newer peer of the same version can add them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router.event_frames import EventBatch, Load, Snapshot, Tier, rechunk
from router.framing import MAX_FRAME, VERSION, FrameBuffer, Kind, ProtocolError, encode, proof
from router.sampling import GRAMMAR_LIMITS, Sampling

__all__ = [
    "GRAMMAR_LIMITS",
    "MAX_FRAME",
    "VERSION",
    "Code",
    "EventBatch",
    "Finish",
    "FrameBuffer",
    "Kind",
    "Load",
    "Logprob",
    "ProtocolError",
    "Refusal",
    "Sampling",
    "Snapshot",
    "Submit",
    "Tier",
    "TokenDelta",
    "encode",
    "proof",
    "rechunk",
]


class Finish(StrEnum):
    """Why a request ended. STOP: an eos or stop id; LENGTH: max_tokens or the context is full; REFUSED: what it asks
    for together leaves no token to go on with; ERROR: the engine's own fault."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"
    REFUSED = "refused"


class Code(StrEnum):
    """Why a replica rejects a request. A router tries OVERLOADED and DRAINING elsewhere; INVALID never fits; FAULT is
    the engine's own."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    FAULT = "fault"


class Refusal(Exception):
    """A replica's REJECT: ``code``, a message fit for a client, the offending field, and when to try again (s)."""

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_frame(self, request_id: str) -> bytes:
        return encode(Kind.REJECT, request_id, str(self.code), self.message, self.param, self.retry_after_s)

    @classmethod
    def from_frame(cls, frame: list[Any]) -> tuple[str, Refusal]:
        """(request id, refusal)."""
        try:
            _, request_id, code, message, param, retry_after_s = frame[:6]
        except ValueError as error:
            raise ProtocolError(f"bad REJECT frame: {error}") from None
        ok = isinstance(request_id, str) and isinstance(code, str) and isinstance(message, str)
        if not ok or not isinstance(param, str | None) or not isinstance(retry_after_s, int | float | None):
            raise ProtocolError("bad REJECT frame: wrong types")
        return request_id, cls(code, message, param, retry_after_s)


@dataclass(frozen=True)
class Submit:
    """Router -> replica: run this request.

    ``tokens`` (packed u32) is the prompt and, when a stream resumes after a replica's death, the tokens already
    emitted; ``num_prompt`` says where the prompt ends. ``hashes`` (16 bytes each) cover its full pages.
    ``max_tokens`` and positions count from ``num_prompt``, so a resumed request ends where it would have.
    """

    request_id: str
    tokens: bytes
    num_prompt: int
    root: bytes
    hashes: bytes
    sampling: Sampling = field(default_factory=Sampling)
    deadline_ms: int | None = None
    """Milliseconds from receipt; None: none."""
    priority: int = 0
    """Smaller runs earlier, as in vLLM."""
    trace: str | None = None
    """W3C traceparent."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    def to_frame(self) -> bytes:
        return encode(
            Kind.SUBMIT,
            self.request_id,
            self.tokens,
            self.num_prompt,
            self.root,
            self.hashes,
            self.sampling.to_wire(),
            self.deadline_ms,
            self.priority,
            self.trace,
        )

    @classmethod
    def from_frame(cls, frame: list[Any]) -> Submit:
        try:
            _, request_id, tokens, num_prompt, root, hashes, sampling, deadline_ms, priority, trace = frame[:10]
        except ValueError as error:
            raise ProtocolError(f"bad SUBMIT frame: {error}") from None
        typed = (
            isinstance(request_id, str)
            and isinstance(tokens, bytes)
            and len(tokens) % 4 == 0
            and type(num_prompt) is int
            and 0 < num_prompt <= len(tokens) // 4
            and isinstance(root, bytes)
            and isinstance(hashes, bytes)
            and len(root) == 16
            and len(hashes) % 16 == 0
            and (deadline_ms is None or type(deadline_ms) is int)
            and type(priority) is int
            and isinstance(trace, str | None)
        )
        if not typed:
            raise ProtocolError("bad SUBMIT frame: wrong types or lengths")
        return cls(
            request_id, tokens, num_prompt, root, hashes, Sampling.from_wire(sampling), deadline_ms, priority, trace
        )


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities of one sampled (or prompt) token: its own, its rank (1 = likeliest), and the top k."""

    token: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenDelta:
    """What one engine step gave one request."""

    request_id: str
    ids: list[int]
    finish: str | None = None
    num_cached: int | None = None
    """Prompt tokens found in the page cache at admission; sent with a request's first delta."""
    logprobs: list[Logprob] | None = None
    """One per id when asked for."""
    prompt_logprobs: list[Logprob | None] | None = None
    """One per prompt token (None for the first), once, when asked for."""
    error: str | None = None
    """Says what went wrong when ``finish`` is "error"."""

    def to_wire(self) -> list[Any]:
        """Trailing defaults are left out: most deltas are just [id, ids]."""
        if self.logprobs is None and self.prompt_logprobs is None and self.error is None:
            if self.finish is None and self.num_cached is None:
                return [self.request_id, self.ids]
            return [self.request_id, self.ids, self.finish, self.num_cached]
        return [
            self.request_id,
            self.ids,
            self.finish,
            self.num_cached,
            _logprobs_out(self.logprobs),
            _logprobs_out(self.prompt_logprobs),
            self.error,
        ]

    @classmethod
    def from_wire(cls, raw: list[Any]) -> TokenDelta:
        """Raises ProtocolError, except for the values of ``ids``, which the receiver checks as it packs them."""
        try:
            if len(raw) == 2:
                return cls(raw[0], raw[1])
            request_id, ids, finish, num_cached, logprobs, prompt_logprobs, error = (*raw, None, None, None, None)[:7]
            if not isinstance(finish, str | None) or not isinstance(num_cached, int | None):
                raise ProtocolError("bad token delta: wrong types")
            return cls(
                request_id, ids, finish, num_cached, _logprobs_in(logprobs), _logprobs_in(prompt_logprobs), error
            )
        except (ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"bad token delta: {error}") from None


def _logprobs_out(values: Any) -> Any:
    if values is None:
        return None
    return [None if v is None else [v.token, v.rank, [list(pair) for pair in v.top]] for v in values]


def _logprobs_in(raw: Any) -> Any:
    if raw is None:
        return None
    return [None if v is None else Logprob(v[0], v[1], tuple((i, p) for i, p in v[2])) for v in raw]
