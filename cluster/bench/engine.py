"""``everwarm bench engine``: our engine and transformers' generate on the same weights, threads and prompts.

Cells: prefill of one prompt, then decoding at each batch size. Rounds alternate between the two, because a shared
machine drifts by more than what is to be measured; medians are compared. The engine runs whole (scheduler, page pool,
one-step-ahead loop, sampler), in process. Prompts are random, so prefill finds nothing in the cache; before a decode
cell its prompts are prefilled once, so that the sequences start together.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.bench.peer import as_transformers, generate
from cluster.checkpoint import locate
from replica import weights
from replica.config import DeviceFacts, EngineConfig, resolve
from replica.llm import LLM
from replica.runner import ModelRunner
from router.wire import Sampling

UNITS = {
    "prefill_tok_s": "prompt tokens per second until the first token, one prompt",
    "decode_tok_s": "output tokens per second while all sequences of the batch decode",
    "ratio": "ours / transformers, of medians",
    "same_tokens": "share of sequences whose greedy tokens are all equal",
}


@dataclass(frozen=True)
class Workload:
    """``model`` as in ``serve``; contexts in tokens; ``rounds`` of each cell."""

    model: str | None = None
    threads: int = 2
    prompt: int = 512
    context: int = 256
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: int = 32
    rounds: int = 3
    peer: bool = True
    seed: int = 0


def goal(cell: str) -> float | None:
    """Least ratio to transformers."""
    return {"prefill": 1.1, "decode_b1": 1.1, "decode_b8": 1.0}.get(cell)


def run(load: Workload, console: Console) -> dict[str, Any]:
    """Raises UnknownModel, CheckpointError, or ValueError for options that can't be resolved."""
    path = locate(load.model, weights=True).path
    before = torch.get_num_threads()
    torch.set_num_threads(load.threads)
    try:
        with console.status("loading the model twice ..."):
            engine = _open_engine(path, load)
            peer = as_transformers(path) if load.peer else None
        with engine, Progress(console=console, transient=True) as progress:
            return _measure(load, engine, peer, progress)
    finally:
        torch.set_num_threads(before)


def _open_engine(path: Path, load: Workload) -> LLM:
    """Default options, but a batch and a pool that hold the largest cell."""
    model = weights.read_config(path)
    longest = max(load.prompt + 1, load.context + load.tokens)
    if longest > model.max_position:
        raise ValueError(
            f"prompt + 1 or context + tokens: {longest} exceeds the model's {model.max_position} positions"
        )
    largest = max(load.batches)
    config = EngineConfig(
        threads=load.threads,
        max_batch_size=largest,
        max_num_pages=2 * largest * (longest // 16 + 2) + 64,
        max_model_len=min(model.max_position, longest + 16),
    )
    resolved = resolve(config, model.facts(4), DeviceFacts("cpu", load.threads))
    return LLM(resolved, ModelRunner.open(path, resolved))


def _measure(load: Workload, engine: LLM, peer: Any, progress: Progress) -> dict[str, Any]:
    vocab = engine.engine.runner.vocab_size
    rng = random.Random(load.seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]

    cells: dict[str, tuple[int, int, int]] = {"prefill": (1, load.prompt, 1)}
    cells |= {f"decode_b{b}": (b, load.context, load.tokens) for b in load.batches}
    task = progress.add_task("measuring", total=len(cells) * (load.rounds + 1))
    rates: dict[str, dict[str, list[float]]] = {name: {"ours": [], "transformers": []} for name in cells}
    same = total = 0
    for round_ in range(load.rounds + 1):
        for name, (batch, length, count) in cells.items():
            asked = prompts(batch, length)
            sides = ["ours", "transformers"] if peer is not None else ["ours"]
            ids: dict[str, list[list[int]]] = {}
            for side in sides if round_ % 2 else reversed(sides):
                rate, ids[side] = ours(engine, asked, count) if side == "ours" else theirs(peer, asked, count)
                if round_:  # the first round is a warm-up: first touches of memory, lazily made kernels
                    rates[name][side].append(rate)
            if peer is not None:
                same += sum(a == b for a, b in zip(ids["ours"], ids["transformers"], strict=True))
                total += batch
            progress.advance(task)
    return _figures(load, engine, rates, same / total if total else None)


def ours(engine: LLM, asked: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    """(tokens per second, ids): of the prompt when ``count`` is 1, else of the stretch in which all decode."""
    if count > 1:
        engine.generate(asked, Sampling(temperature=0, max_tokens=1))
    ids: list[list[int]] = [[] for _ in asked]
    stamps: list[list[float]] = [[] for _ in asked]
    started = time.perf_counter()
    for index, delta in engine.stream(asked, Sampling(temperature=0, max_tokens=count)):
        if delta.error:
            raise RuntimeError(f"sequence {index} failed: {delta.error}")
        ids[index] += delta.ids
        stamps[index] += [time.perf_counter()] * len(delta.ids)
    if count == 1:
        return len(asked[0]) / (stamps[0][0] - started), ids
    begin, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
    decoded = sum(begin < stamp <= end for s in stamps for stamp in s)
    return decoded / (end - begin), ids


def theirs(peer: Any, asked: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    out = generate(peer, asked, count)
    return (len(asked[0]) / out.first_s if count == 1 else len(asked) * out.steps_per_s), out.ids


def _figures(
    load: Workload, engine: LLM, rates: dict[str, dict[str, list[float]]], same: float | None
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "threads": load.threads,
        "prompt": load.prompt,
        "context": load.context,
        "tokens": load.tokens,
        "rounds": load.rounds,
        "same_tokens": same,
        "kernels": engine.engine.runner.describe()["kernels"],
        "cells": {},
    }
    for name, sides in rates.items():
        ours_rate = statistics.median(sides["ours"])
        cell: dict[str, Any] = {"ours_tok_s": round(ours_rate, 1), "ours_all": [round(r, 1) for r in sides["ours"]]}
        if sides["transformers"]:
            their_rate = statistics.median(sides["transformers"])
            cell["transformers_tok_s"] = round(their_rate, 1)
            cell["transformers_all"] = [round(r, 1) for r in sides["transformers"]]
            cell["ratio"] = round(ours_rate / their_rate, 3)
        figures["cells"][name] = cell
    return figures


def holds(figures: dict[str, Any]) -> bool:
    """Every goal is met; without the peer there is nothing to fall short of."""
    cells = figures["cells"].items()
    return all(cell["ratio"] >= (goal(name) or 0) for name, cell in cells if "ratio" in cell)


def show(figures: dict[str, Any], console: Console) -> None:
    title = f"{figures['threads']} threads, fp32; prefill {figures['prompt']}, decode from {figures['context']} tokens"
    table = Table("tokens per second", "ours", "transformers", "ratio", "goal", title=title, title_justify="left")
    for name, cell in figures["cells"].items():
        least = goal(name)
        table.add_row(
            name.replace("_b", ", batch "),
            f"{cell['ours_tok_s']:.0f}",
            f"{cell['transformers_tok_s']:.0f}" if "ratio" in cell else "-",
            f"{cell['ratio']:.2f}x" if "ratio" in cell else "-",
            f">= {least}x" if least else "",
        )
    console.print(table)
    if figures["same_tokens"] is not None:
        console.print(f"greedy tokens equal to transformers' in {figures['same_tokens']:.1%} of the sequences")
