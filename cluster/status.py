"""``everwarm status``: the cluster as one router sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.client import Unreachable, connect, get


def show_status(url: str, keys: Sequence[str], console: Console) -> dict[str, Any]:
    """Prints a table and returns what is in it. ``ready`` is False when no replica is admitted or nothing answers."""
    with connect(url, keys) as client:
        try:
            model = get(client, "/v1/models")["data"][0]
            engines = get(client, "/v1/engine")["data"]
            directory = get(client, "/v1/directory?top=10")
        except Unreachable as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return {"url": url, "ready": False, "error": str(error)}
    links = {link["replica"]: link for link in directory["replicas"]}
    replicas = [_replica(engine, links.get(engine["replica"], {})) for engine in engines]
    queries, hits = (sum(replica[name] for replica in replicas) for name in ("prompt_tokens_seen", "cached_tokens"))
    result = {
        "url": url,
        "ready": any(replica["state"] == "open" for replica in replicas),
        "model": model["id"],
        "max_model_len": model["max_model_len"],
        "router": directory["router"],
        "directory_in_sync": directory["in_sync"],
        "directory_pages": directory["pages"],
        "cached_share": round(hits / queries, 4) if queries else None,
        "replicas": replicas,
        "prefixes": directory["prefixes"],
    }
    _show(result, console)
    return result


def _replica(engine: dict[str, Any], link: dict[str, Any]) -> dict[str, Any]:
    """One row. An engine that did not answer in time has an ``error`` and zeros."""
    load, pages, counters = (engine.get(name, {}) for name in ("load", "pages", "counters"))
    return {
        "replica": engine["replica"],
        "state": engine["state"],
        "error": engine.get("error"),
        "address": link.get("address", ""),
        "pid": engine.get("pid"),
        "device": engine.get("runner", {}).get("device", ""),
        "running": load.get("running", 0),
        "waiting": engine.get("waiting", 0),
        "queue_ms": link.get("queue_ms", 0.0),
        "pages": pages,
        "step_p50_ms": round(engine.get("steps", {}).get("p50_ms", 0.0), 2),
        "prompt_tokens_seen": counters.get("prefix_queries", 0),
        "cached_tokens": counters.get("prefix_hits", 0),
        "generated_tokens": counters.get("generated_tokens", 0),
        "preemptions": counters.get("preemptions", 0),
        "drafted_tokens": counters.get("drafted_tokens", 0),
        "accepted_tokens": counters.get("accepted_tokens", 0),
    }


def _show(result: dict[str, Any], console: Console) -> None:
    sync = "in sync" if result["directory_in_sync"] else "[yellow]not in sync[/]"
    where = escape(f"{result['model']} at {result['url']}")
    title = f"{where}, directory of {result['directory_pages']} pages {sync}"
    columns = ("replica", "state", "run/wait", "pages: free, cached, held", "step ms", "generated")
    table = Table(*columns, title=title, title_justify="left")
    for replica in result["replicas"]:
        pages = ", ".join(str(replica["pages"].get(name, "?")) for name in ("free", "cached", "held"))
        state = replica["state"] if replica["error"] is None else f"[yellow]{escape(replica['error'])}[/]"
        load = f"{replica['running']}/{replica['waiting']}"
        numbers = (str(replica[name]) for name in ("step_p50_ms", "generated_tokens"))
        table.add_row(replica["replica"], state, load, pages, *numbers)
    console.print(table)
    if result["cached_share"] is not None:
        console.print(f"{result['cached_share']:.0%} of all prompt tokens came out of the prefix cache")
    if drafted := sum(replica["drafted_tokens"] for replica in result["replicas"]):
        accepted = sum(replica["accepted_tokens"] for replica in result["replicas"])
        console.print(f"{accepted / drafted:.0%} of {drafted} drafted tokens were accepted")
    for prefix in result["prefixes"][:5]:
        holders = ", ".join(prefix["holders"]) or "nobody now"
        console.print(
            f"[dim]{prefix['hash'][:12]}  {prefix['tokens']:6d} tokens, hot {prefix['hits']:g}, at {holders}[/]"
        )
    if not result["ready"]:
        console.print("[red]not ready[/]: no replica takes requests")
