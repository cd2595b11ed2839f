"""Frames of the token plane: kinds, length prefix, incremental decoder and the handshake's proof.

See :mod:`router.wire` for what the frames carry and :mod:`router.connection` for who sends which when.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
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


class ProtocolError(Exception):
    """A peer broke the protocol; the connection is closed."""


def encode(kind: Kind, *payload: Any) -> bytes:
    """One length-prefixed frame."""
    body = msgpack.packb([int(kind), *payload], use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames.

    ``max_frame`` may be raised between frames: an unauthenticated peer gets a small one.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._taken = 0
        """Bytes at the beginning whose frames were taken."""
        self.max_frame = max_frame

    def __len__(self) -> int:
        """Bytes of frames that were not taken, complete or not."""
        return len(self._buffer) - self._taken

    def append(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> list[Any] | None:
        """The next frame, None while it is not complete. Raises ProtocolError when it is over-long or undecodable."""
        buffer, start = self._buffer, self._taken
        held = len(buffer) - start - _LENGTH.size
        if held >= 0:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_frame:
                raise ProtocolError(f"frame of {length} bytes; at most {self.max_frame} are allowed")
            if held >= length:
                start += _LENGTH.size
                self._taken = start + length
                return _decode(bytes(memoryview(buffer)[start : start + length]))
        if start:
            del buffer[:start]
            self._taken = 0
        return None


def _decode(body: bytes) -> list[Any]:
    try:
        frame = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:
        raise ProtocolError(f"undecodable frame: {error}") from None
    if not isinstance(frame, list) or not frame or not isinstance(frame[0], int):
        raise ProtocolError("a frame must be an array that starts with its kind")
    return frame


def proof(secret: bytes, role: str, *nonces: bytes) -> bytes:
    """HMAC-SHA256 that shows knowledge of ``secret``; ``role`` keeps a peer from echoing our own proof back."""
    return hmac.new(secret, role.encode() + b"".join(nonces), "sha256").digest()
