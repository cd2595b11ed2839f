"""Which configuration each kernel runs with: a measured table for known chips, a rule for everything else.

The table (``tuning_*.json``) is written by ``python -m kernels.bench tune`` and read here. A key is
``role:NxK``; under it one entry per bucket of M, the number of tokens. ``choose`` never fails: a shape that is not
in the table gets the rule's answer, and the record says so.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

Role = Literal["qkv", "add", "gate_up", "head"]
"""qkv: input norm folded in. add: residual epilogue. gate_up: norm and SiLU x gate. head: norm, logits or argmax."""

BUCKETS = (1, 16, 32, 64, 128, 256)
"""Decode sizes share a configuration up to the next of these."""

UNSPLIT_PROGRAMS = 256
"""Programs of decode attention that fill the chip without splitting contexts."""


@dataclass(frozen=True)
class GemmConfig:
    """kind gemv: [bn, bk] register tile. dot: tensor cores, ``swap`` puts the weight on the 64-row operand, ``split``
    parts of K. blas: cuBLAS between our small kernels. gated: the persistent TMA kernel of prefill."""

    kind: Literal["gemv", "dot", "blas", "gated"]
    bn: int = 32
    bk: int = 128
    stages: int = 4
    warps: int = 4
    swap: bool = False
    split: int = 1
    pdl: bool = False
    trigger: int = 0


@dataclass(frozen=True)
class DecodeConfig:
    """Decode attention: ``split`` tokens of context per program (0: all of it), ``block`` tokens an iteration."""

    split: int
    block: int
    stages: int
    warps: int
    pdl: bool = False
    trigger: int = 0


@dataclass(frozen=True)
class PrefillConfig:
    """Prefill attention: ``rows`` = tokens x query heads of a group per program, ``block`` keys a step. ``fresh``: keys
    of the step itself come from the projection through the copy engine, not from pages; where that can be done.
    ``gather``: so do those of prefixes, copied next to each other first."""

    rows: int
    block: int
    stages: int
    warps: int
    fresh: bool = False
    gather: bool = False


Config = TypeVar("Config", GemmConfig, DecodeConfig)


def bucket_of(m: int) -> int:
    """The smallest bucket >= m; 0 when m is prefill-sized."""
    return next((b for b in BUCKETS if m <= b), 0)


def gemm_rule(role: Role, n: int, k: int, bucket: int) -> GemmConfig:
    """For shapes that were not measured. n = outputs (of the gate alone for gate_up)."""
    if bucket == 1:
        bn = 2 if n <= 4096 else 4
        return GemmConfig("gemv", bn=bn, bk=1024 if k >= 1024 else 512, stages=1, pdl=True, trigger=2)
    if bucket == 0 or bucket > 64:
        return GemmConfig("blas")
    large = n * k * 2 > 150e6
    bn, swap = (64, True) if large and n % 64 == 0 else (32, False)
    bk = next((b for b in (128, 64, 32) if k % b == 0), 16)
    split = 1
    while n // bn * split < 160 and k % (2 * split * bk) == 0 and k // (2 * split * bk) >= 2 and split < 8:
        split *= 2
    pdl = n * k * 2 < 20e6 or bucket > 16
    return GemmConfig("dot", bn=bn, bk=bk, swap=swap, split=split, pdl=pdl, trigger=0)


def fits(config: GemmConfig, n: int, k: int) -> bool:
    """Whether the kernel of this kind covers the shape (the tensor-core kernel has no masks along N and K)."""
    if config.kind == "dot":
        return n % config.bn == 0 and k % (config.split * config.bk) == 0 and config.bk >= 16
    if config.kind == "gated":
        return n % config.bn == 0 and k % config.bk == 0
    return True


@dataclass
class TuningTable:
    """``gemm``: key -> bucket -> GemmConfig; ``prefill``: tokens of a step, up to -> PrefillConfig (0: any)."""

    device: str = "rule"
    gemm: dict[str, dict[int, GemmConfig]] = field(default_factory=dict)
    prefill: dict[int, PrefillConfig] = field(default_factory=lambda: {0: PrefillConfig(64, 64, 3, 4)})
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def for_device(cls, name: str) -> TuningTable:
        """The shipped table whose ``device`` is contained in ``name`` (torch's device name), or an empty one."""
        for path in sorted(Path(__file__).parent.glob("tuning_*.json")):
            table = cls.load(path)
            if table.device in name:
                return table
        return cls()

    @classmethod
    def load(cls, path: Path) -> TuningTable:
        raw = json.loads(path.read_text())
        gemm = {key: {int(b): GemmConfig(**entry) for b, entry in rows.items()} for key, rows in raw["gemm"].items()}
        prefill = {int(m): PrefillConfig(**entry) for m, entry in raw["prefill"].items()}
        return cls(raw["device"], gemm, prefill, raw.get("notes", {}))

    def dump(self) -> dict[str, Any]:
        gemm = {k: {str(b): asdict(c) for b, c in rows.items()} for k, rows in self.gemm.items()}
        prefill = {str(m): asdict(c) for m, c in self.prefill.items()}
        return {"device": self.device, "notes": self.notes, "prefill": prefill, "gemm": gemm}

    def prefill_config(self, m: int) -> PrefillConfig:
        """Of a step with ``m`` tokens."""
        return self.prefill[min((b for b in self.prefill if m <= b), default=0)]

    def choose(self, role: Role, n: int, k: int, m: int) -> tuple[GemmConfig, str]:
        """Configuration of one product and where it came from ("table", "rule", or why cuBLAS)."""
        bucket = bucket_of(m)
        entry = self.gemm.get(f"{role}:{n}x{k}", {}).get(bucket)
        if entry is not None and fits(entry, n, k):
            return entry, "table"
        rule = gemm_rule(role, n, k, bucket)
        if not fits(rule, n, k):
            return GemmConfig("blas"), f"N={n} or K={k} is no multiple of the tile"
        return rule, "rule"


def decode_attention_config(
    batch: int, kv_heads: int, max_kv: int, deterministic: bool = False, uneven: bool = False
) -> DecodeConfig:
    """How decode attention is split over the chip.

    Throughput: about 640 programs in all; no split once batch x KV heads alone gives 256, unless the contexts are
    ``uneven``. One program needs about 20 ns per token of its context, so no split is longer than what the others take
    meanwhile. Deterministic: the split depends on nothing but the position in the context, so a row's result is the
    same alone and in a crowd."""
    if deterministic:
        return DecodeConfig(split=512, block=64, stages=3, warps=2)
    programs = batch * kv_heads
    if programs >= UNSPLIT_PROGRAMS and not uneven:
        block, warps = (64, 2) if programs >= 512 else (128, 4)
        return DecodeConfig(split=0, block=block, stages=3, warps=warps, pdl=True, trigger=0)
    split, longest = 128, longest_split(max_kv)
    while split < longest and split * 640 < programs * max_kv:
        split *= 2
    if programs <= 32:
        return DecodeConfig(split, block=128, stages=3, warps=4, pdl=True, trigger=1)
    if programs >= 128 and max_kv > 1280:
        return DecodeConfig(split, block=128, stages=3, warps=4, pdl=True, trigger=0)
    return DecodeConfig(split, block=64, stages=3, warps=2)


def longest_split(max_kv: int) -> int:
    """Tokens of a split where there are programs enough. Splits shared by requests have this length too."""
    return 512 if max_kv <= 5120 else 1024


def uneven_contexts(total: int, longest: int, kv_heads: int) -> bool:
    """Whether a batch with contexts of ``total`` tokens, the longest of ``longest``, needs a split even though there
    are programs enough. Unsplit, the kernel takes max(20 ns x longest, 0.11 ns x total x kv_heads); split, it takes the
    latter and about 4 us."""
    return kv_heads * total < 192 * (longest - 200)


def sharing_pays(saved: int, kv_heads: int) -> bool:
    """Whether a kernel for shared splits pays that spares reading ``saved`` tokens again: it costs about 12 us, a token
    0.11 ns a head."""
    return kv_heads * saved > 110_000


def without_pdl(config: Config) -> Config:
    return replace(config, pdl=False, trigger=0)
