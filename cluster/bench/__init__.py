"""``everwarm bench``: measurements. Each prints a table and, as its last line on stdout, one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def _writable(path: Path | None) -> Path | None:
    """Said before minutes of work, not after them."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path} can't be written")
    return path


JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file as JSON.", callback=_writable)
]

app = typer.Typer(help="Measure the engine or the serving path.", no_args_is_help=True, rich_markup_mode=None)


def report(figures: dict[str, Any], units: dict[str, str], json_path: Path | None = None) -> None:
    """Prints the result as one JSON line: figures, units, versions, command, machine. Also to ``json_path``."""
    program = ["everwarm", "bench"] if Path(sys.argv[0]).parent.name == "bench" else ["everwarm"]  # python -m, or not
    result = {
        "figures": figures,
        "units": units,
        "versions": dict(_versions("ray", "torch", "triton", "transformers", "numpy")),
        "command": " ".join([*program, *sys.argv[1:]]),
        "machine": {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version(), **_cpu_model()},
    }
    line = json.dumps(result)
    print(line, flush=True)
    if json_path is not None:
        json_path.write_text(line + "\n")


def _versions(*names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


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
    json_path: JsonPath = None,
) -> None:
    """Server CPU per token, time to first token and chunk lateness against a stub engine. Exit 1: goals missed."""
    from cluster.bench import serve as bench

    console = Console()
    figures = bench.run(bench.Workload(streams=streams, tokens=tokens, rounds=rounds, haproxy=haproxy), console)
    bench.show(figures, console)
    report(figures, bench.UNITS, json_path)
    raise typer.Exit(0 if bench.holds(figures) else 1)


@app.command("engine", epilog="Example: everwarm bench engine --quantization w8a8 --peer xllamacpp --json engine.json")
def bench_engine(
    model: Annotated[str | None, typer.Option(help="As in serve; none: the embedded default.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of each side.")] = 2,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prefill cell.")] = 512,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of the decode cells.")] = 256,
    batches: Annotated[str, typer.Option(help="Decode batch sizes, comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded per sequence.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are compared.")] = 3,
    quantization: Annotated[str, typer.Option(help="Also run our engine so: w8a8.")] = "none",
    peer: Annotated[str, typer.Option(help="transformers, xllamacpp (llama.cpp, GGUF only) or none.")] = "auto",
    perplexity_tokens: Annotated[int, typer.Option(min=0, help="Scored to compare a quantization; 0: none.")] = 5120,
    budget: Annotated[float, typer.Option(min=1, help="Seconds; rounds that would end later are left out.")] = 75.0,
    quick: Annotated[bool, typer.Option("--quick", help="One round of small cells; no goal is judged.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Our engine, quantized too, beside transformers or llama.cpp: same weights and prompts, on a CPU. Exit 1: goals
    missed."""
    from cluster.bench import engine as bench
    from cluster.checkpoint import UnknownModel

    sizes = [part.strip() for part in batches.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in sizes):
        raise typer.BadParameter(
            f"{batches!r}; positive numbers separated by commas are needed", param_hint="--batches"
        )
    load = bench.Workload(
        model, threads, prompt, context, tuple(int(part) for part in sizes), tokens, rounds, quantization, peer,
        perplexity_tokens, budget,
    )  # fmt: skip
    try:
        figures = bench.run(bench.quick(load) if quick else load, Console(stderr=True))
    except (UnknownModel, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        print(f"everwarm: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    bench.show(figures, Console())
    report(figures, bench.UNITS, json_path)
    raise typer.Exit(0 if bench.holds(figures) else 1)


@app.command("speculation", epilog="Example: everwarm bench speculation --rounds 3 --json speculation.json")
def bench_speculation(
    model: Annotated[str | None, typer.Option(help="As in serve; none: the embedded default.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 2,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens per answer at most.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of runs per task; medians of their ratios.")] = 6,
    budget: Annotated[float, typer.Option(min=1, help="Seconds; rounds that would end later are left out.")] = 60.0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Draft with so many first layers; none: prompt lookup.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Speculation on and off at batch 1 on a CPU, on rewriting and where nothing matches. Exit 1: goals missed."""
    from cluster.bench import speculation as bench

    way: dict[str, Any] = {"speculative": "draft", "options": (("speculative_layers", layers),)} if layers else {}
    try:
        figures = bench.run(bench.Workload(model, threads, tokens, rounds, budget, **way), Console(stderr=True))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    bench.show(figures, Console())
    report(figures, bench.UNITS, json_path)
    raise typer.Exit(0 if bench.holds(figures) else 1)


@app.command("article", epilog="Example: everwarm bench article --rows ladder --budget 120 --json article.json")
def bench_article(
    model: Annotated[str, typer.Option(help="small, or a shape of bench gpu; weights are random.")] = "small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads on a CPU.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Requests per row.")] = 192,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients with one request each.")] = 32,
    scale: Annotated[float, typer.Option(min=0.01, max=4, help="Times prompts of 128-4096 and answers of 128.")] = 0.25,
    shared: Annotated[float, typer.Option(min=0, max=1, help="Share of prompts with a common beginning.")] = 0.5,
    reservations: Annotated[int, typer.Option(min=1, help="Longest requests that the page pool holds.")] = 8,
    rows: Annotated[str, typer.Option(help="ladder, alone, prefill (GPU); several with commas.")] = "ladder,alone",
    rounds: Annotated[int, typer.Option(min=1, help="Passes over all rows; medians are reported.")] = 1,
    budget: Annotated[float, typer.Option(min=1, help="Seconds; rows that would end later are left out.")] = 120.0,
    json_path: JsonPath = None,
) -> None:
    """Paging, continuous batching, chunks, slipping in, prefix cache, fusion: each switch alone and one by one."""
    from cluster.bench import article as bench

    load = bench.Workload(
        model, device, threads, requests, concurrency, scale, shared, reservations, rows, rounds, budget
    )
    try:
        figures = bench.run(load, Console(stderr=True))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    bench.show(figures, Console(width=max(110, Console().width)))
    report(figures, bench.UNITS, json_path)


@app.command("overhead", epilog="Example: everwarm bench overhead --batch 64")
def bench_overhead(
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Decoding requests per step.")] = 64,
    steps: Annotated[int, typer.Option(min=120, help="Steps measured, in windows of 40.")] = 600,
    json_path: JsonPath = None,
) -> None:
    """CPU time of the engine's own thread per step, on a runner that computes nothing. Exit 1: over 300 us at 64."""
    from cluster.bench import overhead as bench

    figures = bench.run(batch, steps, Console(stderr=True))
    bench.show(figures, Console())
    report(figures, bench.UNITS, json_path)
    raise typer.Exit(0 if bench.holds(figures) else 1)


@app.command("gpu", epilog="Example: everwarm bench gpu --runs S:0,P:0,decode:32 --peer vllm --peer-path /opt/vllm")
def bench_gpu(
    shapes: Annotated[str, typer.Option(help="Model shapes, comma-separated; weights are random.")] = "qwen3-8b",
    runs: Annotated[
        str, typer.Option(help="S[:seed], P[:seed], decode:BATCH, open:RATE or open:PERCENT% of the peer's S.")
    ] = "S:0,open:50%,open:80%,P:0,decode:1,decode:32,decode:64",
    peer: Annotated[str | None, typer.Option(help="vllm, or none.")] = None,
    peer_path: Annotated[Path | None, typer.Option(help="Where the peer is installed, if not beside us.")] = None,
    options: Annotated[str, typer.Option(help="EngineConfig for our side, JSON.")] = "{}",
    peer_options: Annotated[str, typer.Option(help="Engine arguments of the peer, JSON.")] = "{}",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests of S, P and open.")] = None,
    draws: Annotated[
        int, typer.Option(min=1, max=10, help="Of S, P and open: with other lengths, ids and arrivals, summed up.")
    ] = 1,
    http: Annotated[bool, typer.Option("--http", help="Each engine behind its own server.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Our engine and a peer on this GPU, one after the other, same requests, random weights. Exit 1: goals missed."""
    from cluster.bench import gpu as bench

    try:
        load = bench.Workload.parse(shapes, runs, peer, peer_path, options, peer_options, limit, http, draws)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    try:
        figures = bench.run(load, console)
    except bench.SideFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    bench.show(figures, console)
    report(figures, bench.UNITS, json_path)
    raise typer.Exit(0 if bench.holds(figures) else 1)


@app.command("schedule", epilog="Example: everwarm bench schedule --options '{\"chunk_size\": 1024}' --draws 8")
def bench_schedule(
    shape: Annotated[str, typer.Option(help="As in bench gpu.")] = "qwen3-8b",
    runs: Annotated[
        str, typer.Option(help="S[:seed], P[:seed] or open:RATE, comma-separated.")
    ] = "S:0,open:13.5,open:21.7",
    options: Annotated[str, typer.Option(help="EngineConfig, JSON.")] = "{}",
    costs: Annotated[
        str, typer.Option(help="What steps take, JSON: decode, prefill, sizes; the defaults are of qwen3-8b.")
    ] = "{}",
    draws: Annotated[int, typer.Option(min=0, help="So many other draws of each load besides.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests of each load.")] = None,
    json_path: JsonPath = None,
) -> None:
    """The real scheduler and loop on a virtual clock, by what steps take on a GPU: TTFT and gaps without one."""
    from cluster.bench import schedule as bench

    try:
        figures = bench.run(bench.Workload.parse(shape, runs, options, costs, draws, limit))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    bench.show(figures, Console())
    report(figures, bench.UNITS, json_path)
