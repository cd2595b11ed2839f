"""Every example renders under Helm 3 and 4 into objects that an API server and KubeRay's operator would accept."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import pytest
from chart import CHART, EXAMPLES, KUBE_VERSION, MAJORS, cluster, example, one, pod_templates, run, template
from crd_schemas import errors
from operator_rules import violations

NAMES = [path.name.removesuffix("-values.yaml") for path in EXAMPLES]

EVERYTHING = (
    "monitoring.podMonitor.enabled=true",
    "monitoring.prometheusRule.enabled=true",
    "monitoring.dashboard.enabled=true",
    "networkPolicy.enabled=true",
    "networkPolicy.restrictEgress=true",
    "ingress.enabled=true",
    "httpRoute.enabled=true",
    "httpRoute.parentRefs[0].name=gw",
    "modelCache.type=pvc",
    "gcsFaultTolerance.enabled=true",
    "gcsFaultTolerance.redisAddress=redis:6379",
    "gcsFaultTolerance.existingSecret=redis",
    "gcsFaultTolerance.usernameKey=user",
    "autoscaling.enabled=true",
    "secrets.huggingFace.existingSecret=hub",
    "secrets.apiKeys.existingSecret=keys",
    "auth.existingSecret=ray-token",
    "commonAnnotations.team=llm",
    "commonLabels.team=llm",
)
SETS = {
    **{name: ("-f", str(CHART / "ci" / f"{name}-values.yaml")) for name in NAMES},
    "defaults": (),
    "everything": ("--set", ",".join(EVERYTHING)),
    "cluster": ("--set", "kind=RayCluster"),
    "rocksdb": ("--set", "gcsFaultTolerance.enabled=true,gcsFaultTolerance.backend=rocksdb"),
}


def test_examples_are_the_promised_ones() -> None:
    assert NAMES == ["cpu-demo", "h200-x8", "one-gpu", "two-gpu-types"]


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("name", SETS)
def test_lint(major: str, name: str) -> None:
    done = run(major, "lint", "--strict", str(CHART), "--kube-version", KUBE_VERSION, *SETS[name])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("name", SETS)
def test_objects_pass_their_schemas(major: str, name: str) -> None:
    objects = template(major, *SETS[name])
    custom = 0
    for thing in objects:
        found = errors(thing)
        if found is None:
            kubernetes_validate.validate(thing, KUBE_VERSION, strict=True)
        else:
            custom += 1
            assert found == [], f"{thing['kind']}: {found}"
    assert custom >= 1


@pytest.mark.parametrize("name", SETS)
def test_both_helms_render_the_same(name: str) -> None:
    assert template("3", *SETS[name]) == template("4", *SETS[name])


@pytest.mark.parametrize("name", [name for name in SETS if name != "cluster"])
def test_operator_accepts(name: str) -> None:
    assert violations(one(template("4", *SETS[name]), "RayService")) == []


@pytest.mark.parametrize("name", [name for name in SETS if name != "cluster"])
def test_pod_templates_are_valid_pods(name: str) -> None:
    """The CRD embeds pod templates, but checks them less strictly than the core schema does."""
    for group, pod in pod_templates(cluster(template("4", *SETS[name]))).items():
        thing = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group, **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(thing, KUBE_VERSION, strict=True)


def _at(thing: Any, path: str) -> tuple[Any, Any]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        thing = thing[part]
    return thing, last


POD = "spec/rayClusterConfig/workerGroupSpecs/0/template/spec/containers/0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/serveConfigv2", "x"),
        ("spec/rayClusterConfig/headGroupSpec/rayStartParams/num-cpus", 0),
        ("spec/rayClusterConfig/enableInTreeAutoscaling", "yes"),
        (f"{POD}/resource", {}),
        (f"{POD}/resources/limits/memory", "4 GB"),
        (f"{POD}/env/0", {"value": "x"}),
    ],
)
def test_the_schema_check_would_notice(path: str, value: Any) -> None:
    service = copy.deepcopy(one(example("cpu-demo"), "RayService"))
    parent, key = _at(service, path)
    parent[key] = value
    assert errors(service)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("metadata/name", "e" * 48, "47 characters"),
        ("metadata/name", "1st", "DNS-1035"),
        ("spec/upgradeStrategy/type", "Rolling", "upgradeStrategy.type"),
        ("spec/upgradeStrategy/type", "NewClusterWithIncrementalUpgrade", "needs the autoscaler"),
        ("spec/rayClusterConfig/rayVersion", "2.51.0", "2.52.0"),
        ("spec/rayClusterConfig/tlsOptions", {}, "feature gate"),
        ("spec/rayClusterConfig/workerGroupSpecs/0/minReplicas", 9, "maxReplicas"),
        ("spec/rayClusterConfig/workerGroupSpecs/0/maxReplicas", None, "must be set"),
        ("spec/rayClusterConfig/workerGroupSpecs/0/idleTimeoutSeconds", 5, "autoscaler v2"),
        ("spec/rayClusterConfig/workerGroupSpecs/0/rayStartParams/labels", "a=b", "labels"),
        (f"{POD}/name", "log-shipper", "not the first"),
        ("spec/rayClusterConfig/authOptions/enableK8sTokenAuth", True, "not supported"),
    ],
)
def test_the_operator_rules_would_notice(path: str, value: Any, complaint: str) -> None:
    service = copy.deepcopy(one(example("cpu-demo"), "RayService"))
    parent, key = _at(service, path)
    parent[key] = value
    assert any(complaint in message for message in violations(service))
