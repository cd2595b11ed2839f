"""Pods without Kubernetes: each Ray node in its own network, mount and process namespace, as the chart describes it.

A node gets an address on a private bridge, a read-only root with the chart's emptyDir volumes as tmpfs, an arbitrary
uid, the rendered environment and the `ray start` command that KubeRay would generate. Needs root.
"""

from __future__ import annotations

import os
import secrets as random_secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chart import ROOT

UID = 10_123
CODE = "/media"
"""Where the pods see the packages, copied once: what is edited meanwhile must not reach half of a cluster."""
PACKAGES = ("cluster", "kernels", "replica", "router")
BOOLEAN_VALUES = ("true", "false")


def sh(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=60)


def why_not() -> str | None:
    """Why this machine can't run the harness, None when it can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for program in ("ip", "unshare", "setpriv", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"ewprobe{os.getpid()}"
    try:
        sh("ip", "netns", "add", name)
        sh("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def environment(container: dict[str, Any], extra: dict[str, str]) -> dict[str, str]:
    """The container's `env`; every reference to a Secret must be in ``extra`` under the variable's name."""
    plain = {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}
    referred = {e["name"] for e in container.get("env", []) if "valueFrom" in e}
    assert referred <= set(extra), f"no value for {sorted(referred - set(extra))}"
    return plain | extra


def ray_start(params: dict[str, str], container: dict[str, Any], head: str | None) -> list[str]:
    """KubeRay's rules: defaults, CPUs from limits or else requests, memory from limits, bare switches."""
    full = {"metrics-export-port": "8080", "block": "true", "dashboard-agent-listen-port": "52365"} | params
    resources = container.get("resources", {})
    cpu = resources.get("limits", {}).get("cpu") or resources.get("requests", {}).get("cpu")
    if "num-cpus" not in full and cpu:
        full["num-cpus"] = str(int(cpu))
    if head is not None:
        full.setdefault("address", head)
    flags = []
    for name, value in sorted(full.items()):
        if value.lower() not in BOOLEAN_VALUES:
            flags += shlex.split(f"--{name}={value}")
        elif value.lower() == "true":
            flags.append(f"--{name}")
    return ["ray", "start", *(["--head"] if head is None else []), *flags]


@dataclass
class Node:
    name: str
    address: str
    namespace: str
    cable: str
    process: subprocess.Popen[bytes]
    log: Path
    environ: dict[str, str]

    @property
    def init(self) -> int:
        """Pid (outside) of the process that is pid 1 inside."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """What `kubectl exec` does: a command in the node's namespaces, as its user, with its environment."""
        enter = ["nsenter", "--target", str(self.init), "--all", *_as_user(), "env", "-i", *_assignments(self.environ)]
        return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=timeout)

    def terminate(self) -> None:
        """SIGTERM to pid 1, as the kubelet does."""
        os.kill(self.init, signal.SIGTERM)

    def cut(self) -> None:
        """Pull the cable: no packet leaves any more, so no peer hears of what follows."""
        sh("ip", "link", "set", self.cable, "down")

    def kill(self) -> None:
        """SIGKILL to pid 1 inside, with which the kernel ends everything in its process namespace."""
        with suppress(OSError, IndexError):
            os.kill(self.init, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _as_user() -> list[str]:
    # A change of credentials clears the parent-death signal that unshare has set, so it is set again.
    switches = ["--regid=0", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--pdeathsig=KILL"]
    return ["setpriv", f"--reuid={UID}", *switches]


def _assignments(environ: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environ.items()]


def _closed_ancestor(path: Path) -> Path | None:
    """The topmost folder above ``path`` that other users can't enter."""
    return next((p for p in reversed(path.parents) if not p.stat().st_mode & 0o001), None)


def _pod_root(folder: Path, mounts: dict[str, Path]) -> str:
    """Shell that makes this mount namespace look like a pod: everything read-only but the declared volumes."""
    volume = f"mount -t tmpfs -o size=4g,uid={UID},mode=1777 tmpfs"
    steps = ["mount --make-rprivate /"]
    # The interpreter may live in root's home, which the pod's user can't enter: show just that part of it.
    for path in dict.fromkeys((Path(sys.base_prefix).resolve(), ROOT)):
        if closed := _closed_ancestor(path):
            steps += [
                f"mount --bind {path} {folder}/stage",
                f"mount -t tmpfs -o mode=755 tmpfs {closed}",
                f"mkdir -p {path}",
                f"mount --bind {folder}/stage {path}",
                f"umount {folder}/stage",
                f"mount -o bind,remount,ro {path}",
                f"mount -o remount,ro {closed}",
            ]
    steps += [f"mount --bind {folder}/etc /etc", "mount -o bind,remount,ro /etc"]
    for inside, outside in mounts.items():
        steps += [f"mount --bind {outside} {inside}", f"mount -o bind,remount,ro {inside}"]
    steps += [f"{volume} /dev/shm", f"{volume} /tmp", "mkdir -m 1777 /tmp/ray", "mount -o bind,remount,ro /"]
    return " && ".join(steps)


@dataclass
class Pods:
    """A cluster of such nodes. ``octet`` picks the private network 10.``octet``.0.0/24."""

    octet: int = 83
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ewpods")))
    nodes: dict[str, Node] = field(default_factory=dict)
    mounts: dict[str, Path] = field(default_factory=dict)
    """Folder inside (which must exist on this machine) -> folder outside, for read-only volumes."""

    def __post_init__(self) -> None:
        self.tag = random_secrets.token_hex(2)
        self.bridge = f"ewb{self.tag}"
        self.folder.chmod(0o755)
        (self.folder / "stage").mkdir()
        shutil.copytree("/etc", self.folder / "etc", symlinks=True)
        for package in PACKAGES:
            shutil.copytree(
                ROOT / package, self.folder / "code" / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        self.mounts = {CODE: self.folder / "code"} | self.mounts
        secret = self.folder / "etc" / "everwarm" / "secrets" / "token-plane"
        secret.parent.mkdir(parents=True)
        secret.write_text(random_secrets.token_hex(32))
        sh("ip", "link", "add", self.bridge, "type", "bridge")
        sh("ip", "addr", "add", f"10.{self.octet}.0.254/24", "dev", self.bridge)
        sh("ip", "link", "set", self.bridge, "up")
        self._next = 1

    def start(
        self, name: str, params: dict[str, str], container: dict[str, Any], extra: dict[str, str], head: str | None
    ) -> Node:
        """A node that runs `ray start --block` as pid 1's child shell would."""
        address = f"10.{self.octet}.0.{self._next}"
        self._next += 1
        namespace, cable = f"ew{self.tag}{self._next}", f"ewv{self.tag}{self._next}"
        sh("ip", "netns", "add", namespace)
        sh("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        sh("ip", "link", "set", cable, "master", self.bridge, "up")
        sh("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        sh("ip", "-n", namespace, "link", "set", "eth0", "up")
        sh("ip", "-n", namespace, "link", "set", "lo", "up")
        sh("ip", "-n", namespace, "route", "add", "default", "via", f"10.{self.octet}.0.254")
        environ = environment(container, extra) | {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": CODE,
            "PYTHONDONTWRITEBYTECODE": "1",
            "RAY_ADDRESS": head or "127.0.0.1:6379",
            "RAY_NODE_TYPE_NAME": name,
            "OMP_NUM_THREADS": "1",
        }
        params = {"node-ip-address": address} | params
        command = f"ulimit -n 65536; {shlex.join(ray_start(params, container, head))}"
        inner = shlex.join([*_as_user(), "env", "-i", *_assignments(environ), "/bin/bash", "-c", command])
        log = self.folder / f"{name}.log"
        # Should this process be ended without warning, the kernel ends the pods with it.
        enter = ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", namespace]
        enter += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = f"{_pod_root(self.folder, self.mounts)}; cd /; exec {inner}"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*enter, "/bin/sh", "-c", script], stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        node = Node(name, address, namespace, cable, process, log, environ)
        self.nodes[name] = node
        return node

    def stop(self, names: Sequence[str] | None = None) -> None:
        for name in list(names or self.nodes):
            node = self.nodes.pop(name)
            node.kill()
            sh("ip", "link", "del", node.cable, check=False)
            sh("ip", "netns", "del", node.namespace, check=False)

    def close(self) -> None:
        self.stop()
        sh("ip", "link", "del", self.bridge, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for(what: str, check: Any, timeout_s: float, every_s: float = 0.5, explain: Callable[[], str] = str) -> Any:
    """``check``'s first true result. Raises AssertionError with ``explain()`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if result := check():
                return result
            problem = "not yet"
        except Exception as error:
            problem = repr(error)
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what}: {problem}\n{explain()}")
        time.sleep(every_s)
