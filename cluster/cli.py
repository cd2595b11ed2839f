"""The ``everwarm`` command. Exit codes: 0 holds, 1 falls short, 2 unusable arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster import bench
from cluster.launch import DEFAULT_PORT, Launch, Unusable

app = typer.Typer(
    name="everwarm",
    help="An LLM serving cluster on Ray Serve that behaves like one engine with one shared prefix cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")


def _http(url: str) -> str:
    from httpx import URL, InvalidURL

    try:
        sound = URL(url).scheme in ("http", "https") and URL(url).host
    except InvalidURL:
        sound = False
    if not sound:
        raise typer.BadParameter(f"{url!r}; a URL like http://127.0.0.1:{DEFAULT_PORT} is needed")
    return url


Url = Annotated[str, typer.Option(help="Base URL of the cluster.", callback=_http)]
ApiKey = Annotated[str | None, typer.Option(help="Default: the first key in EVERWARM_API_KEYS.")]


@app.command(epilog="Example: everwarm serve replicas=2 model=./my-model --port 9000")
def serve(
    options: Annotated[list[str] | None, typer.Argument(help="key=value options, as for `serve run`.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: Serve's.")] = None,
    port: Annotated[int, typer.Option(help="HTTP port.")] = DEFAULT_PORT,
    haproxy: Annotated[
        bool | None, typer.Option("--haproxy/--no-haproxy", help="Default: where its binary is present.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show Ray's and Serve's progress too.")] = False,
) -> None:
    """Run the cluster in the foreground until Ctrl-C."""
    raise typer.Exit(Launch(options or [], host, port, haproxy, verbose).run())


@app.command(epilog="Example: everwarm status --url http://127.0.0.1:8000")
def status(
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}", api_key: ApiKey = None, json_path: bench.JsonPath = None
) -> None:
    """Show replicas, their load and how much of the prompts came out of the prefix cache. Exit 1: not ready."""
    from cluster.client import api_keys
    from cluster.status import show_status

    result = show_status(url, [api_key] if api_key else api_keys(), Console())
    _write(result, json_path)
    raise typer.Exit(0 if result["ready"] else 1)


@app.command(epilog="Example: everwarm doctor --json report.json")
def doctor(json_path: bench.JsonPath = None) -> None:
    """Check this machine: packages, default model, HAProxy, ports, limits. Exit 1: something is missing."""
    from cluster.doctor import examine, show

    findings = examine()
    show(findings, Console())
    _write([finding.__dict__ for finding in findings], json_path)
    raise typer.Exit(1 if any(finding.state == "missing" for finding in findings) else 0)


@app.command(epilog='Example: everwarm chat --system "Answer in one sentence."')
def chat(
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
) -> None:
    """Talk to the cluster in this terminal; an empty line or Ctrl-D ends."""
    from cluster.chat import converse
    from cluster.client import api_keys

    keys = [api_key] if api_key else api_keys()
    raise typer.Exit(converse(url, keys, system, temperature, max_tokens, Console()))


VERIFY_WIDTH = 110
"""Columns of what verify writes to a file: rich would cut its tables at 80."""


@app.command(epilog="Example: everwarm verify --model ./my-model --quick --json verified.json")
def verify(
    model: Annotated[str | None, typer.Option(help="As in serve; none: the embedded default.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Cases that cover every pair of option values instead of all combinations.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; on a GPU also float16.")] = "float32",
    inject: Annotated[str | None, typer.Option(help="Plant a fault, token or rope: it must be found.")] = None,
    json_path: bench.JsonPath = None,
) -> None:
    """Hold the engine's options against plain transformers, on any model. Exit 1: an exact option differs."""
    from cluster.checkpoint import UnknownModel
    from cluster.verify import UNITS, holds, run
    from cluster.verify_report import show

    try:
        figures = run(model, Console(stderr=True), quick=quick, dtype=dtype, fault=inject)
    except (UnknownModel, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    show(figures, console if console.is_terminal else Console(width=VERIFY_WIDTH))
    bench.report(figures, UNITS, json_path)
    raise typer.Exit(0 if holds(figures) else 1)


def _write(result: Any, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Entry point; turns unusable arguments into one line and exit code 2."""
    try:
        app()
    except Unusable as error:
        print(f"everwarm: {error}", file=sys.stderr)
        sys.exit(2)
