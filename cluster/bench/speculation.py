"""``everwarm bench speculation``: the engine with speculation and without, at batch 1, in the same process.

Two tasks. In *rewrite* the model gives a text back with small changes, greedily, so that much of what it will say has
been said. In *free* it goes on from unrelated tokens, sampled at temperature 1, so that nothing matches: what
speculation costs when it is of no use. Both engines share the weights. Runs alternate and each is compared with its
neighbour in time, because a shared machine drifts by more than what is to be measured; medians of these ratios are
reported. Tokens must be equal.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cluster.bench.progress import Announce, steps
from cluster.checkpoint import load_card, locate
from replica import weights
from replica.config import DeviceFacts, EngineConfig, resolve
from replica.llm import LLM
from replica.runner import ModelRunner, choose_ops
from router.text.card import ModelCard
from router.text.chat import chat_template
from router.wire import Sampling

UNITS = {
    "tok_s": "output tokens per second from the first token to the last, median of all runs",
    "ratio": "with / without speculation, median over pairs of neighbouring runs",
    "cpu_ratio": "the same of tokens per CPU second, which other work on the machine disturbs less",
    "identical": "all token ids are equal",
    "tokens_per_step": "output tokens per forward pass, speculating",
    "accepted": "share of the drafted tokens that became output",
}
GOALS = {"rewrite": 1.6, "free": 0.97}
"""Least ratios for prompt lookup."""
TEXT = (
    "The harbour office opens at seven in the morning and closes at nine in the evening. Captain Miller keeps the log "
    "book in the second drawer of the oak desk, together with the keys of the three boats that lie at the long pier. "
    "Every boat that leaves the harbour is written down with its name, the number of people on board, and the hour at "
    "which it is expected back. When a boat is late by more than two hours, Captain Miller calls the coast guard and "
    "lights the lamp at the end of the pier. On Sundays the office is closed, and the log book is kept by the baker, "
    "who lives in the white house across the road and sees every boat from his kitchen window."
)
REWRITES = (
    "Write this text again with shorter sentences.",
    "Rewrite this text in the past tense.",
)
"""A small model makes changes at the first, and next to none at the second."""


@dataclass(frozen=True)
class Workload:
    """``model`` as in ``serve``. ``speculative`` and ``options``: EngineConfig fields of the speculating side."""

    model: str | None = None
    threads: int = 2
    tokens: int = 128
    rounds: int = 6
    budget_s: float = 60.0
    speculative: str = "ngram"
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Task:
    name: str
    prompts: list[list[int]]
    sampling: Sampling


@dataclass
class Run:
    """The answers to a task's prompts, one after the other: ids, and tokens per second after the first of each."""

    ids: list[int]
    rate: float
    cpu_s: float
    """Of the whole process, per token, prefill included."""


def run(load: Workload, console: Console) -> dict[str, Any]:
    """Raises UnknownModel, CheckpointError, or ValueError for options that can't be resolved."""
    checkpoint = locate(load.model, weights=True)
    tasks = make_tasks(load_card(checkpoint, ("bench",)), load)
    before = torch.get_num_threads()
    torch.set_num_threads(load.threads)
    try:
        sides = open_sides(checkpoint.path, load, max(len(prompt) for task in tasks for prompt in task.prompts))
        try:
            with steps(len(tasks) * (load.rounds + 1) * 2, console) as announce:
                return _measure(load, sides, tasks, announce)
        finally:
            for side in sides.values():
                side.close()
    finally:
        torch.set_num_threads(before)


def make_tasks(card: ModelCard, load: Workload) -> list[Task]:
    """Raises ValueError for a model without a chat template."""
    template = chat_template(card.tokenizer)
    if template is None:
        raise ValueError(f"model: {card.name!r} has no chat template, which the rewriting task needs")
    questions = [[{"role": "user", "content": f"{rewrite}\n\n{TEXT}"}] for rewrite in REWRITES]
    texts = [template.render(question, add_generation_prompt=True) for question in questions]
    rewriting = [card.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rng = random.Random(load.seed)
    words = [i for i, raw in enumerate(card.tokenizer.token_bytes) if raw.isascii() and raw.strip().isalpha()]
    unrelated = rng.sample(words, min(64, len(words)))
    greedy = Sampling(temperature=0, max_tokens=load.tokens, stop_token_ids=card.eos_token_ids)
    return [
        Task("rewrite", rewriting, greedy),
        Task("free", [unrelated], Sampling(temperature=1.0, seed=load.seed, max_tokens=load.tokens)),
    ]


def open_sides(path: Path, load: Workload, longest: int) -> dict[str, LLM]:
    """ "off" and "on", over the same weights."""
    shape = weights.read_config(path)
    room = longest + load.tokens + 16
    if room > shape.max_position:
        raise ValueError(f"tokens: {load.tokens} after {longest} exceed the model's {shape.max_position} positions")
    base: dict[str, Any] = {"threads": load.threads, "device": "cpu", "max_batch_size": 4, "max_model_len": room}
    base["max_num_pages"] = 4 * (room // 16 + 2)
    ways = {"off": EngineConfig(**base)}
    ways["on"] = EngineConfig(**base, speculative=load.speculative, **dict(load.options))
    resolved = {name: resolve(way, shape.facts(4), DeviceFacts("cpu", load.threads)) for name, way in ways.items()}
    ops = choose_ops(shape, resolved["off"])
    model, loaded = weights.load(path, torch.float32, "cpu", prepare=ops.prepare)
    return {name: LLM(config, ModelRunner(model, loaded, config, ops)) for name, config in resolved.items()}


def _measure(load: Workload, sides: dict[str, LLM], tasks: list[Task], announce: Announce) -> dict[str, Any]:
    runs: dict[str, dict[str, list[Run]]] = {task.name: {"off": [], "on": []} for task in tasks}
    speculated: dict[str, dict[str, int]] = {}
    began, done = time.monotonic(), 0
    for round_ in range(load.rounds + 1):  # the first one warms up: first touches of memory, prompts into the cache
        for task in tasks:
            before = _counters(sides["on"])
            for name in ("off", "on") if round_ % 2 else ("on", "off"):
                announce(f"{task.name}, speculation {name}, {'round ' + str(round_) if round_ else 'warm-up'}")
                one = answer(sides[name], _short(task) if round_ == 0 else task)
                if round_:
                    runs[task.name][name].append(one)
            if round_:
                speculated[task.name] = {key: n - before[key] for key, n in _counters(sides["on"]).items()}
        done += 1
        if done > 1 and (time.monotonic() - began) * (done + 1) / done > load.budget_s:
            break
    cells = {name: _cell(sides_, speculated[name]) for name, sides_ in runs.items()}
    return {
        "speculative": load.speculative,
        "options": dict(load.options),
        "threads": load.threads,
        "rounds": done - 1,
        "cells": cells,
    }


def _short(task: Task) -> Task:
    return replace(task, sampling=replace(task.sampling, max_tokens=24))


def answer(side: LLM, task: Task) -> Run:
    """Raises RuntimeError for a request that failed."""
    ids: list[int] = []
    count, seconds, cpu = 0, 0.0, time.process_time()
    for prompt in task.prompts:
        began = now = None
        for _, delta in side.stream([prompt], task.sampling):
            if delta.error:
                raise RuntimeError(f"{task.name} failed: {delta.error}")
            now = time.perf_counter()
            if began is None:
                began = now
            else:
                count += len(delta.ids)
            ids += delta.ids
        if now is not None and began is not None:
            seconds += now - began
    return Run(ids, count / max(seconds, 1e-9), (time.process_time() - cpu) / len(ids))


def _counters(side: LLM) -> dict[str, int]:
    info = side.engine.info()
    names = ("drafted_tokens", "accepted_tokens", "generated_tokens")
    return {"steps": info["steps"]["count"], **{name: info["counters"][name] for name in names}}


def _cell(runs: dict[str, list[Run]], spent: dict[str, int]) -> dict[str, Any]:
    off, on = runs["off"], runs["on"]
    pairs = [b.rate / a.rate for a, b in zip(off, on, strict=True)]
    return {
        "tokens": len(off[0].ids),
        "off_tok_s": round(statistics.median(r.rate for r in off), 2),
        "on_tok_s": round(statistics.median(r.rate for r in on), 2),
        "ratio": round(statistics.median(pairs), 3),
        "ratios": [round(pair, 3) for pair in pairs],
        "cpu_ratio": round(statistics.median(a.cpu_s / b.cpu_s for a, b in zip(off, on, strict=True)), 3),
        "identical": all(run_.ids == off[0].ids for run_ in (*off, *on)),
        "tokens_per_step": round(spent["generated_tokens"] / spent["steps"], 2),
        "drafted": spent["drafted_tokens"],
        "accepted": round(spent["accepted_tokens"] / max(1, spent["drafted_tokens"]), 3),
    }


def holds(figures: dict[str, Any]) -> bool:
    """Equal tokens always; the ratios for prompt lookup, whose goals they are."""
    cells = figures["cells"]
    judged = GOALS if figures["speculative"] == "ngram" else {}
    return all(cell["identical"] for cell in cells.values()) and all(
        cells[name]["ratio"] >= least for name, least in judged.items()
    )


def show(figures: dict[str, Any], console: Console) -> None:
    way = ", ".join([figures["speculative"], *(f"{key}={value}" for key, value in figures["options"].items())])
    title = f"speculation ({way}), batch 1, {figures['threads']} threads, fp32, {figures['rounds']} rounds"
    columns = ("task", "off tok/s", "on", "ratio", "of CPU", "per step", "accepted", "same ids")
    table = Table(*columns, title=title, title_justify="left")
    for name, cell in figures["cells"].items():
        accepted = f"{cell['accepted']:.0%} of {cell['drafted']}" if cell["drafted"] else "-"
        table.add_row(
            name, f"{cell['off_tok_s']:.1f}", f"{cell['on_tok_s']:.1f}", f"{cell['ratio']:.2f}x",
            f"{cell['cpu_ratio']:.2f}x", f"{cell['tokens_per_step']:.2f}", accepted,
            "yes" if cell["identical"] else "[red]no[/]",
        )  # fmt: skip
    console.print(table)
    if figures["speculative"] == "ngram":
        console.print("goals: " + ", ".join(f"{name} >= {least}x" for name, least in GOALS.items()))
