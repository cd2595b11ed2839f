"""The tables of ``everwarm verify``."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from cluster.verify import Difference, holds

MOST_FAILURES = 10


def show(figures: dict[str, Any], console: Console) -> None:
    """One row per option value, then what failed, the sampling options and the lossy ones."""
    console.print(
        f"{figures['model']} on {figures['device']}, {figures['dtype']}: {figures['num_cases']} combinations of exact "
        f"options ({figures['cases']}), {figures['requests']} requests each, against transformers",
        highlight=False,
    )
    console.print(_options(figures))
    console.print(
        "tokens: equal to transformers'; worst: difference of a log-probability; hits: prompt "
        "tokens found in the prefix cache; back: pages from the host; right/drafts: tokens guessed right, and guessed",
        highlight=False,
    )
    for verdict in [v for v in figures["verdicts"] if v["difference"]][:MOST_FAILURES]:
        where = Difference(**verdict["difference"])
        console.print(str(where), style="red", markup=False, highlight=False, soft_wrap=True)
    if figures["num_failed"] > MOST_FAILURES:
        console.print(f"... and {figures['num_failed'] - MOST_FAILURES} more combinations")
    if figures["own_worst"]:
        means = [verdict["mean"] for verdict in figures["verdicts"]]
        console.print(
            f"differences from float32: of transformers in {figures['dtype']} {figures['own_mean']:.1e} on average, "
            f"{figures['own_worst']:.1e} at most; of ours up to {max(means):.1e} on average",
            highlight=False,
        )
    if figures["lossy"]:
        console.print(_lossy(figures))
        console.print(
            "measured, not judged. top-1: our likeliest token is transformers'; KL: nats; free run: share "
            "of a greedy output before its first other token; alone = crowd: the same ids in both",
            highlight=False,
        )
    changed = sum(effect["changed"] for effect in figures["sampling"])
    console.print(f"sampling options that change the output: {changed} of {len(figures['sampling'])}", highlight=False)
    for reason in figures["unproven"]:
        console.print(f"not shown: {reason}", style="red", markup=False, highlight=False)
    for name, why in figures["left_out"].items():
        console.print(f"left out: {name}: {why}", markup=False, highlight=False)
    if ties := sum(verdict["ties"] for verdict in figures["verdicts"]):
        console.print(f"ties: {ties} sequences were compared up to a token of which transformers was undecided")
    if holds(figures):
        worst = max(verdict["worst"] for verdict in figures["verdicts"])
        said = f"all exact options agree with transformers (within {figures['tolerance']:.2g}; the worst {worst:.1e})"
        console.print(said, style="green", highlight=False)


def _options(figures: dict[str, Any]) -> Table:
    heads = ("cases", "fail", "tokens", "worst", "preempt", "hits", "back", "right/drafts")
    table = _table("exact option", *heads)
    defaults = {name: values[0].lower() for name, values in figures["axes"].items()}
    chosen = []
    for verdict in figures["verdicts"]:
        words = dict(part.split("=", 1) for part in verdict["case"].split(" ") if "=" in part)
        chosen.append((defaults | words, verdict))
    for name, values in figures["axes"].items():
        for value in values:
            of_value = [verdict for words, verdict in chosen if words[name] == value.lower()]
            counts = [sum(v["counters"].get(key, 0) for v in of_value) for key in _COUNTERS]
            table.add_row(
                f"{name}={value.lower()}", str(len(of_value)), str(sum(v["difference"] is not None for v in of_value)),
                str(sum(v["tokens"] for v in of_value)), f"{max((v['worst'] for v in of_value), default=0):.0e}",
                *map(str, counts[:3]), f"{counts[4]}/{counts[3]}",
            )  # fmt: skip
        table.add_section()
    return table


def _table(first: str, *rest: str) -> Table:
    columns = [Column(head, justify="right", no_wrap=True) for head in rest]
    table = Table(Column(first, no_wrap=True), *columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    return table


_COUNTERS = ("preemptions", "prefix_hits", "pages_restored", "drafted_tokens", "accepted_tokens")


def _lossy(figures: dict[str, Any]) -> Table:
    table = _table("lossy option", "top-1", "KL mean", "KL max", "free run", "alone = crowd")
    for loss in figures["lossy"]:
        if loss["refused"]:
            table.add_row(loss["option"], f"refused: {loss['refused']}")
            continue
        table.add_row(
            loss["option"], f"{loss['agreement']:.1%}", f"{loss['kl_mean']:.1e}", f"{loss['kl_max']:.1e}",
            f"{loss['same_tokens']:.1%}", "yes" if loss["alone_as_in_a_crowd"] else "no",
        )  # fmt: skip
    return table
