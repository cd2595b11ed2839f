"""``everwarm serve`` around a child that only talks: what is shown, and how it ends."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from cluster.environment import free_ports
from cluster.launch import Launch

SAYS = """
import sys, time
print("2026-11-29 18:52:23,466\\tINFO worker.py:2029 -- Started a local Ray instance.")
print("\\x1b[36m(ServeController pid=2520)\\x1b[0m INFO 2026-11-29 18:52:25,023 controller 2520 -- progress")
print("\\x1b[36m(ServeController pid=2520)\\x1b[0m WARNING 2026-11-29 18:52:25,023 controller 2520 -- slow disk")
bound = "Failed to start RequestProtocol.HTTP server on port 30000: Failed to bind to address '0.0.0.0:30000'.. "
print("\\x1b[36m(ServeReplica:default:Router pid=9)\\x1b[0m WARNING 2026-11-29 -- " + bound + "Retrying...")
print("ERROR Failed to start RequestProtocol.HTTP server: port already in use. Suggestion: another range")
print("ValueError: max_model_len: 9 is too much", flush=True)
"""
FAILS = (
    SAYS
    + """
print("ERROR 2026 controller 1 -- Failed to update the deployments ['Replica'].", flush=True)
time.sleep(600)
"""
)


class Talking(Launch):
    says = SAYS

    def command(self, root: Path) -> list[str]:
        return [sys.executable, "-c", self.says]


class Failing(Talking):
    says = FAILS


@pytest.mark.parametrize("verbose", [False, True])
def test_progress_is_hidden_and_trouble_shown(verbose: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert Talking([], port=free_ports(1)[0], haproxy=False, verbose=verbose).run() == 1
    shown = capfd.readouterr().err
    assert "slow disk" in shown and "max_model_len: 9 is too much" in shown and "ended by itself" in shown
    assert ("Started a local Ray instance" in shown) == ("progress" in shown) == ("Retrying" in shown) == verbose
    assert "another range" in shown


def test_an_app_that_can_not_be_deployed_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert Failing([], port=free_ports(1)[0], haproxy=False).run() == 1
    assert time.monotonic() - began < 30
    assert "can't serve this" in capfd.readouterr().err


def test_options_are_refused_before_anything_starts() -> None:
    from cluster.launch import Unusable

    with pytest.raises(Unusable, match="did you mean 'replicas'"):
        Launch(["replicsa=2"], port=free_ports(1)[0])
    for port in (0, -1, 70_000):
        with pytest.raises(Unusable, match=f"port {port} is none; 1 to 65535"):
            Launch([], port=port)
    for host, why in (
        ("nowhere.invalid", "--host nowhere.invalid: "),
        ("192.0.2.1", "cannot listen on 192.0.2.1, port"),
    ):
        with pytest.raises(Unusable, match=why):
            Launch([], host=host, port=free_ports(1)[0])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unusable, match=f"port {port} is taken"):
            Launch([], host="127.0.0.1", port=port)
    with pytest.raises(Unusable, match=r"scheduler: .*'static'; got 'fifo'\nreplicas: .*integer.*; got 'x'"):
        Launch(["replicas=x", "scheduler=fifo"], port=free_ports(1)[0])


@pytest.mark.parametrize(
    ("host", "url"),
    [(None, "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:"),
     ("::", "http://[::1]:"), ("::1", "http://[::1]:")],
)  # fmt: skip
def test_the_address_it_says(host: str | None, url: str) -> None:
    port = free_ports(1)[0]
    if host is not None and ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert Launch([], host=host, port=port).url == f"{url}{port}"
