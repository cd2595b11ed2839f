"""``everwarm bench overhead``: what a step costs besides the model, with and without running one step ahead.

The best window is what an undisturbed core needs, and what is judged; on a shared core the median says how much other
work cost it.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.progress import steps
from replica.overhead import WINDOW, measure

GOAL_US = 300.0
"""CPU time per step, at GOAL_BATCH requests."""
GOAL_BATCH = 64
UNITS = {
    "best_us": "microseconds of the engine thread's CPU per step, best window",
    "median_us": "the same, median window",
    "tokens": "tokens that came out",
}


def run(batch_size: int, num_steps: int, console: Console) -> dict[str, Any]:
    """One measurement per scheduling mode; ``console`` gets the progress."""
    runs: dict[str, Any] = {}
    with steps(2, console) as announce:
        for ahead in (True, False):
            announce(f"{num_steps} steps at batch {batch_size}, async_scheduling={str(ahead).lower()}")
            name = "one step ahead" if ahead else "no step ahead"
            runs[name] = measure(batch_size=batch_size, num_steps=num_steps, async_scheduling=ahead)
    return {"batch_size": batch_size, "num_steps": num_steps, "window": WINDOW, "runs": runs}


def holds(figures: dict[str, Any]) -> bool:
    """The default mode keeps to the goal; larger batches than GOAL_BATCH have none."""
    return figures["batch_size"] > GOAL_BATCH or figures["runs"]["one step ahead"]["best_us"] <= GOAL_US


def show(figures: dict[str, Any], console: Console) -> None:
    title = f"CPU per step at batch {figures['batch_size']}, microseconds, windows of {figures['window']} steps"
    table = Table("scheduling", "best", "median", "goal", "tokens", title=title, title_justify="left")
    for name, run_ in figures["runs"].items():
        judged = name == "one step ahead" and figures["batch_size"] <= GOAL_BATCH
        goal = f"best <= {GOAL_US:.0f}" if judged else ""
        table.add_row(name, f"{run_['best_us']:.0f}", f"{run_['median_us']:.0f}", goal, str(run_["tokens"]))
    console.print(table)
