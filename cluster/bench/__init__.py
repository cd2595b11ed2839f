"""``everwarm bench``: measurements. Each prints a table and, as its last line on stdout, one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(help="Measure the engine or the serving path.", no_args_is_help=True, rich_markup_mode=None)


def report(figures: dict[str, Any], units: dict[str, str], json_path: Path | None = None) -> None:
    """Prints the result as one JSON line: figures, units, versions, command, machine. Also to ``json_path``."""
    names = ("ray", "torch", "transformers", "numpy")
    result = {
        "figures": figures,
        "units": units,
        "versions": {name: importlib.metadata.version(name) for name in names},
        "command": " ".join(["everwarm", *sys.argv[1:]]),
        "machine": {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version(), **_cpu_model()},
    }
    line = json.dumps(result)
    if json_path is not None:
        json_path.write_text(line + "\n")
    print(line, flush=True)


def _cpu_model() -> dict[str, str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return {"cpu": line.partition(":")[2].strip()}
    return {}


@app.command("serve", epilog="Example: everwarm bench serve --streams 32 --tokens 128 --json serve.json")
def bench_serve(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per stream.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often the streams are repeated.")] = 2,
    haproxy: Annotated[bool, typer.Option("--haproxy/--no-haproxy", help="HTTP edge.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
) -> None:
    """Server CPU per token, time to first token and chunk lateness against a stub engine. Exit 1: goals missed."""
    from cluster.bench import serve as bench

    console = Console()
    figures = bench.run(bench.Workload(streams=streams, tokens=tokens, rounds=rounds, haproxy=haproxy), console)
    bench.show(figures, console)
    report(figures, bench.UNITS, json_path)
    raise typer.Exit(0 if bench.holds(figures) else 1)
