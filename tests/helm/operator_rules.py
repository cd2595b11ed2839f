"""What KubeRay 1.7's operator checks of a RayService beyond its CRD, restated over the rendered object.

Each rule yields messages; an empty list means that the operator would accept the object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
START_PARAM_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def violations(service: Object) -> list[str]:
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    rules = (metadata, upgrade, groups, autoscaling, fault_tolerance, authentication, gated, containers)
    return [message for rule in rules for message in rule(service, spec, cluster)]


def environment(template: Object) -> dict[str, Any]:
    """Of the Ray container, which is the first."""
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in template["spec"]["containers"][0].get("env", [])}


def truthy(value: Any) -> bool:
    return str(value).lower() in ("1", "true")


def autoscaler_v2(cluster: Object) -> bool:
    if not cluster.get("enableInTreeAutoscaling"):
        return False
    version = cluster.get("autoscalerOptions", {}).get("version")
    return version == "v2" or truthy(environment(cluster["headGroupSpec"]["template"]).get("RAY_enable_autoscaler_v2"))


def metadata(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    name = service["metadata"]["name"]
    if len(name) > 47:
        yield f"name {name!r} has more than 47 characters"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"name {name!r} is no DNS-1035 label"
    timeout = service["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", "")
    if timeout and not re.fullmatch(r"([1-9][0-9]*|([0-9]+(\.[0-9]+)?(ms|s|m|h))+)", timeout):
        yield f"ray.io/initializing-timeout {timeout!r} is no duration"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "headService.metadata.name is set"


def upgrade(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type", "NewCluster") not in UPGRADES:
        yield f"upgradeStrategy.type {strategy['type']!r}"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"
    if "upgradeStrategy" in cluster:
        yield "rayClusterConfig.upgradeStrategy is set"
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    if not cluster.get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs the autoscaler"
    options = strategy.get("clusterUpgradeOptions", {})
    step, surge = options.get("stepSizePercent", -1), options.get("maxSurgePercent", 100)
    if not 0 <= step <= surge <= 100:
        yield f"0 <= stepSizePercent {step} <= maxSurgePercent {surge} <= 100 does not hold"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds must be positive"
    if not options.get("gatewayClassName"):
        yield "gatewayClassName is not set"


def groups(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    scaled = cluster.get("enableInTreeAutoscaling")
    for name, group in _all_groups(cluster):
        params = group.get("rayStartParams", {})
        if any(params.get(key) for key in START_PARAM_RESOURCES) and group.get("resources"):
            yield f"{name}: resources in rayStartParams and in resources"
        if "labels" in params:
            yield f"{name}: rayStartParams.labels"
        if params.get("resources"):
            try:
                json.loads(params["resources"].strip("'\"` "))
            except ValueError:
                yield f"{name}: KubeRay can't read rayStartParams.resources {params['resources']}"
    for group in cluster.get("workerGroupSpecs", []):
        name, low, high = group["groupName"], group.get("minReplicas"), group.get("maxReplicas")
        if not scaled and (low is None or high is None):
            yield f"{name}: minReplicas and maxReplicas must be set"
        if low is not None and high is not None and not 0 <= low <= high:
            yield f"{name}: 0 <= minReplicas {low} <= maxReplicas {high} does not hold"
        if group.get("suspend"):
            yield f"{name}: suspend needs a feature gate"


def autoscaling(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    scaled = cluster.get("enableInTreeAutoscaling")
    options = cluster.get("autoscalerOptions", {})
    head = environment(cluster["headGroupSpec"]["template"])
    if not scaled and truthy(head.get("RAY_enable_autoscaler_v2")):
        yield "RAY_enable_autoscaler_v2 without enableInTreeAutoscaling"
    if scaled and "version" in options and "RAY_enable_autoscaler_v2" in head:
        yield "autoscalerOptions.version and RAY_enable_autoscaler_v2 are both set"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds is negative"
    v2 = autoscaler_v2(cluster)
    for name, group in _all_groups(cluster):
        if v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy must be Never or unset with autoscaler v2"
        for key in ("idleTimeoutSeconds", "priority"):
            if key in group and not v2:
                yield f"{name}: {key} needs autoscaler v2"
        if "priority" in group and _version(cluster) < (2, 56, 0):
            yield f"{name}: priority needs Ray 2.56"


def fault_tolerance(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    variables, params = environment(head["template"]), head.get("rayStartParams", {})
    annotations = service["metadata"].get("annotations", {})
    options = cluster.get("gcsFaultToleranceOptions")
    if params.get("redis-username") or "REDIS_USERNAME" in variables:
        yield "redis user name outside gcsFaultToleranceOptions"
    if options is None:
        if "RAY_REDIS_ADDRESS" in variables:
            yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
        return
    if params.get("redis-password"):
        yield "rayStartParams.redis-password"
    for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
        if name in variables:
            yield f"{name} beside gcsFaultToleranceOptions"
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(name):
            yield f"annotation {name} beside gcsFaultToleranceOptions"
    storage = options.get("storage")
    if options.get("backend", "redis") == "redis":
        if storage is not None:
            yield "storage belongs to backend rocksdb"
        return
    for key in ("redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace"):
        if options.get(key):
            yield f"{key} with backend rocksdb"
    if storage and storage.get("claimName") and {"size", "storageClassName", "accessModes"} & set(storage):
        yield "storage.claimName excludes size, storageClassName and accessModes"


def authentication(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is not supported by RayService"
    if options.get("mode") == "token" and _version(cluster) < (2, 52, 0):
        yield "token authentication needs rayVersion 2.52.0"


def gated(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    for key in ("networkPolicy", "tlsOptions", "historyServerOptions"):
        if key in cluster:
            yield f"{key} needs a feature gate that is off by default"


def containers(service: Object, spec: Object, cluster: Object) -> Iterator[str]:
    for name, group in _all_groups(cluster):
        first = group["template"]["spec"]["containers"][0]
        if not first["name"].startswith("ray-"):
            yield f"{name}: the Ray container is not the first one"
        ports = {port["name"]: port["containerPort"] for port in first.get("ports", [])}
        if not {"serve", "metrics"} <= set(ports):
            yield f"{name}: KubeRay looks for ports named serve and metrics"


def _all_groups(cluster: Object) -> Iterator[tuple[str, Object]]:
    yield "head", cluster["headGroupSpec"]
    for group in cluster.get("workerGroupSpecs", []):
        yield group["groupName"], group


def _version(cluster: Object) -> tuple[int, ...]:
    return tuple(int(part) for part in cluster.get("rayVersion", "0.0.0").split("."))
