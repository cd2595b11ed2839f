"""The token plane's handshake, both ends, without I/O: who may speak, and do page hashes mean the same thing?

Each end is fed frames and answers with bytes to send; it ends in a :class:`Peer` or in a HandshakeError whose text
says what differs and is safe to send to the peer. Nothing about the model is told to a peer without the secret.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.pages import RootFields
from router.wire import VERSION, Kind, ProtocolError, encode, proof

NONCE_BYTES = 16
ROOT_FIELDS = ("model", "tokenizer", "kv_dtype", "page_size")


class HandshakeError(Exception):
    """Set-up was refused; retrying without a change is pointless."""


@dataclass(frozen=True)
class Peer:
    """The other end, authenticated. ``epoch``, ``root`` and ``limits`` are known of replicas only."""

    name: str
    epoch: int = 0
    root: RootFields | None = None
    limits: dict[str, int] = field(default_factory=dict)


def root_to_wire(root: RootFields) -> list[Any]:
    return [getattr(root, name) for name in ROOT_FIELDS]


def compare_roots(theirs: Sequence[Any], ours: Sequence[Any], who: tuple[str, str]) -> None:
    """Raises HandshakeError naming every field and both values where they differ; null fields match anything."""
    different = [
        f"{name}: {who[0]} has {their!r}, {who[1]} has {our!r}"
        for name, their, our in zip(ROOT_FIELDS, theirs, ours, strict=True)
        if their is not None and our is not None and their != our
    ]
    if different:
        raise HandshakeError("page hashes would not match: " + "; ".join(different))


def check_secret(secret: bytes) -> bytes:
    if len(secret) < 16:
        raise ValueError(f"token-plane secret of {len(secret)} bytes; at least 16 are needed")
    return secret


def _fields(frame: list[Any], kind: Kind, *types: type) -> list[Any]:
    if frame[0] == Kind.REFUSED and len(frame) > 1:
        raise HandshakeError(str(frame[1])[:2000])
    values = frame[1 : 1 + len(types)]
    if frame[0] != kind or len(values) != len(types):
        raise ProtocolError(f"expected {kind.name}, got kind {frame[0]} with {len(frame) - 1} fields")
    if not all(isinstance(value, wanted) for value, wanted in zip(values, types, strict=True)):
        raise ProtocolError(f"{kind.name} with wrong types")
    return values


def _check_version(version: int, who: str) -> None:
    if version != VERSION:
        raise HandshakeError(f"token-plane version: {who} speaks {version}, we speak {VERSION}")


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"nonce of {len(nonce)} bytes; {NONCE_BYTES} are needed")


class ReplicaHandshake:
    """The accepting end."""

    def __init__(self, secret: bytes, replica_id: str, epoch: int, root: RootFields, limits: dict[str, int]) -> None:
        self._secret = check_secret(secret)
        self._replica_id, self._epoch, self._root, self._limits = replica_id, epoch, root, limits
        self._nonce = os.urandom(NONCE_BYTES)

    def start(self) -> bytes:
        return encode(Kind.HELLO, VERSION, self._nonce)

    def on_frame(self, frame: list[Any]) -> tuple[bytes, Peer | None]:
        """Raises HandshakeError (to be sent as REFUSED) or ProtocolError."""
        version, router_id, nonce, shown, root = _fields(frame, Kind.AUTH, int, str, bytes, bytes, list)
        _check_nonce(nonce)
        if not hmac.compare_digest(shown, proof(self._secret, "router", self._nonce, nonce)):
            raise HandshakeError("wrong token-plane secret")
        _check_version(version, "the router")
        if len(root) != len(ROOT_FIELDS):
            raise ProtocolError("AUTH with a malformed root")
        ours = root_to_wire(self._root)
        compare_roots(root, ours, (f"router {router_id}", f"replica {self._replica_id}"))
        answer = proof(self._secret, "replica", nonce, self._nonce)
        welcome = encode(Kind.WELCOME, answer, self._replica_id, self._epoch, ours, self._limits)
        return welcome, Peer(router_id)


class RouterHandshake:
    """The connecting end. ``root``: what this router demands, null where only a replica knows."""

    def __init__(self, secret: bytes, router_id: str, root: Sequence[Any]) -> None:
        self._secret = check_secret(secret)
        self._router_id, self._root = router_id, list(root)
        self._nonce = os.urandom(NONCE_BYTES)
        self._server_nonce: bytes | None = None

    def start(self) -> bytes:
        return b""

    def on_frame(self, frame: list[Any]) -> tuple[bytes, Peer | None]:
        """Raises HandshakeError (the replica refused, or we refuse it) or ProtocolError."""
        if self._server_nonce is None:
            version, nonce = _fields(frame, Kind.HELLO, int, bytes)
            _check_version(version, "the replica")
            _check_nonce(nonce)
            self._server_nonce = nonce
            shown = proof(self._secret, "router", nonce, self._nonce)
            return encode(Kind.AUTH, VERSION, self._router_id, self._nonce, shown, self._root), None
        shown, replica_id, epoch, root, limits = _fields(frame, Kind.WELCOME, bytes, str, int, list, dict)
        if not hmac.compare_digest(shown, proof(self._secret, "replica", self._nonce, self._server_nonce)):
            raise HandshakeError("the replica does not know the token-plane secret")
        typed = len(root) == len(ROOT_FIELDS) and all(isinstance(part, str) for part in root[:3])
        if not typed or type(root[3]) is not int or root[3] <= 0 or not 0 <= epoch < 1 << 64:
            raise ProtocolError("WELCOME with a malformed root or epoch")
        if not all(isinstance(name, str) and type(value) is int for name, value in limits.items()):
            raise ProtocolError("WELCOME with malformed limits")
        compare_roots(root, self._root, (f"replica {replica_id}", f"router {self._router_id}"))
        return b"", Peer(replica_id, epoch, RootFields(*root), limits)
