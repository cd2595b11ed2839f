"""The chart's pods for real: Ray nodes in namespaces, deployed to as KubeRay would, then hurt.

Read-only root, arbitrary uid, no capabilities, token authentication, HAProxy, router and replicas on different nodes.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from chart import CHART, ROOT, cluster, example, pod_templates, serve_config, template
from load import Load
from nodes import Node, Pods, wait_for, why_not
from test_metrics import expressions, names

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,  # minutes of several Ray nodes; `pytest -m slow tests/helm`
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=f"pods in namespaces: {why_not()}"),
]
READY_S = 240
STORE = {"object-store-memory": str(100 << 20)}
LOCAL_MODELS = "/srv"
"""Stands for the chart's model volume; it exists on every machine, and the pods' root is read-only."""
SPLIT = (
    "modelCache.mountPath=/srv,workerGroups.cpu.role=replica,app.model=/srv/a,app.served_model_name=tiny,"
    "app.drain_timeout_s=60,workerGroups.edge.role=router,workerGroups.edge.replicas=1"
)


def tiny_model(folder: Path, seed: int) -> None:
    spec = importlib.util.spec_from_file_location("tiny_checkpoint", ROOT / "tests" / "cluster" / "tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_tiny_llama(folder, seed=seed)


@dataclass
class Cluster:
    """Nodes by name, and what KubeRay does with a RayService: PUT its serveConfigV2 with the cluster's token."""

    pods: Pods
    token: str
    spec: dict[str, Any]
    head: Node

    def add(self, name: str, group: str) -> Node:
        found = next(g for g in self.spec["workerGroupSpecs"] if g["groupName"] == group)
        container = found["template"]["spec"]["containers"][0]
        params, address = found["rayStartParams"] | STORE, f"{self.head.address}:6379"
        for _ in range(3):  # a node that times out on a busy machine is started again, as the kubelet would
            node = self.pods.start(name, params, container, self.secrets, address)
            wait_for(f"node {name}", lambda n=node: not n.alive or "Ray runtime started" in n.tail(100), READY_S)
            if node.alive:
                return node
            self.pods.stop([name])
        raise AssertionError(f"node {name} does not start")

    @property
    def secrets(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def dashboard(self, method: str, path: str, **more: Any) -> httpx.Response:
        url = f"http://{self.head.address}:8265/api/{path}"
        return httpx.request(method, url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60, **more)

    def deploy(self, config: dict[str, Any]) -> None:
        """Repeated until it is taken, as the operator does: on a busy machine Serve's own start may time out."""
        replies: list[str] = []

        def put() -> bool:
            reply = self.dashboard("PUT", "serve/applications/", json=config)
            replies.append(reply.text[-2000:])
            return reply.status_code == 200

        wait_for("the deployment", put, READY_S, 2, lambda: replies[-1] if replies else "no answer")

    def status(self) -> dict[str, Any]:
        return self.dashboard("GET", "serve/applications/").json()["applications"].get("everwarm", {})

    def running(self, **wanted: int) -> bool:
        """The app is up and its deployments have that many replicas, all of the newest version."""
        status = self.status()
        if status.get("status") != "RUNNING":
            return False
        counts = {name: d["replicas"] for name, d in status["deployments"].items()}
        up = {name: sum(r["state"] == "RUNNING" for r in replicas) for name, replicas in counts.items()}
        return all(up[name] == count == len(counts[name]) for name, count in wanted.items())

    def settle(self, what: str, **wanted: int) -> None:
        wait_for(what, lambda: self.running(**wanted), READY_S, every_s=1, explain=self.explain)

    def explain(self) -> str:
        """What Serve says, and the ends of the logs on every node."""
        status = self.status()
        states = {
            name: [(r["state"], r.get("node_ip"), r["replica_id"]) for r in d["replicas"]] + [d.get("message")]
            for name, d in status.get("deployments", {}).items()
        }
        parts = [f"{status.get('status')} {status.get('message')}\n{json.dumps(states, indent=1)}"]
        tails = "cd /tmp/ray/session_latest/logs; cat serve/replica_*.log worker-*.err | grep -vi haproxy | tail -n 20"
        for node in self.pods.nodes.values():
            with suppress(Exception):
                parts.append(f"--- {node.name}\n{node.run('bash', '-c', tails).stdout[-3000:]}")
        return "\n".join(parts)

    def nodes_of(self, deployment: str) -> set[str]:
        replicas = self.status()["deployments"][deployment]["replicas"]
        return {r["node_ip"] for r in replicas if r["state"] == "RUNNING"}

    def versions(self) -> set[str]:
        """Ids of all replicas and routers there are."""
        return {r["replica_id"] for d in self.status()["deployments"].values() for r in d["replicas"]}

    def live(self) -> dict[str, int]:
        """Replica -> requests it runs, as a router hears."""
        return {e["replica"]: e["load"]["running"] for e in self.engines() if e.get("state") == "open" and "load" in e}

    def chunk_sizes(self) -> list[int]:
        return [engine["config"]["chunk_size"] for engine in self.engines()]

    def engines(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url(self.pods.nodes['edge'])}/v1/engine", timeout=10).json()["data"]

    def url(self, node: Node) -> str:
        return f"http://{node.address}:8000"


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Head, one node for routers, two for replicas."""
    models = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        tiny_model(models / name, seed)
    # pytest's folders, and what safetensors writes, are for their owner only; the pods' user is another.
    for path in (*models.rglob("*"), models):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in models.parents:
        if path.is_relative_to(tmp_path_factory.getbasetemp().parent):
            path.chmod(0o755)
    running = Pods(mounts={LOCAL_MODELS: models})
    try:
        spec = cluster(template("4", "-f", str(CHART / "ci" / "cpu-demo-values.yaml"), "--set", SPLIT))
        head = spec["headGroupSpec"]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        container = head["template"]["spec"]["containers"][0]
        node = running.start("head", head["rayStartParams"] | STORE, container, token, None)
        made = Cluster(running, token["RAY_AUTH_TOKEN"], spec, node)
        wait_for("the dashboard", lambda: made.dashboard("GET", "version").status_code == 200, READY_S)
        for name, group in (("edge", "edge"), ("one", "cpu"), ("two", "cpu")):
            made.add(name, group)
        yield made
    finally:
        running.close()


def split_config(**changed: Any) -> dict[str, Any]:
    config = serve_config(template("4", "-f", str(CHART / "ci" / "cpu-demo-values.yaml"), "--set", SPLIT))
    config = copy.deepcopy(config)
    config["applications"][0]["args"] |= changed
    return config


def test_cpu_demo_answers_as_rendered(pods: Cluster) -> None:
    config = serve_config(example("cpu-demo"))
    unauthenticated = httpx.put(f"http://{pods.head.address}:8265/api/serve/applications/", json=config)
    assert unauthenticated.status_code == 401
    pods.deploy(config)
    pods.settle("cpu-demo", Replica=2, Router=1)
    assert pods.head.address not in pods.nodes_of("Replica") | pods.nodes_of("Router")
    # Proxies run where routers or replicas do.
    by_address = {node.address: node for node in pods.pods.nodes.values()}
    first, second = (by_address[address] for address in sorted(pods.nodes_of("Replica")))
    url = pods.url(first)
    wait_for("the proxy", lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
    # The very script of `helm test`, in a pod, through another pod's proxy.
    script = (CHART / "files" / "test_chat.py").read_text()
    done = second.run("env", f"BASE_URL={url}", "TIMEOUT_S=60", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert httpx.get(f"{url}/health").status_code == 200
    exported = httpx.get(f"{url}/metrics").text
    used = {name.removesuffix("_bucket") for _, expression in expressions() for name in names(expression)}
    assert not [name for name in sorted(used) if f"# TYPE {name} " not in exported]
    # KubeRay's readiness check of a worker.
    assert "success" in httpx.get(f"{url}/-/healthz").text


@pytest.mark.slow
def test_changed_option_and_model_under_load(pods: Cluster) -> None:
    """`serve deploy` of a changed engine option, then of a changed model, with eight streams running throughout."""
    pods.deploy(split_config())
    pods.settle("the split app", Replica=2, Router=1)
    edge, one, two = (pods.pods.nodes[name] for name in ("edge", "one", "two"))
    assert pods.nodes_of("Router") == {edge.address}
    assert pods.nodes_of("Replica") == {one.address, two.address}
    with Load(lambda n: pods.url((one, two, edge)[n % 3]), max_tokens=200) as load:
        wait_for("the first streams", lambda: load.completed >= 8, 60)
        for changed in ({"chunk_size": 64}, {"chunk_size": 64, "model": f"{LOCAL_MODELS}/b"}):
            before = pods.versions()
            pods.deploy(split_config(**changed))
            wait_for(f"all of {changed}", lambda b=before: not pods.versions() & b, READY_S, 1, pods.explain)
            pods.settle(str(changed), Replica=2, Router=1)
            served = load.completed
            wait_for("streams on the new version", lambda s=served: load.completed >= s + 16, 60)
    print(load.summary())
    assert not load.broken(), load.broken()[:3]
    wait_for("both engines' answer", lambda: pods.chunk_sizes() == [64, 64], 60)


@pytest.mark.slow
def test_dead_node_and_new_node(pods: Cluster) -> None:
    """A replica's node vanishes without a FIN while streams run on it; another joins and serves."""
    one, two = pods.pods.nodes["one"], pods.pods.nodes["two"]
    edge = pods.pods.nodes["edge"]
    with Load(lambda n: pods.url((one, edge)[n % 2]), max_tokens=400) as load:
        wait_for("the first streams", lambda: load.completed >= 8, 60)
        wait_for("streams on both", lambda: min(pods.live().values()) >= 1 and len(pods.live()) == 2, 30)
        two.cut()
        two.kill()
        three = pods.add("three", "cpu")
        wait_for("the new node's replica", lambda: three.address in pods.nodes_of("Replica"), READY_S, 1, pods.explain)
        wait_for("its share of the load", lambda: sum(pods.live().values()) and len(pods.live()) == 2, 60)
        served = load.completed
        wait_for("more streams", lambda: load.completed >= served + 16, 60)
    print(load.summary())
    assert not load.broken(), load.broken()[:3]
    # A cut cable is noticed by its silence; whoever was on it waited that long and went on elsewhere.
    assert max(stream.longest_gap_s for stream in load.results) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "successor", "with_hook"), [("one", "four", True), ("three", "five", False)])
def test_sigterm_to_a_replicas_node(pods: Cluster, victim: str, successor: str, with_hook: bool) -> None:
    """What the kubelet does to a pod: the preStop hook, then SIGTERM. Nothing is lost, and it is over in time.

    Without the hook the signal alone does the same, since it reaches `ray start`, which then drains.
    """
    node, edge = pods.pods.nodes[victim], pods.pods.nodes["edge"]
    assert node.address in pods.nodes_of("Replica")
    pods.add(successor, "cpu")  # the pod that takes its place
    spec = pod_templates(pods.spec)["cpu"]["spec"]
    grace = spec["terminationGracePeriodSeconds"]
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    with Load(lambda n: pods.url(edge), max_tokens=400) as load:
        wait_for("the first streams", lambda: load.completed >= 8, 60)
        started = time.monotonic()
        if with_hook:
            left = node.run(sys.executable, *hook[1:], timeout=grace)
            assert left.returncode == 0, left.stdout + left.stderr
        if node.alive:
            node.terminate()
        wait_for("the pod's end", lambda: not node.alive, max(1.0, grace - (time.monotonic() - started)))
        print(f"gone after {time.monotonic() - started:.1f} of {grace} s")
        served = load.completed
        wait_for("more streams", lambda: load.completed >= served + 16, 60)
    print(load.summary())
    assert not load.broken(), load.broken()[:3]
    assert node.address not in pods.nodes_of("Replica")
