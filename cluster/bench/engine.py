"""``everwarm bench engine``: our engine beside itself quantized, transformers' generate or llama.cpp, on a CPU, on the
same weights, threads and prompts.

Cells: prefill of one prompt, then decoding at each batch size. Rounds alternate between the sides, because a shared
machine drifts by more than what is to be measured; medians are compared. The engine runs whole (scheduler, page pool,
one-step-ahead loop, sampler), in process. Prompts are random. The prefill cell's are new in every round, so that it
finds nothing in a cache; a decode cell keeps its own, and they are prefilled beforehand where a side has a cache, so
that the sequences start together.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from cluster.bench.llama_cpp import XLlamaCpp
from cluster.bench.perplexity import WINDOW, perplexity, text_ids
from cluster.bench.progress import Announce, steps
from cluster.bench.sides import Ours, Room, Side, Transformers
from cluster.checkpoint import locate
from replica import weights

UNITS = {
    "prefill": "prompt tokens per second until the first token, one prompt",
    "decode_b*": "output tokens per second while all sequences of the batch decode",
    "ratios": "first / second, of medians",
    "same_tokens": "share of sequences whose greedy tokens all equal the first side's",
    "perplexity": "on the first perplexity_tokens of Python's language reference, windows of 512",
    "load_average": "of the machine over the last minute: before, after",
}
PEERS = ("auto", "transformers", "xllamacpp", "none")
QUANTIZATIONS = ("none", "w8a8")
GOALS: dict[str, dict[str, float]] = {
    "fp32/transformers": {"prefill": 1.1, "decode_b1": 1.1, "decode_b8": 1.0},
    "w8a8/fp32": {"prefill": 1.6, "decode_b8": 1.4},
    "w8a8/xllamacpp": {"prefill": 3.0, "decode_b8": 1.5, "decode_b16": 1.5, "decode_b32": 1.5},
    "fp32/xllamacpp": {},
    "w8a8/transformers": {},
}
"""Least ratio per pair and cell; no goal: only shown."""
MOST_PERPLEXITY = 1.1
"""Of a quantized side, relative to fp32."""
WARM_TOKENS = 4
"""Decoded per sequence in the round that is not counted: first touches of memory, lazily made kernels."""


@dataclass(frozen=True)
class Workload:
    """``model`` as in ``serve``; contexts in tokens; ``rounds`` of each cell, fewer when ``budget_s`` is used up."""

    model: str | None = None
    threads: int = 2
    prompt: int = 512
    context: int = 256
    batches: tuple[int, ...] = (1, 8)
    tokens: int = 32
    rounds: int = 3
    quantization: str = "none"
    """Also run our engine so, in the same rounds."""
    peer: str = "auto"
    """auto: transformers, or nobody when a quantization is compared."""
    perplexity_tokens: int = 5120
    """Scored by each side of ours when a quantization is compared; 0: none."""
    budget_s: float = 75.0
    """No counted round after the first begins that would probably end later than this after the start."""
    quick: bool = False
    """One round of small cells, and no goal is judged: a single round on a shared machine proves nothing."""
    seed: int = 0

    def cells(self) -> dict[str, tuple[int, int, int]]:
        """name -> (batch, tokens of each prompt, tokens to decode)."""
        decode = {f"decode_b{b}": (b, self.context, self.tokens) for b in self.batches}
        return {"prefill": (1, self.prompt, 1), **decode}


def quick(load: Workload) -> Workload:
    """The same load cut to a few seconds."""
    small = {"prompt": min(load.prompt, 256), "context": min(load.context, 64), "tokens": min(load.tokens, 12)}
    small["perplexity_tokens"] = min(load.perplexity_tokens, 512)
    return replace(load, **small, rounds=1, quick=True)  # type: ignore[arg-type]


def run(load: Workload, console: Console) -> dict[str, Any]:
    """``console`` gets the progress. Raises UnknownModel, CheckpointError, or ValueError for options that can't be
    resolved."""
    began = time.monotonic()
    before, busy = torch.get_num_threads(), os.getloadavg()[0]
    torch.set_num_threads(load.threads)
    try:
        with ExitStack() as stack:
            scored = 2 if load.quantization != "none" and load.perplexity_tokens else 0
            total = 1 + len(load.cells()) * (load.rounds + 1) + scored
            announce = stack.enter_context(steps(total, console))
            announce("loading the model, once per side")
            sides = _open(load, stack)
            losses = _perplexity(load, sides, announce)
            rates, same, rounds = _measure(load, sides, announce, began)
            described = {side.name: side.describe() for side in sides}
    finally:
        torch.set_num_threads(before)
    figures = _figures(load, rates, same, rounds) | losses
    return figures | {"sides": described, "load_average": [busy, os.getloadavg()[0]], "wall_s": _since(began)}


def _open(load: Workload, stack: ExitStack) -> list[Side]:
    path: Path = locate(load.model, weights=True).path
    for name, value, allowed in (("peer", load.peer, PEERS), ("quantization", load.quantization, QUANTIZATIONS)):
        if value not in allowed:
            raise ValueError(f"{name}: {value!r}; allowed are {', '.join(allowed)}")
    room = Room(max(load.batches), max(load.prompt + 1, load.context + load.tokens), load.threads)
    peer = ("transformers" if load.quantization == "none" else "none") if load.peer == "auto" else load.peer
    makers: list[Callable[[], Side]] = [lambda: Ours(path, room)]
    if load.quantization != "none":
        makers.append(lambda: Ours(path, room, load.quantization, quantization=load.quantization))
    if peer == "transformers":
        makers.append(lambda: Transformers(path))
    elif peer == "xllamacpp":
        makers.append(lambda: XLlamaCpp(path, room))
    sides = []
    for make in makers:
        sides.append(make())
        stack.callback(sides[-1].close)
    return sides


def _perplexity(load: Workload, sides: list[Side], announce: Announce) -> dict[str, Any]:
    """Of our sides, when there are two to compare."""
    ours = [side for side in sides if isinstance(side, Ours)]
    if len(ours) < 2 or not load.perplexity_tokens:
        return {}
    try:
        ids = text_ids(locate(load.model, weights=True), load.perplexity_tokens)
    except ValueError as error:
        return {"perplexity": None, "perplexity_missing": str(error)}
    found = {}
    for side in ours:
        announce(f"perplexity of {side.name} on {len(ids)} tokens")
        found[side.name] = round(perplexity(side.engine, ids, min(WINDOW, side.longest - 1)), 4)
    return {"perplexity": found, "perplexity_tokens": len(ids)}


def _measure(
    load: Workload, sides: list[Side], announce: Announce, began: float
) -> tuple[dict[str, dict[str, list[float]]], dict[str, float], int]:
    """(cell -> side -> rate of each counted round, side -> share of equal sequences, rounds counted)."""
    vocab = weights.read_config(locate(load.model, weights=True).path).vocab_size
    rates: dict[str, dict[str, list[float]]] = {name: {side.name: [] for side in sides} for name in load.cells()}
    equal: dict[str, list[bool]] = defaultdict(list)
    longest, round_ = 0.0, 0
    for round_ in range(load.rounds + 1):
        started = time.monotonic()
        if round_ > 1 and started - began + longest > load.budget_s:
            announce(f"the time budget of {load.budget_s:.0f} s ends the measurement after {round_ - 1} rounds")
            round_ -= 1
            break
        for name, (batch, length, count) in load.cells().items():
            announce(f"round {round_} of {load.rounds}, {name}" if round_ else f"warm-up, {name}")
            rng = random.Random(f"{load.seed} {name} {round_ if count == 1 else 0}")
            asked = [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]
            ids: dict[str, list[list[int]]] = {}
            for side in sides if round_ % 2 else reversed(sides):
                rate, ids[side.name] = side.run(asked, count if round_ else min(count, WARM_TOKENS))
                if round_:
                    rates[name][side.name].append(rate)
            for side in sides[1:]:
                if ids[side.name]:
                    equal[side.name] += [a == b for a, b in zip(ids[sides[0].name], ids[side.name], strict=True)]
        if round_:
            longest = max(longest, time.monotonic() - started)
    return rates, {name: sum(found) / len(found) for name, found in equal.items()}, round_


def _figures(
    load: Workload, rates: dict[str, dict[str, list[float]]], same: dict[str, float], rounds: int
) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, sides in rates.items():
        medians = {side: statistics.median(found) for side, found in sides.items()}
        cells[name] = {
            side: {"tok_s": round(medians[side], 1), "all": [round(rate, 1) for rate in found]}
            for side, found in sides.items()
        }
        cells[name]["ratios"] = {
            f"{a}/{b}": round(medians[a] / medians[b], 3) for a in medians for b in medians if f"{a}/{b}" in GOALS
        }
    chosen = ("threads", "prompt", "context", "tokens", "quick")
    return {name: getattr(load, name) for name in chosen} | {"rounds": rounds, "same_tokens": same, "cells": cells}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def holds(figures: dict[str, Any]) -> bool:
    """Every goal is met. Without a peer there is nothing to fall short of, and a quick run is not judged."""
    met = (
        ratio >= GOALS[pair].get(name, 0)
        for name, cell in figures["cells"].items()
        for pair, ratio in cell["ratios"].items()
    )
    scored = figures.get("perplexity") or {}
    exact = all(value <= MOST_PERPLEXITY * scored["fp32"] for value in scored.values())
    return bool(figures["quick"]) or (all(met) and exact)


def show(figures: dict[str, Any], console: Console) -> None:
    cells = figures["cells"]
    first = next(iter(cells.values()))
    names, pairs = [side for side in first if side != "ratios"], list(first["ratios"])
    pairs = [pair for pair in pairs if GOALS[pair]] or pairs
    title = (
        f"tokens per second, {figures['threads']} threads; prefill {figures['prompt']}, decode from "
        f"{figures['context']} tokens; medians of {figures['rounds']}"
    )
    columns = [Column(head, justify="right", no_wrap=True) for head in (*names, *pairs)]
    table = Table("", *columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, cell in cells.items():
        row = [f"{cell[side]['tok_s']:.0f}" for side in names]
        for pair in pairs:
            least = GOALS[pair].get(name)
            row.append(f"{cell['ratios'][pair]:.2f}x" + (f" (>= {least})" if least else ""))
        table.add_row(name.replace("_b", ", batch "), *row)
    console.print(table)
    for name, share in figures["same_tokens"].items():
        console.print(f"greedy tokens of {name} equal to {names[0]}'s in {share:.1%} of the sequences")
    if scored := figures.get("perplexity"):
        parts = [f"{name} {value:.3f} ({value / scored['fp32'] - 1:+.1%})" for name, value in scored.items()]
        limit = f"{MOST_PERPLEXITY - 1:.0%}"
        console.print(f"perplexity on {figures['perplexity_tokens']} tokens: {', '.join(parts)}; at most {limit} more")
    elif "perplexity_missing" in figures:
        console.print(f"no perplexity: {figures['perplexity_missing']}", markup=False)
