"""Compiles what ``TritonOps`` would launch on a Hopper GPU, on a machine without one, and reads the machine code.

Catches what the interpreter lets pass: types that don't unify, spills to local memory, weight loads two bytes wide,
products that miss the tensor cores."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels.tuning as tuning
from kernels.interface import AttentionMeta, AttentionShape, LayerKV, SharedSplits, Stream
from kernels.quantized_kv import SCALED, STORED, stored_dim
from kernels.triton_common import Launcher
from kernels.triton_ops import TritonOps
from kernels.tuning import TuningTable

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
META = torch.device("meta")
TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.int8: "i8",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@dataclass
class Compiled:
    registers: int
    stack: int
    sass: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))


def signature(kernel: Any, args: tuple[Any, ...]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and divisibility of a call, as Triton's own launcher derives them."""
    types, constants, attrs = {}, {}, {}
    for i, (param, arg) in enumerate(zip(kernel.params, args, strict=False)):
        if isinstance(arg, TensorDescriptor):
            types[param.name] = f"tensordesc<{TYPES[arg.base.dtype]}{list(arg.block_shape)}>"
        elif isinstance(arg, torch.Tensor):
            types[param.name] = "*" + TYPES[arg.dtype]
            if not param.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, float):
            types[param.name] = "fp32"
        elif arg == 1 and not param.do_not_specialize:
            types[param.name], constants[param.name] = "constexpr", 1
        else:
            types[param.name] = "i32"
            if arg % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attrs


class Recorder(Launcher):
    """Compiles each distinct launch for sm_90 instead of launching it."""

    def __init__(self) -> None:
        super().__init__(META)
        self.pdl_available = True
        self.seen: dict[str, Compiled] = {}

    def __call__(self, kernel: Any, grid: Any, *args: Any, pdl: bool = False, trigger: int | None = None,
                 **given: Any) -> None:  # fmt: skip
        assert all(0 < g < 2**31 for g in grid[:1]) and all(0 < g < 65536 for g in grid[1:]), grid
        options = {k: given.pop(k) for k in ("num_warps", "num_stages") if k in given}
        options["launch_pdl"] = pdl
        if trigger is not None:
            given["TRIGGER"] = trigger
        types, constants, attrs = signature(kernel, args)
        constants |= given | {"PDL": pdl}
        types |= dict.fromkeys(constants, "constexpr")
        types = {p.name: types[p.name] for p in kernel.params}
        key = repr((kernel.__name__, types, constants, sorted(attrs), options))
        if key not in self.seen:
            source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attrs)
            done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self.seen[key] = self.read(done.asm["cubin"])

    @staticmethod
    def read(cubin: bytes) -> Compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(cubin)
            f.flush()
            run = lambda *a: subprocess.run(a, capture_output=True, text=True, check=True).stdout  # noqa: E731
            usage = re.search(r"REG:(\d+) STACK:(\d+)", run(str(BIN / "cuobjdump"), "-res-usage", f.name))
            assert usage
            sass = run(str(BIN / "nvdisasm"), "-c", f.name)
        return Compiled(int(usage[1]), int(usage[2]), sass)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


@dataclass
class Model:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inter: int
    vocab: int
    qk_norm: bool


QWEN_8B = Model(4096, 32, 8, 128, 12288, 151936, True)
QWEN_06B = Model(1024, 16, 8, 128, 3072, 151936, True)
LLAMA_8B = Model(4096, 32, 8, 128, 14336, 128256, False)
SMOLLM = Model(576, 9, 3, 64, 1536, 49152, False)


def meta_of(new: list[int], lens: list[int], page: int, max_kv: int) -> AttentionMeta:
    m, r = sum(new), len(new)
    i32 = lambda *s: empty(*s, dtype=torch.int32)  # noqa: E731
    cu = [sum(new[:i]) for i in range(r + 1)]
    slots = empty(m, dtype=torch.int64)
    alone = max(new) == 1
    return AttentionMeta(
        i32(r + 1), i32(r), i32(r, max_kv // page), i32(m), slots, page, max(new), max_kv, alone, cu, lens
    )


def layer(ops: TritonOps, c: Model, new: list[int], page: int, max_kv: int) -> None:
    """One decoder layer, embedding and head, as the model calls them."""
    m = sum(new)
    width = (c.heads + 2 * c.kv_heads) * c.dim
    g, head_g = empty(c.hidden), empty(c.dim) if c.qk_norm else None
    kv = LayerKV(empty(64, page, c.kv_heads, c.dim), empty(64, page, c.kv_heads, c.dim))
    rope = empty(max_kv, c.dim // 2, dtype=torch.float32)
    shape = AttentionShape(c.heads, c.kv_heads, c.dim, 1e-6, c.dim**-0.5)
    x = ops.embed(empty(m, dtype=torch.int32), empty(c.vocab, c.hidden), g, 1e-6)
    qkv = ops.norm_linear(x, g, 1e-6, empty(width, c.hidden), None)
    out = ops.attention(qkv, kv, meta_of(new, [max_kv] * len(new), page, max_kv), shape, head_g, head_g, rope, rope)
    x = ops.linear_add(out, empty(c.hidden, c.heads * c.dim), x, g)
    y = ops.norm_mlp(x, g, 1e-6, empty(2 * c.inter, c.hidden))
    x = ops.linear_add(y, empty(c.hidden, c.inter), x, g)
    head = empty(c.vocab, c.hidden)
    rows = None if max(new) == 1 else empty(len(new), dtype=torch.int64)
    ops.norm_logits(x, rows, g, 1e-6, head)
    ops.norm_sample(Stream(x.h, x.scaled, x.sumsq, x.normed), rows, g, 1e-6, head)


CASES = [
    (QWEN_06B, [1], 64), (SMOLLM, [1] * 4, 16), (QWEN_8B, [300, 1, 1], 16), (QWEN_8B, [1100, 1], 16),
    (QWEN_8B, [1], 16), (QWEN_8B, [1] * 16, 16), (QWEN_8B, [1] * 64, 64), (QWEN_06B, [1] * 32, 16), (LLAMA_8B, [1], 16),
    (LLAMA_8B, [1] * 8, 16), (SMOLLM, [1], 16), (SMOLLM, [70, 1], 16),
]  # fmt: skip
PARAMS = [pytest.param(*case, marks=[] if i < 2 else [pytest.mark.slow]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("model", "new", "page"), PARAMS)
def test_sm90(model: Model, new: list[int], page: int) -> None:
    record = Recorder()
    table = TuningTable.load(Path(tuning.__file__).parent / "tuning_h200.json")
    ops = TritonOps(META, table=table, launch=record)
    layer(ops, model, new, page, 2048)
    assert len(record.seen) >= 5
    for key, code in record.seen.items():
        name = key.split("'")[1]
        assert code.stack == 0, f"{name} spills {code.stack} bytes: {key}"
        if name == "gemv_kernel":
            assert code.count(r"LDG[.\w]*\.128") and code.count(r"LDG[.\w]*\.U16") <= 2, f"narrow weight loads: {key}"
        if name in ("skinny_gemm_kernel", "prefill_attention_kernel", "decode_attention_kernel", "gated_gemm_kernel"):
            assert code.count(r"\bH?G?MMA|\bHMMA"), f"{name} misses the tensor cores: {key}"
        if name in ("skinny_gemm_kernel", "decode_attention_kernel", "prefill_attention_kernel"):
            assert code.count(r"LDGSTS[.\w]*\.128"), f"{name} does not copy 16 bytes at a time: {key}"
        if name == "skinny_gemm_kernel":
            assert code.count("LDGSTS") == code.count(r"LDGSTS[.\w]*\.128"), f"narrow weight loads: {key}"
        if name == "gated_gemm_kernel" or "'FRESH': True" in key:
            assert code.count("UTMALDG") and code.count("HGMMA"), key
        if name == "prefill_attention_kernel":
            # One wait for each run of products. ptxas puts one behind every product where it finds that registers are
            # touched while a product runs, which the overlap with the softmax makes likely.
            assert code.count("HGMMA") >= 4 * code.count(r"WARPGROUP\.DEPBAR"), f"products wait for each other: {key}"
        if "'PDL': True" in key:
            assert code.count("ACQBULK"), f"{name} is launched early and never waits: {key}"


def test_shared_splits_on_sm90() -> None:
    c, page, max_kv = QWEN_8B, 16, 5120
    record = Recorder()
    ops = TritonOps(META, launch=record)
    meta = meta_of([1] * 32, [2200] * 32, page, max_kv)
    shape = AttentionShape(c.heads, c.kv_heads, c.dim, 1e-6, c.dim**-0.5)
    meta.shared = SharedSplits(empty(256, 17, dtype=torch.int32), empty(32, dtype=torch.int32), 512)
    kv = LayerKV(empty(64, page, c.kv_heads, c.dim), empty(64, page, c.kv_heads, c.dim))
    rope, norm = empty(max_kv, c.dim // 2, dtype=torch.float32), empty(c.dim)
    ops.attention(empty(32, (c.heads + 2 * c.kv_heads) * c.dim), kv, meta, shape, norm, norm, rope, rope)
    names = {key.split("'")[1]: code for key, code in record.seen.items()}
    assert set(names) == {"shared_attention_kernel", "decode_attention_kernel", "combine_kernel"}
    assert all(code.stack == 0 for code in names.values())
    shared = names["shared_attention_kernel"]
    assert shared.count(r"\bHGMMA") and shared.count(r"LDGSTS[.\w]*\.128")


@pytest.mark.slow
@pytest.mark.parametrize("new", [[1] * 16, [300, 1, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", STORED)
def test_sm90_narrow_pages(name: str, new: list[int]) -> None:
    c, page, max_kv, record = QWEN_8B, 16, 2048, Recorder()
    ops = TritonOps(META, table=TuningTable.load(Path(tuning.__file__).parent / "tuning_h200.json"), launch=record)
    codes = [empty(64, page, c.kv_heads, stored_dim(name, c.dim), dtype=STORED[name]) for _ in range(2)]
    scales = [empty(64, page, c.kv_heads, dtype=torch.float32) if name in SCALED else None for _ in range(2)]
    rope, norm = empty(max_kv, c.dim // 2, dtype=torch.float32), empty(c.dim)
    shape = AttentionShape(c.heads, c.kv_heads, c.dim, 1e-6, c.dim**-0.5)
    meta = meta_of(new, [max_kv] * len(new), page, max_kv)
    qkv = empty(sum(new), (c.heads + 2 * c.kv_heads) * c.dim)
    ops.attention(qkv, LayerKV(*codes, *scales), meta, shape, norm, norm, rope, rope)
    found = {key.split("'")[1]: code for key, code in record.seen.items()}
    for kernel, code in found.items():
        assert code.stack == 0, f"{kernel} spills {code.stack} bytes"
    readers = [code for kernel, code in found.items() if "attention" in kernel]
    assert readers and all(code.count(r"\bH?G?MMA|\bHMMA") for code in readers), "no tensor cores"
    assert all(code.count(r"LDGSTS[.\w]*\.128") for code in readers), "pages are not copied 16 bytes at a time"
    if name == "fp8":
        assert any(code.count(r"F2FP[.\w]*SATFINITE") for code in found.values()), "large values must saturate"
