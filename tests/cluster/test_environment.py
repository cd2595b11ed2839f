"""A run's environment and the processes that carry it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from cluster.environment import MARKER, cpu_seconds, end_processes, free_ports, processes, run_environment


def spawn(marker: str, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARKER: marker}, stdout=subprocess.PIPE)


def test_token_auth_is_on_and_leaves_the_home_alone() -> None:
    first = run_environment(Path("/tmp/a"), haproxy=False, base={})
    second = run_environment(Path("/tmp/a"), haproxy=False, base={})
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"] and first[MARKER] != second[MARKER]


def test_what_the_user_set_wins() -> None:
    base = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "10.0.0.1:6379", "RAY_SERVE_HAPROXY_STATS_PORT": "1"}
    result = run_environment(Path("/tmp/a"), haproxy=True, base=base)
    assert result.items() >= base.items() and "RAY_AUTH_TOKEN" not in result
    joined = run_environment(Path("/tmp/a"), haproxy=False, base={"RAY_ADDRESS": "10.0.0.1:6379"})
    assert "RAY_AUTH_MODE" not in joined, "a random token can't open a cluster that exists already"


def test_two_haproxy_runs_share_no_port_and_no_file() -> None:
    first, second = (run_environment(Path(f"/tmp/{n}"), haproxy=True, base={}) for n in "ab")
    own = [k for k in first if "HAPROXY" in k and k.endswith(("PORT", "LOC", "PATH", "FILE", "BASE"))]
    assert len(own) >= 7 and all(first[k] != second[k] for k in own)


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


def test_processes_are_found_by_marker_and_ended() -> None:
    marker = "test-" + os.urandom(6).hex()
    child = spawn(marker, "import time; print('up', flush=True); time.sleep(60)")
    stubborn = spawn(
        marker, "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    for process in (child, stubborn):
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert set(processes(marker)) == {child.pid, stubborn.pid}
    forced = end_processes(marker, grace_s=0)
    assert len(forced) == 2
    assert (child.wait(5), stubborn.wait(5)) == (-15, -9)
    assert processes(marker) == {} and end_processes(marker, grace_s=0) == []


def test_cpu_seconds_count_work_and_forget_the_dead() -> None:
    before = cpu_seconds(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert cpu_seconds(os.getpid()) - before >= 0.05
    assert cpu_seconds(2**22 + 1) == 0.0
