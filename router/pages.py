"""Page identity: the hash chain that router, directory and engine share.

A *page* is ``page_size`` tokens of KV. Only full pages have an identity:

    root = H(len-prefixed: "ew1", model fp, tokenizer fp, kv dtype, page_size, adapter, tenant salt)
    h_i  = H(h_{i-1} || tokens of page i as little-endian u32)          H = BLAKE2b, 16 bytes

The engine trusts the full 16 bytes. The directory keys on :func:`key64`, the low 8: a collision there costs
one misrouted request, never a wrong token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

HASH_BYTES = 16
SCHEME = b"ew1"
_MASK64 = (1 << 64) - 1


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True)
class RootFields:
    """What two processes must agree on before their page hashes mean the same thing."""

    model: str
    tokenizer: str
    kv_dtype: str
    page_size: int

    def root(self, *, adapter: str = "", salt: str = "") -> bytes:
        """Root of a hash chain (16 bytes). Fields are length-prefixed, so no tenant can forge another's."""
        fields = (self.model, self.tokenizer, self.kv_dtype, str(self.page_size), adapter, salt)
        out = bytearray(SCHEME)
        for field in fields:
            raw = field.encode()
            out += len(raw).to_bytes(4, "little") + raw
        return _hash(bytes(out))


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32. Raises ValueError for an id outside [0, 2**32)."""
    try:
        packed = array("I", ids)
    except OverflowError as error:
        raise ValueError(f"token id outside [0, 2**32): {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of :func:`pack_tokens`. Raises ValueError when the length is no multiple of 4."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def ids_below(ids: Sequence[int], limit: int) -> bool:
    """Whether all ids are in [0, ``limit``), where ``limit`` is at most 2**32. Eight times as fast as a loop."""
    try:
        packed = pack_tokens(ids)
    except ValueError:
        return False
    return not packed or bool(np.frombuffer(packed, dtype="<u4").max() < limit)


def extend(parent: bytes, page_tokens: bytes) -> bytes:
    """Hash of the page whose packed tokens are ``page_tokens`` (4 * page_size bytes) and whose parent is given."""
    return _hash(parent + page_tokens)


def chain(root: bytes, packed_tokens: bytes, page_size: int, *, start: int = 0) -> list[bytes]:
    """Hashes of every full page in ``packed_tokens`` from page ``start`` on; ``root`` is the hash before it."""
    stride = 4 * page_size
    parent, hashes = root, []
    for end in range((start + 1) * stride, len(packed_tokens) + 1, stride):
        parent = _hash(parent + packed_tokens[end - stride : end])
        hashes.append(parent)
    return hashes


def key64(page_hash: bytes) -> int:
    """Directory key of a page: its low 8 bytes, little-endian."""
    return int.from_bytes(page_hash[:8], "little")


def keys64(page_hashes: Iterable[bytes]) -> list[int]:
    """:func:`key64` of each page, in order."""
    return unpack_keys(b"".join(page_hashes))[::2]


def pack_keys(keys: Sequence[int]) -> bytes:
    """Directory keys as little-endian u64."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(packed: bytes) -> list[int]:
    """Inverse of :func:`pack_keys`. Raises ValueError when the length is no multiple of 8."""
    keys = array("Q")
    keys.frombytes(packed)
    if sys.byteorder == "big":
        keys.byteswap()
    return keys.tolist()


def mix64(key: int) -> int:
    """Bijective mix of a key (splitmix64 finaliser, Steele et al. 2014), so that xor sums of keys don't cancel."""
    key = (key + 0x9E3779B97F4A7C15) & _MASK64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
    return key ^ (key >> 31)


_ADD, _MUL1, _MUL2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT1, _SHIFT2, _SHIFT3 = (np.uint64(n) for n in (30, 27, 31))


def mixed_xor(packed_keys: bytes) -> int:
    """xor of :func:`mix64` over packed u64 keys; vectorised, since both ends spend it on every stored page."""
    if len(packed_keys) < 128:
        xor = 0
        for key in unpack_keys(packed_keys):
            xor ^= mix64(key)
        return xor
    keys = np.frombuffer(packed_keys, dtype="<u8") + _ADD
    keys ^= keys >> _SHIFT1
    keys *= _MUL1
    keys ^= keys >> _SHIFT2
    keys *= _MUL2
    keys ^= keys >> _SHIFT3
    return int(np.bitwise_xor.reduce(keys))


@dataclass
class Digest:
    """Order-free summary of a set of keys: its size and the xor of its mixed keys."""

    count: int = 0
    xor: int = 0

    def add(self, key: int) -> None:
        self.count += 1
        self.xor ^= mix64(key)

    def remove(self, key: int) -> None:
        self.count -= 1
        self.xor ^= mix64(key)

    def add_packed(self, packed_keys: bytes) -> None:
        """Add distinct absent keys, packed as by :func:`pack_keys`."""
        self.count += len(packed_keys) // 8
        self.xor ^= mixed_xor(packed_keys)

    def remove_packed(self, packed_keys: bytes) -> None:
        """Remove distinct present keys, packed as by :func:`pack_keys`."""
        self.count -= len(packed_keys) // 8
        self.xor ^= mixed_xor(packed_keys)

    def as_pair(self) -> tuple[int, int]:
        return self.count, self.xor
