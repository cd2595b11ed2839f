"""Greedy search of the tuning table, measured on whole steps: what is fastest alone is not always fastest in a step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.bench_step import MODELS, Shape, Step, precompile, replay_us
from kernels.triton_ops import TritonOps
from kernels.tuning import GemmConfig, Role, TuningTable, bucket_of, fits

GEMV = [(1, 1024, 1), (2, 1024, 1), (4, 1024, 1), (8, 512, 1), (2, 2048, 1), (4, 1024, 4), (16, 512, 1), (16, 512, 4)]
DOT = [(32, 128, 4, False), (32, 128, 5, False), (32, 64, 6, False), (64, 64, 5, False), (64, 128, 3, True),
       (64, 64, 4, True), (128, 64, 4, True)]  # fmt: skip
PDL = [(False, 0), (True, 0), (True, 1), (True, 2)]


def candidates(role: Role, n: int, k: int, bucket: int, now: GemmConfig) -> Iterator[GemmConfig]:
    """Other tiles and splits, then other ways of overlapping with the neighbours."""
    if now.kind == "gemv":
        for bn, bk, stages in GEMV:
            if bk <= k and (role != "head" or bn >= 4):
                yield replace(now, bn=bn, bk=bk, stages=stages)
    elif now.kind == "dot":
        for bn, bk, stages, swap in DOT:
            for split in (1, 2, 4):
                programs = n // bn * split
                found = replace(now, bn=bn, bk=bk, stages=stages, swap=swap, split=split)
                if fits(found, n, k) and (100 <= programs <= 1300 or split == 1):
                    yield found


def run(models: list[str], batches: list[int], context: int, budget: float, write: Path | None) -> dict[str, Any]:
    device = torch.device("cuda")
    table = TuningTable.for_device(torch.cuda.get_device_name())
    table.device = torch.cuda.get_device_name()
    sites = {name: _sites(MODELS[name]) for name in models}
    trials: dict[tuple[str, int], list[tuple[str, GemmConfig]]] = {}
    for name in models:
        for batch in batches:
            found = []
            for role, n, k in sites[name]:
                now, _ = table.choose(role, n, k, batch)
                found += [(f"{role}:{n}x{k}", c) for c in candidates(role, n, k, bucket_of(batch), now) if c != now]
            trials[name, batch] = found
    precompile((m, b, context, _with(table, key, b, c)) for (m, b), found in trials.items() for key, c in found)
    rows: dict[str, Any] = {}
    started = time.perf_counter()
    for i, ((name, batch), found) in enumerate(trials.items()):
        step = Step(MODELS[name], batch, context)
        until = started + budget * (i + 1) / len(trials)

        def measure(t: TuningTable, step: Step = step) -> float:
            return replay_us(lambda: step(TritonOps(device, table=t)), repeats=7) / 1e3

        best = first = measure(table)
        settings = [(f"{r}:{n}x{k}", None) for r, n, k in sites[name]]
        for key, config in [*found, *settings]:
            now = table.choose(*_split(key), batch)[0]
            options = [config] if config else [replace(now, pdl=p, trigger=t) for p, t in PDL]
            for option in options:
                if time.perf_counter() > until:
                    break
                # The search carries PDL over from what is in force, which an earlier trial may have changed.
                option = replace(option, pdl=now.pdl, trigger=now.trigger) if config else option
                tried = _with(table, key, batch, option)
                ms = measure(tried)
                if ms < best * 0.998:
                    best, table, now = ms, tried, option
                    print(f"{name} b{batch} {key}: {ms:.3f} ms with {option}")
        rows[f"{name} b{batch}"] = {"before_ms": first, "ms": best, "share": step.floor_ms() / best}
        print(f"{name} batch {batch}: {first:.3f} -> {best:.3f} ms = {step.floor_ms() / best:.1%}")
        del step
        torch.cuda.empty_cache()
    if write:
        write.write_text(json.dumps(table.dump(), indent=1) + "\n")
    return rows


def _sites(s: Shape) -> list[tuple[Role, int, int]]:
    width = (s.heads + 2 * s.kv_heads) * s.dim
    return [("gate_up", s.inter, s.hidden), ("add", s.hidden, s.inter), ("qkv", width, s.hidden),
            ("add", s.hidden, s.heads * s.dim), ("head", s.vocab, s.hidden)]  # fmt: skip


def _split(key: str) -> tuple[Role, int, int]:
    role, size = key.split(":")
    n, k = size.split("x")
    return role, int(n), int(k)  # type: ignore[return-value]


def _with(table: TuningTable, key: str, batch: int, config: GemmConfig) -> TuningTable:
    gemm = {k: dict(rows) for k, rows in table.gemm.items()}
    gemm.setdefault(key, {})[bucket_of(batch)] = config
    return replace(table, gemm=gemm)
