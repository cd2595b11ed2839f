"""The GGUF reader on files written here, against a scalar reading of the format's definition."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from replica import gguf

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30, "Q6_K": 14}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    assert isinstance(value, list)
    items = [_value(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def write_gguf(
    path: Path, metadata: dict[str, object], tensors: dict[str, tuple[tuple[int, ...], str, bytes]], *, version: int = 3
) -> Path:
    """tensors: name -> (row-major shape, type, data)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", TYPE_IDS[kind], len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _scalar_decode(kind: str, raw: bytes) -> list[np.float32]:
    """Weight by weight, in the words of the format."""
    f16 = lambda at: np.float32(np.frombuffer(raw, np.float16, 1, at)[0])  # noqa: E731
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    out = []
    for block in range(0, len(raw), size):
        for i in range(32):
            if kind == "Q8_0":
                quant = struct.unpack_from("b", raw, block + 2 + i)[0]
                out.append(np.float32(quant) * f16(block))
                continue
            at = block + (2 if kind == "Q4_0" else 4) + i % 16
            quant = raw[at] & 15 if i < 16 else raw[at] >> 4
            if kind == "Q4_0":
                out.append(np.float32(quant - 8) * f16(block))
            else:
                out.append(np.float32(quant) * f16(block) + f16(block + 2))
    return out


def _blocks(kind: str, count: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    out = b""
    for _ in range(count):
        scales = rng.normal(0, 0.1, 2 if kind == "Q4_1" else 1).astype(np.float16)
        out += scales.tobytes() + rng.integers(0, 256, 32 if kind == "Q8_0" else 16, np.uint8).tobytes()
    return out


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_block_formats_equal_a_scalar_decoder_bit_for_bit(tmp_path: Path, kind: str) -> None:
    raw = _blocks(kind, 3 * 4, seed=1)
    file = gguf.open(write_gguf(tmp_path / "m.gguf", {}, {"w": ((3, 128), kind, raw)}))
    got = file.load("w")
    assert got.shape == (3, 128) and got.dtype == np.float32
    assert np.array_equal(
        got.reshape(-1).view(np.int32), np.array(_scalar_decode(kind, raw), np.float32).view(np.int32)
    )


def test_plain_formats(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {
        "f32": ((2, 5), "F32", values.tobytes()),
        "f16": ((2, 5), "F16", values.astype(np.float16).tobytes()),
        "bf16": ((2, 5), "BF16", bf16.tobytes()),
    }
    file = gguf.open(write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert np.array_equal(file.load("f32"), values)
    assert np.array_equal(file.load("f16"), values.astype(np.float16).astype(np.float32))
    assert np.array_equal(file.load("bf16").view(np.uint32), bf16.astype(np.uint32).reshape(2, 5) << 16)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind(tmp_path: Path, version: int) -> None:
    metadata = {
        "general.architecture": "llama",
        "a.count": 7,
        "a.negative": -3,
        "a.flag": True,
        "a.rate": 0.5,
        "a.words": ["x", "", "größer"],
        "a.numbers": [1, 2, 3],
        "a.floats": [0.5, 2.0],
    }
    file = gguf.open(write_gguf(tmp_path / "m.gguf", metadata, {}, version=version))
    assert file.metadata == metadata


def test_tensor_directory_is_row_major(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32)
    file = gguf.open(write_gguf(tmp_path / "m.gguf", {"general.alignment": 32}, {"w": ((3, 2), "F32", data.tobytes())}))
    assert file.tensors["w"].shape == (3, 2)
    assert np.array_equal(file.load("w"), data.reshape(3, 2))


def test_an_unsupported_type_names_tensor_and_type(tmp_path: Path) -> None:
    file = gguf.open(write_gguf(tmp_path / "m.gguf", {}, {"blk.0.odd": ((256,), "Q6_K", bytes(210))}))
    with pytest.raises(gguf.GGUFError, match=r"'blk\.0\.odd' has type Q6_K; supported are F32"):
        file.load("blk.0.odd")


@pytest.mark.parametrize("keep", [3, 10, 40, 90, 170])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {"k": "v" * 40}, {"w": ((32,), "F32", bytes(128))}).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(gguf.GGUFError):
        gguf.open(tmp_path / "cut.gguf").load("w")


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(gguf.GGUFError, match="magic"):
        gguf.open(tmp_path / "x.gguf")
    write_gguf(tmp_path / "y.gguf", {}, {}, version=1)
    with pytest.raises(gguf.GGUFError, match="version 1"):
        gguf.open(tmp_path / "y.gguf")


def test_a_hostile_count_ends_in_an_error_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _string("k") + struct.pack("<IIQ", 9, 10, 1 << 60) + bytes(64)
    )
    with pytest.raises(gguf.GGUFError, match="ends inside"):
        gguf.open(path)
