"""Measures the kernels on a GPU: whole decode steps, single kernels against their floors, and the tuning table.

    python -m kernels.bench step  --models 8b,0.6b --batches 1,32,64     # share of the bandwidth floor
    python -m kernels.bench table --models 8b --batches 1,16,64          # each kernel, its floor, the best alternative
    python -m kernels.bench prefill --models 8b                          # attention and gate-up of chunks
    python -m kernels.bench tune  --models 8b,0.6b --write kernels/tuning_h200.json

Weights and caches are random, buffers rotate beyond the L2 cache, every time is the median of CUDA-graph replays. The
floor of a step is (weights without the embedding table + KV) / 4.3 TB/s, that of a kernel its bytes over the same rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kernels import bench_prefill, bench_table, bench_tune
from kernels.bench_step import MODELS, Step, precompile, replay_us
from kernels.triton_ops import TritonOps
from kernels.tuning import TuningTable


def bench_steps(models: list[str], batches: list[int], context: int, table: TuningTable | None) -> dict[str, Any]:
    table = table or TuningTable.for_device(torch.cuda.get_device_name())
    precompile((m, b, context, table) for m in models for b in batches)
    rows: dict[str, Any] = {}
    for name in models:
        for batch in batches:
            step = Step(MODELS[name], batch, context)
            ops = TritonOps(torch.device("cuda"), table=table)
            ms = replay_us(lambda step=step, ops=ops: step(ops)) / 1e3  # type: ignore[misc]
            floor = step.floor_ms()
            ops.workspace.check_invariants()
            rows[f"{name} b{batch}"] = {
                "ms": ms,
                "floor_ms": floor,
                "share": floor / ms,
                "launches": ops.launch.launches,
            }
            print(f"{name:9s} batch {batch:3d} context {context}: {ms:7.3f} ms, floor {floor:6.3f} = {floor / ms:5.1%},"
                  f" {batch / ms * 1e3:7.0f} tokens/s")  # fmt: skip
            del step, ops
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "table", "prefill", "tune"])
    parser.add_argument("--models", default="8b,0.6b")
    parser.add_argument("--batches", default="1,32,64")
    parser.add_argument("--context", type=int, default=1152)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds that tune may measure")
    parser.add_argument("--write", type=Path, help="tune: where the table goes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.bench needs a CUDA device")
    torch.manual_seed(0)
    models, batches = args.models.split(","), [int(b) for b in args.batches.split(",")]
    for name in models:
        if name not in MODELS:
            sys.exit(f"--models: {name!r}; known are {', '.join(MODELS)}")
    if args.what == "step":
        rows = bench_steps(models, batches, args.context, None)
    elif args.what == "table":
        rows = bench_table.run(models, batches)
    elif args.what == "prefill":
        rows = bench_prefill.run(models)
    else:
        rows = bench_tune.run(models, batches, args.context, args.budget, args.write)
    result = {
        "bench": f"kernels {args.what}", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join(sys.argv), "rows": rows,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
