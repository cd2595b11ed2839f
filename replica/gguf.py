"""GGUF files: metadata, tensor directory, and dequantization to float32.

Layout (little-endian): magic, version, counts, metadata pairs, tensor directory, padding to ``general.alignment``,
tensor data. Block formats are those of ggml: 32 weights share an fp16 scale ``d`` (and an fp16 minimum ``m``), and a
byte of 4-bit quants holds weight i in its low half and weight i + 16 in its high half.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.blocks import Blocks

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# fmt: off
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}
# fmt: on


class GGUFError(ValueError):
    """The file is no GGUF, is cut short, or holds something this reader does not support."""


def _f16(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes -> [blocks, 32] float32 in 0..15."""
    out = np.empty((len(qs), 32), np.float32)
    out[:, :16] = qs & 15
    out[:, 16:] = qs >> 4
    return out


def _q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 18)
    out = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _f16(blocks[:, :2])
    return out


def _q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 20)
    out = _nibbles(blocks[:, 4:])
    out *= _f16(blocks[:, :2])
    out += _f16(blocks[:, 2:4])
    return out


def _q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 34)
    out = blocks[:, 2:].view(np.int8).astype(np.float32)
    out *= _f16(blocks[:, :2])
    return out


def _bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _codes(qs: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes -> [blocks, 32] uint8 in 0..15."""
    return np.concatenate((qs & 15, qs >> 4), 1)


def _half(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16)


def _split_q4_0(raw: np.ndarray) -> _Split:
    blocks = raw.reshape(-1, 18)
    scale = _half(blocks[:, :2])
    return 4, _codes(blocks[:, 2:]), scale, scale * np.float16(-8)


def _split_q4_1(raw: np.ndarray) -> _Split:
    blocks = raw.reshape(-1, 20)
    return 4, _codes(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _split_q8_0(raw: np.ndarray) -> _Split:
    blocks = raw.reshape(-1, 34)
    return 8, np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks[:, :2]), None


_Split = tuple[int, np.ndarray, np.ndarray, np.ndarray | None]
"""bits, codes [blocks, 32], scale and least [blocks, 1]: the numbers of the blocks, not multiplied out."""


@dataclass(frozen=True)
class _Format:
    weights: int
    """Per block."""
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    split: Callable[[np.ndarray], _Split] | None = None


_FORMATS = {
    "F32": _Format(1, 4, lambda raw: raw.view("<f4").astype(np.float32)),
    "F16": _Format(1, 2, _f16),
    "BF16": _Format(1, 2, _bf16),
    "Q4_0": _Format(32, 18, _q4_0, _split_q4_0),
    "Q4_1": _Format(32, 20, _q4_1, _split_q4_1),
    "Q8_0": _Format(32, 34, _q8_0, _split_q8_0),
}
SUPPORTED = tuple(_FORMATS)


@dataclass(frozen=True)
class TensorInfo:
    """``shape`` in row-major order: [out, in] for a linear layer. ``offset`` is in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int

    @property
    def num_weights(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class GGUFFile:
    """A memory-mapped file. ``metadata``: key -> str, int, float, bool or a list of them; ``tensors``: by name."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo], data: np.ndarray) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    def load(self, name: str) -> np.ndarray:
        """The tensor as float32 in its shape, decoded as ggml defines it, in fp32 without fused multiply-add.

        Raises KeyError for an unknown name, GGUFError for a type other than SUPPORTED or data beyond the file's end.
        """
        info, form, raw = self._raw(name)
        return form.decode(raw).reshape(info.shape)

    def blocks(self, name: str) -> Blocks | None:
        """The codes and scales of a matrix of 4- or 8-bit blocks; None for another kind. Raises as ``load``."""
        info, form, raw = self._raw(name)
        if form.split is None or len(info.shape) != 2:
            return None
        out, wide = info.shape
        bits, codes, scale, least = form.split(raw)
        return Blocks(
            bits, codes.reshape(out, wide), scale.reshape(out, -1), None if least is None else least.reshape(out, -1)
        )

    def _raw(self, name: str) -> tuple[TensorInfo, _Format, np.ndarray]:
        info = self.tensors[name]
        form = _FORMATS.get(info.type)
        if form is None:
            raise GGUFError(
                f"{self.path.name}: tensor {name!r} has type {info.type}; supported are {', '.join(SUPPORTED)}"
            )
        if info.shape and info.shape[-1] % form.weights:
            raise GGUFError(
                f"{self.path.name}: tensor {name!r} has rows of {info.shape[-1]}; {info.type} needs a multiple of 32"
            )
        size = info.num_weights // form.weights * form.bytes
        raw = self._data[info.offset : info.offset + size]
        if len(raw) != size:
            raise GGUFError(f"{self.path.name}: the file ends inside tensor {name!r}")
        return info, form, raw


class _Cursor:
    """Reads scalars and strings off the map. Raises GGUFError past the end."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self._view: memoryview = data.data
        self._name = name
        self.at = 0

    def unpack(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        try:
            values = layout.unpack_from(self._view, self.at)
        except struct.error:
            raise GGUFError(f"{self._name}: the file ends inside its header") from None
        self.at += layout.size
        return values[0] if len(values) == 1 else values

    def take(self, size: int) -> memoryview:
        if size > len(self._view) - self.at:
            raise GGUFError(f"{self._name}: the file ends inside its header")
        self.at += size
        return self._view[self.at - size : self.at]

    def string(self) -> str:
        return str(self.take(self.unpack("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise GGUFError(f"{self._name}: metadata of unknown type {kind}")
        item, count = self.unpack("IQ")
        if item in _SCALARS:
            code = _SCALARS[item]
            dtype = np.dtype("<" + code)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return [self.value(item) for _ in range(count)]


def open(path: str | Path) -> GGUFFile:
    """Maps the file and reads its header. Raises OSError, or GGUFError for what is no GGUF of version 2 or 3."""
    path = Path(path)
    if path.stat().st_size < 24:
        raise GGUFError(f"{path.name}: no GGUF file (shorter than a header)")
    data = np.memmap(path, np.uint8, "r")
    cursor = _Cursor(data, path.name)
    if bytes(cursor.take(4)) != MAGIC:
        raise GGUFError(f"{path.name}: no GGUF file (magic bytes are missing)")
    version = cursor.unpack("I")
    if version not in VERSIONS:
        raise GGUFError(f"{path.name}: GGUF version {version}; 2 and 3 are supported")
    num_tensors, num_pairs = cursor.unpack("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I"))
    infos = [_tensor_info(cursor, path.name) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise GGUFError(f"{path.name}: general.alignment is {alignment!r}; a positive integer is needed")
    base = -(-cursor.at // alignment) * alignment
    tensors = {i.name: TensorInfo(i.name, i.shape, i.type, base + i.offset) for i in infos}
    return GGUFFile(path, metadata, tensors, data)


def _tensor_info(cursor: _Cursor, file: str) -> TensorInfo:
    name = cursor.string()
    num_dims = cursor.unpack("I")
    if num_dims > _MAX_DIMS:
        raise GGUFError(f"{file}: tensor {name!r} has {num_dims} dimensions; at most {_MAX_DIMS} are allowed")
    # The file lists dimensions fastest first.
    shape = tuple(cursor.unpack("Q") for _ in range(num_dims))[::-1]
    kind, offset = cursor.unpack("IQ")
    return TensorInfo(name, shape, _TYPE_NAMES.get(kind, f"unknown type {kind}"), offset)
