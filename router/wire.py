"""The token plane's vocabulary: versioned msgpack frames between routers and replicas.

One TCP connection per (router, replica). A frame is a little-endian u32 length and a msgpack array whose first
element is its :class:`Kind`. Connection set-up, with a shared secret that never crosses the wire:

    replica -> router   HELLO    [version, nonce_s]
    router  -> replica  AUTH     [version, router_id, nonce_c, hmac(secret, "router" nonce_s nonce_c), root]
    replica -> router   WELCOME  [hmac(secret, "replica" nonce_c nonce_s), replica_id, epoch, root, limits]
                        REFUSED  [reason]   (bad secret, version or root: a hard error that names both values)

then SUBMIT, CANCEL, PING, REPLAY, SNAPSHOT_REQUEST, INSPECT one way and ACCEPT, REJECT, TOKENS, EVENTS, SNAPSHOT,
PONG, INFO, DRAINING the other. TOKENS is at most one frame per engine step and router, whatever the batch.
Unknown kinds and trailing elements are ignored, so that a newer peer of the same version can add them.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any

import msgpack

VERSION = 1
MAX_FRAME = 64 << 20
"""Bytes; a longer frame is a protocol error and closes the connection."""
_LENGTH = struct.Struct("<I")


class Kind(IntEnum):
    HELLO = 0
    AUTH = 1
    WELCOME = 2
    REFUSED = 3
    SUBMIT = 10
    CANCEL = 11
    PING = 12
    REPLAY = 13
    SNAPSHOT_REQUEST = 14
    INSPECT = 15
    ACCEPT = 30
    REJECT = 31
    TOKENS = 32
    EVENTS = 33
    SNAPSHOT = 34
    PONG = 35
    INFO = 36
    DRAINING = 37


class Finish(StrEnum):
    """Why a request ended. STOP: an eos or stop id; LENGTH: max_tokens or the context is full."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class ProtocolError(Exception):
    """A peer broke the protocol; the connection is closed."""


def encode(kind: Kind, *payload: Any) -> bytes:
    """One length-prefixed frame."""
    body = msgpack.packb([int(kind), *payload], use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames. ``feed`` raises ProtocolError on an over-long or undecodable frame."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._max_frame = max_frame

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= 4:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > self._max_frame:
                    raise ProtocolError(f"frame of {length} bytes; at most {self._max_frame} are allowed")
                if len(buffer) - start - 4 < length:
                    break
                body = bytes(memoryview(buffer)[start + 4 : start + 4 + length])
                start += 4 + length
                try:
                    frame = msgpack.unpackb(body, raw=False, strict_map_key=False)
                except Exception as error:
                    raise ProtocolError(f"undecodable frame: {error}") from None
                if not isinstance(frame, list) or not frame or not isinstance(frame[0], int):
                    raise ProtocolError("a frame must be an array that starts with its kind")
                yield frame
        finally:
            del buffer[:start]


def proof(secret: bytes, role: str, *nonces: bytes) -> bytes:
    """HMAC-SHA256 that shows knowledge of ``secret``; ``role`` keeps a peer from echoing our own proof back."""
    return hmac.new(secret, role.encode() + b"".join(nonces), "sha256").digest()


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. Names and meanings are vLLM's; token ids only, no text.

    Order of application: allowed ids, bad words, min_tokens, logit_bias, penalties, grammar mask; then greedy when
    ``temperature`` is 0, else temperature, min_p, top-k, top-p and a draw whose noise is a counter function of
    (seed, absolute position).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """u64; the router draws one when the client gives none, so that a resumed request goes on identically."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the request when sampled: the checkpoint's eos ids (unless ignore_eos) and the client's own."""
    min_tokens: int = 0
    """Stop ids can't be sampled before so many tokens."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    """None: none; k >= 0: the chosen token's and the k likeliest."""
    prompt_logprobs: int | None = None
    grammar: tuple[str, str] | None = None
    """(kind, source): kind is json_schema, json_object, regex, choice or ebnf."""

    def to_wire(self) -> dict[str, Any]:
        """Only what differs from the defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def from_wire(cls, raw: dict[str, Any]) -> Sampling:
        """Raises ProtocolError for an unknown field: an option is honoured or refused, never dropped."""
        known = {f.name for f in fields(cls)}
        if unknown := set(raw) - known:
            raise ProtocolError(f"unknown sampling fields {sorted(unknown)}")
        return cls(**{name: _frozen(value) for name, value in raw.items()})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


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
            return cls(
                request_id, tokens, num_prompt, root, hashes, Sampling.from_wire(sampling), deadline_ms, priority, trace
            )
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"bad SUBMIT frame: {error}") from None


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities of one sampled (or prompt) token: its own, its rank (1 = likeliest), and the top k."""

    token: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass
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
        request_id, ids, finish, num_cached, logprobs, prompt_logprobs, error = raw[:7]
        return cls(request_id, ids, finish, num_cached, _logprobs_in(logprobs), _logprobs_in(prompt_logprobs), error)


def _logprobs_out(values: Any) -> Any:
    if values is None:
        return None
    return [None if v is None else [v.token, v.rank, [list(pair) for pair in v.top]] for v in values]


def _logprobs_in(raw: Any) -> Any:
    if raw is None:
        return None
    return [None if v is None else Logprob(v[0], v[1], tuple((i, p) for i, p in v[2])) for v in raw]


@dataclass
class Load:
    """A replica's load at one moment, as the placement policy uses it."""

    queued_uncached_tokens: int = 0
    """Tokens still to be prefilled, of waiting and running requests."""
    running: int = 0
    waiting: int = 0
    """Requests without a first token."""
    context_tokens: int = 0
    """Sum of context lengths of decoding requests."""
    free_pages: int = 0
    evictable_pages: int = 0
    coefficients: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """a, b, t0, k1, k2 of the step-time fit, milliseconds (docs/router.md)."""

    def to_wire(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]

    @classmethod
    def from_wire(cls, raw: list[Any]) -> Load:
        *counts, coefficients = raw[:7]
        return cls(*counts, coefficients=tuple(coefficients))


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1


@dataclass
class EventBatch:
    """One element of a replica's ordered stream: what its cache and load became since the last one.

    ``seq`` is contiguous within an ``epoch`` (random per engine start). ``digests`` summarise all resident pages
    *after* this batch, one (count, xor) per tier, and let a consumer prove that it is in sync.
    """

    replica: str
    epoch: int
    seq: int
    t_ns: int
    stored: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Runs of (parent key64 or 0, tier, packed u64 keys, parent first)."""
    removed: list[tuple[int, bytes]] = field(default_factory=list)
    """(tier, packed u64 keys), applied after ``stored``."""
    accepted: list[tuple[str, bytes]] = field(default_factory=list)
    """(reservation id, packed u64 keys of the pages the request will compute)."""
    ended: list[str] = field(default_factory=list)
    """Reservation ids: first token sent, cancelled or failed."""
    load: Load = field(default_factory=Load)
    digests: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])

    def to_frame(self) -> bytes:
        return encode(
            Kind.EVENTS,
            VERSION,
            self.replica,
            self.epoch,
            self.seq,
            self.t_ns,
            self.stored,
            self.removed,
            self.accepted,
            self.ended,
            self.load.to_wire(),
            self.digests,
        )

    @classmethod
    def from_frame(cls, frame: list[Any]) -> EventBatch:
        try:
            _, version, replica, epoch, seq, t_ns, stored, removed, accepted, ended, load, digests = frame[:12]
            if version != VERSION:
                raise ProtocolError(f"event version {version}; this router speaks {VERSION}")
            return cls(
                replica,
                epoch,
                seq,
                t_ns,
                [(p, t, k) for p, t, k in stored],
                [(t, k) for t, k in removed],
                [(r, k) for r, k in accepted],
                list(ended),
                Load.from_wire(load),
                [(c, x) for c, x in digests],
            )
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"bad EVENTS frame: {error}") from None


@dataclass
class Snapshot:
    """A replica's whole residency at (epoch, seq), in chunks; the consumer goes on with seq + 1.

    The last chunk (index == total - 1) carries the live reservations.
    """

    replica: str
    epoch: int
    seq: int
    index: int
    total: int
    tier: int
    keys: bytes
    digests: list[tuple[int, int]]
    reservations: list[tuple[str, bytes]] = field(default_factory=list)
    load: Load = field(default_factory=Load)

    def to_frame(self) -> bytes:
        return encode(
            Kind.SNAPSHOT,
            self.replica,
            self.epoch,
            self.seq,
            self.index,
            self.total,
            self.tier,
            self.keys,
            self.digests,
            self.reservations,
            self.load.to_wire(),
        )

    @classmethod
    def from_frame(cls, frame: list[Any]) -> Snapshot:
        try:
            _, replica, epoch, seq, index, total, tier, keys, digests, reservations, load = frame[:11]
            return cls(
                replica,
                epoch,
                seq,
                index,
                total,
                tier,
                keys,
                [(c, x) for c, x in digests],
                [(r, k) for r, k in reservations],
                Load.from_wire(load),
            )
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"bad SNAPSHOT frame: {error}") from None
