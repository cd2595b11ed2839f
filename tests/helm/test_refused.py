"""Wrong values never render: the message names the key (and, where one exists, the way out)."""

from __future__ import annotations

import json
import re

import pytest
from chart import CHART, MAJORS, run

WRONG = [
    ("app.modle=x", "modle"),
    ("app.threads=0", "app.threads"),
    ("app.page_size=17", "app.page_size"),
    ("app.scheduler=fifo", "app.scheduler"),
    ("app.replicas=0", "app.replicas"),
    ("app.gpu_memory_utilization=1.5", "app.gpu_memory_utilization"),
    ("app.replica_resource=x", "app.replica_resource"),
    ("app.api_keys[0]=hunter2", "app.api_keys"),
    ("kind=RayJob", "kind"),
    ("fullnameOverride=" + "e" * 48, "fullnameOverride"),
    ("image.tag=a b", "image.tag"),
    ("image.pullPolicy=Sometimes", "image.pullPolicy"),
    ("rayVersion=latest", "rayVersion"),
    ("rayVersion=2.51.0", "rayVersion"),
    ("serve.port=80", "serve.port"),
    ("secrets.tokenPlane.existingSecret=", "secrets.tokenPlane.existingSecret"),
    ("secrets.tokenPlane.value=hunter2", "value"),
    ("secrets.apiKeys.existingSecret=Not A Name", "secrets.apiKeys.existingSecret"),
    ("auth.enabled=false,auth.existingSecret=x", "auth.existingSecret"),
    ("head.rayStartParams.num-cpus=4", "head.rayStartParams.num-cpus"),
    ("workerGroups.cpu=null", "workerGroups"),
    ("workerGroups.cpu.gpu=1", "gpu"),
    ("workerGroups.cpu.gpus=1", "app.device"),
    ("workerGroups.cpu.role=decode", "workerGroups.cpu.role"),
    ("workerGroups.cpu.role=router", "workerGroups"),
    ("workerGroups.cpu.minReplicas=9", "workerGroups.cpu.minReplicas"),
    ("workerGroups.cpu.replicas=9", "workerGroups.cpu.replicas"),
    ("workerGroups.cpu.idleTimeoutSeconds=9", "workerGroups.cpu.idleTimeoutSeconds"),
    ("workerGroups.cpu.terminationGracePeriodSeconds=10", "workerGroups.cpu.terminationGracePeriodSeconds"),
    ("workerGroups.cpu.resources.limits.memory=4 GB", "workerGroups.cpu.resources.limits.memory"),
    ("workerGroups.GPU_pods.gpus=1", "GPU_pods"),
    ("workerGroups.cpu.gpus=1,app.device=cuda,app.replicas=5", "app.replicas"),
    ("workerGroups.cpu.gpus=1,app.device=cuda,app.replicas=2,app.max_replicas=5", "app.max_replicas"),
    ("upgrade.type=Rolling", "upgrade.type"),
    ("upgrade.type=NewClusterWithIncrementalUpgrade", "upgrade.type"),
    (
        "upgrade.type=NewClusterWithIncrementalUpgrade,autoscaling.enabled=true",
        "upgrade.incremental.gatewayClassName",
    ),
    (
        "upgrade.type=NewClusterWithIncrementalUpgrade,autoscaling.enabled=true,upgrade.incremental.gatewayClassName=i,"
        "upgrade.incremental.stepSizePercent=50,upgrade.incremental.maxSurgePercent=10",
        "upgrade.incremental.stepSizePercent",
    ),
    ("upgrade.initializingTimeout=soon", "upgrade.initializingTimeout"),
    ("gcsFaultTolerance.enabled=true", "gcsFaultTolerance.redisAddress"),
    ("gcsFaultTolerance.password=hunter2", "password"),
    ("gcsFaultTolerance.enabled=true,gcsFaultTolerance.backend=etcd", "gcsFaultTolerance.backend"),
    ("modelCache.type=existingClaim", "modelCache.existingClaim"),
    ("modelCache.readOnly=true", "modelCache.readOnly"),
    ("modelCache.size=plenty", "modelCache.size"),
    ("podDisruptionBudget.minAvailable=50%", "podDisruptionBudget.minAvailable"),
    ("tokenPlane.ports=7400", "tokenPlane.ports"),
    ("tokenPlane.ports=7999-8001", "tokenPlane.ports"),
    ("ingress.tlsSecret=x", "ingress.host"),
    ("httpRoute.enabled=true", "httpRoute.parentRefs"),
    ("monitoring.podMonitor.interval=often", "monitoring.podMonitor.interval"),
    ("extraEnv[0].value=x", "extraEnv"),
    ("networkPolicy.enabled=si", "networkPolicy.enabled"),
]


def test_there_are_enough() -> None:
    assert len(WRONG) >= 25


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("values", "key"), WRONG, ids=[values[:60] for values, _ in WRONG])
def test_refused_with_the_key(major: str, values: str, key: str) -> None:
    done = run(major, "template", "demo", str(CHART), "--set", values)
    assert done.returncode != 0, f"--set {values} rendered"
    # Helm 4 writes a key as a JSON pointer.
    message = done.stderr.replace("/", ".")
    assert re.search(rf"(?<![\w.-])\.?{re.escape(key)}(?![\w-])", message), done.stderr


def test_every_object_of_the_schema_is_closed() -> None:
    """Apart from maps that belong to Kubernetes, which its own API checks."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    open_ones = []

    def walk(node: object, path: str) -> None:
        if not isinstance(node, dict):
            return
        if "properties" in node and node.get("additionalProperties") is not False:
            open_ones.append(path)
        for name in ("properties", "definitions"):
            for key, child in node.get(name, {}).items():
                walk(child, f"{path}.{key}")
        for key in ("items", "additionalProperties"):
            walk(node.get(key), f"{path}.{key}")

    walk(schema, "")
    assert open_ones == []
