"""What a platform engineer relies on in the rendered pods, one convention per test."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from chart import CHART, EXAMPLES, cluster, example, one, pod_templates, run, serve_config, template
from operator_rules import environment

from cluster import leave
from cluster.environment import HAPROXY_BALANCE

NAMES = [path.name.removesuffix("-values.yaml") for path in EXAMPLES]


def render(**values: Any) -> tuple[dict[str, Any], ...]:
    """Rendered with ``a__b=value`` for `--set-json a.b=value`."""
    pairs = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
    return template("4", *[argument for pair in pairs for argument in ("--set-json", pair)])


def worker(objects: tuple[dict[str, Any], ...], group: str = "cpu") -> dict[str, Any]:
    return pod_templates(cluster(objects))[group]


@pytest.mark.parametrize("name", NAMES)
def test_head_runs_no_work(name: str) -> None:
    params = cluster(example(name))["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")


def test_head_leaves_the_service_once_there_are_two_workers() -> None:
    assert one(example("cpu-demo"), "RayService")["spec"]["excludeHeadPodFromServeSvc"] is True
    single = render(workerGroups__cpu__minReplicas=1)
    assert one(single, "RayService")["spec"]["excludeHeadPodFromServeSvc"] is False
    asked = render(serve__excludeHead=False)
    assert one(asked, "RayService")["spec"]["excludeHeadPodFromServeSvc"] is False


@pytest.mark.parametrize("name", NAMES)
def test_haproxy_and_niceness_on_every_node(name: str) -> None:
    for pod in pod_templates(cluster(example(name))).values():
        variables = environment(pod)
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert variables["RAY_worker_niceness"] == "0"
        assert int(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 3600
        assert variables["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == HAPROXY_BALANCE


@pytest.mark.parametrize("name", NAMES)
def test_grace_covers_the_drain(name: str) -> None:
    objects = example(name)
    drain = serve_config(objects)["applications"][0]["args"]["drain_timeout_s"]
    for group, pod in pod_templates(cluster(objects)).items():
        leave = float(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain < leave < pod["spec"]["terminationGracePeriodSeconds"], group
        hook = pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop")
        if group == "head":
            assert hook is None
        else:
            assert hook["exec"]["command"] == ["python", "-m", "cluster.leave", "--timeout", f"{leave:.0f}"]
    delay = one(objects, "RayService")["spec"]["rayClusterDeletionDelaySeconds"]
    assert delay > drain


def test_the_pre_stop_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        leave.main(["--help"])
    assert ended.value.code == 0
    assert "--timeout" in capsys.readouterr().out


def test_ray_token_authentication() -> None:
    assert cluster(render())["authOptions"] == {"mode": "token"}
    named = cluster(render(auth__existingSecret="ray-token"))
    assert named["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert "authOptions" not in cluster(render(auth__enabled=False))


@pytest.mark.parametrize("name", NAMES)
def test_hardening(name: str) -> None:
    objects = example(name)
    pods = [*pod_templates(cluster(objects)).values(), one(objects, "Pod")]
    for pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
    head = pod_templates(cluster(objects))["head"]["spec"]["automountServiceAccountToken"]
    assert head is cluster(objects)["enableInTreeAutoscaling"]
    assert all(not pod["spec"]["automountServiceAccountToken"] for pod in pods[1:])
    assert one(objects, "ServiceAccount")["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_lies_on_volumes(name: str) -> None:
    for group, pod in pod_templates(cluster(example(name))).items():
        mounts = {m["mountPath"]: m["name"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        assert set(mounts.values()) == set(volumes), group
        shm = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shm["medium"] == "Memory" and shm["sizeLimit"]
        assert "sizeLimit" in volumes[mounts["/tmp"]]["emptyDir"]
        assert "emptyDir" in volumes[mounts["/tmp/ray"]]
        variables = environment(pod)
        for key in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            assert variables[key].startswith("/tmp"), key


def test_secrets_are_files_by_reference() -> None:
    objects = example("h200-x8")
    text = yaml.safe_dump_all(objects)
    assert not [thing for thing in objects if thing["kind"] == "Secret"]
    assert "password" not in text.replace("key: password", "").replace("redisPassword", "")
    assert serve_config(objects)["applications"][0]["args"]["api_key_file"] == "/etc/everwarm/secrets/api-keys"

    def projected(group: str) -> dict[str, list[dict[str, str]]]:
        volumes = {v["name"]: v for v in worker(objects, group)["spec"]["volumes"]}
        return {s["secret"]["name"]: s["secret"]["items"] for s in volumes["secrets"]["projected"]["sources"]}

    assert set(projected("cpu")) == {"everwarm-token-plane", "everwarm-api-keys"}
    assert set(projected("h200")) == {"everwarm-token-plane"}
    head = pod_templates(cluster(objects))["head"]["spec"]
    assert "secrets" not in {volume["name"] for volume in head["volumes"]}
    for group in ("cpu", "h200"):
        mount = [m for m in worker(objects, group)["spec"]["containers"][0]["volumeMounts"] if m["name"] == "secrets"]
        assert mount == [{"name": "secrets", "mountPath": "/etc/everwarm/secrets", "readOnly": True}]
    hub = environment(worker(example("two-gpu-types"), "h200"))["HF_TOKEN"]
    assert hub == {"secretKeyRef": {"name": "hub-token", "key": "token"}}


def test_roles_keep_to_their_groups() -> None:
    """CPU-only clusters put everything anywhere; reserved groups offer a custom resource that the app asks for."""
    plain = serve_config(example("cpu-demo"))["applications"][0]["args"]
    assert "router_resource" not in plain
    objects = example("two-gpu-types")
    args = serve_config(objects)["applications"][0]["args"]
    offered = {
        group["groupName"]: json.loads(group["rayStartParams"]["resources"].strip("'"))
        for group in cluster(objects)["workerGroupSpecs"]
    }
    assert offered == {
        "cpu": {args["router_resource"]: 1000},
        "h200": {args["replica_resource"]: 1000},
        "l40s": {args["replica_resource"]: 1000},
    }


def test_gpus_and_images_per_group() -> None:
    pods = pod_templates(cluster(example("h200-x8")))
    gpu = pods["h200"]["spec"]["containers"][0]
    for side in ("requests", "limits"):
        assert gpu["resources"][side]["nvidia.com/gpu"] == "8"
    assert gpu["image"].endswith("-cuda")
    assert pods["head"]["spec"]["containers"][0]["image"].endswith("-cpu")
    assert "nvidia.com/gpu" not in json.dumps(pods["cpu"])
    digest = "sha256:" + "0" * 64
    pinned = worker(render(image__digest=digest))["spec"]["containers"][0]["image"]
    assert pinned == f"everwarm@{digest}"


def test_placement_of_pods() -> None:
    spec = worker(example("h200-x8"), "h200")["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert spec["priorityClassName"] == "llm-serving"
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    given = render(
        workerGroups__cpu__affinity={"nodeAffinity": {}},
        workerGroups__cpu__runtimeClassName="nvidia",
        workerGroups__cpu__resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
    )
    spec = worker(given)["spec"]
    assert (spec["affinity"], spec["runtimeClassName"]) == ({"nodeAffinity": {}}, "nvidia")
    assert spec["resourceClaims"][0]["name"] == "gpu"


def test_selectors_match_the_pods() -> None:
    """`ray.io/cluster` has a random suffix, so everything selects labels that the templates set themselves."""
    objects = example("h200-x8")
    pods = {name: pod["metadata"]["labels"] for name, pod in pod_templates(cluster(objects)).items()}

    def selected(selector: dict[str, Any]) -> set[str]:
        found = set()
        for name, labels in pods.items():
            equal = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
            among = all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))
            if equal and among:
                found.add(name)
        return found

    everything = {"head", "cpu", "h200"}
    assert selected(one(objects, "PodDisruptionBudget")["spec"]["selector"]) == everything - {"head"}
    assert selected(one(objects, "PodMonitor")["spec"]["selector"]) == everything
    assert selected(one(objects, "NetworkPolicy", "nodes")["spec"]["podSelector"]) == everything
    plane = one(objects, "NetworkPolicy", "token-plane")["spec"]
    assert selected(plane["podSelector"]) == {"h200"}
    assert selected(plane["ingress"][0]["from"][0]["podSelector"]) == {"cpu"}
    spread = worker(example("cpu-demo"))["spec"]["topologySpreadConstraints"][0]["labelSelector"]
    assert selected({"matchLabels": {**spread["matchLabels"], "everwarm/group": "h200"}}) == {"h200"}


def test_token_plane_ports_stay_closed_to_the_rest() -> None:
    objects = example("h200-x8")
    low, high = map(int, serve_config(objects)["applications"][0]["args"]["token_plane_ports"].split("-"))
    nodes = one(objects, "NetworkPolicy", "nodes")["spec"]["ingress"]
    for rule in nodes:
        for port in rule["ports"]:
            first, last = port["port"], port.get("endPort", port["port"])
            assert last < low or first > high, port
    plane = one(objects, "NetworkPolicy", "token-plane")["spec"]["ingress"][0]["ports"]
    assert plane == [{"protocol": "TCP", "port": low, "endPort": high}]
    # Clients come from the named namespaces and from the chart's own test pod.
    serving = next(rule for rule in nodes if rule["ports"] == [{"protocol": "TCP", "port": 8000}])
    labels = one(objects, "Pod")["metadata"]["labels"]
    test_pod = serving["from"][0]["podSelector"]["matchLabels"]
    assert all(labels[key] == value for key, value in test_pod.items())
    assert len(serving["from"]) == 2
    # The dashboard is for the operator only.
    assert [r["from"] for r in nodes if {"protocol": "TCP", "port": 8265} in r["ports"]] == [
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-operator"}}}]
    ]


def test_disruption_budget_follows_the_minimum() -> None:
    assert one(example("two-gpu-types"), "PodDisruptionBudget")["spec"]["minAvailable"] == 3
    assert "PodDisruptionBudget" not in {o["kind"] for o in render(workerGroups__cpu__minReplicas=1)}
    assert one(render(podDisruptionBudget__minAvailable=1), "PodDisruptionBudget")["spec"]["minAvailable"] == 1


def test_model_cache_kinds() -> None:
    def models(objects: tuple[dict[str, Any], ...], group: str) -> tuple[dict[str, Any], dict[str, Any]]:
        spec = worker(objects, group)["spec"]
        mount = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "models")
        return next(v for v in spec["volumes"] if v["name"] == "models"), mount

    volume, _ = models(example("cpu-demo"), "cpu")
    assert volume["emptyDir"] == {"sizeLimit": "2Gi"}
    objects = example("two-gpu-types")
    claim = one(objects, "PersistentVolumeClaim")
    volume, mount = models(objects, "l40s")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    objects = example("h200-x8")
    volume, mount = models(objects, "h200")
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert mount["readOnly"] is True
    variables = environment(worker(objects, "h200"))
    assert variables["HF_HOME"].startswith("/models/") and variables["HF_HUB_OFFLINE"] == "1"


def test_fault_tolerance_autoscaling_upgrade() -> None:
    assert cluster(example("h200-x8"))["gcsFaultToleranceOptions"] == {
        "backend": "redis",
        "redisAddress": "redis.redis.svc:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis-auth", "key": "password"}}},
    }
    objects = example("two-gpu-types")
    assert cluster(objects)["autoscalerOptions"]["version"] == "v2"
    bounds = {g["groupName"]: (g["minReplicas"], g["maxReplicas"]) for g in cluster(objects)["workerGroupSpecs"]}
    assert bounds == {"cpu": (2, 4), "h200": (2, 4), "l40s": (0, 8)}
    assert not {"HorizontalPodAutoscaler", "ScaledObject"} & {o["kind"] for o in objects}
    assert one(example("cpu-demo"), "RayService")["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
    assert one(objects, "RayService")["spec"]["upgradeStrategy"]["clusterUpgradeOptions"] == {
        "gatewayClassName": "istio",
        "stepSizePercent": 25,
        "intervalSeconds": 30,
        "maxSurgePercent": 50,
    }


def test_routes_target_the_serving_service() -> None:
    backend = one(example("h200-x8"), "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "demo-everwarm-serve-svc", "port": {"number": 8000}}
    rule = one(example("two-gpu-types"), "HTTPRoute")["spec"]["rules"][0]
    assert rule["backendRefs"] == [{"name": "demo-everwarm-serve-svc", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}
    service = one(example("cpu-demo"), "RayService")["spec"]["serveService"]["metadata"]["name"]
    assert service == "demo-everwarm-serve-svc"


def test_extras() -> None:
    sidecar = {"name": "logs", "image": "busybox"}
    objects = render(
        extraEnv=[{"name": "A", "value": "1"}],
        workerGroups__cpu__extraEnv=[{"name": "B", "value": "2"}],
        workerGroups__cpu__extraEnvFrom=[{"configMapRef": {"name": "env"}}],
        workerGroups__cpu__sidecars=[sidecar],
        workerGroups__cpu__initContainers=[sidecar],
        workerGroups__cpu__extraVolumes=[{"name": "data", "emptyDir": {}}],
        workerGroups__cpu__extraVolumeMounts=[{"name": "data", "mountPath": "/data"}],
        workerGroups__cpu__probes={"readinessProbe": {"httpGet": {"path": "/-/healthz", "port": 8000}}},
        extraObjects=[{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}],
    )
    spec = worker(objects)["spec"]
    first, second = spec["containers"]
    assert second == sidecar and spec["initContainers"] == [sidecar]
    assert {"A": "1", "B": "2"}.items() <= environment(worker(objects)).items()
    assert "B" not in environment(pod_templates(cluster(objects))["head"])
    assert first["envFrom"] == [{"configMapRef": {"name": "env"}}]
    assert {"name": "data", "mountPath": "/data"} in first["volumeMounts"]
    assert first["readinessProbe"]["httpGet"]["port"] == 8000
    assert "readinessProbe" not in worker(render())["spec"]["containers"][0]
    assert one(objects, "ConfigMap")["metadata"]["name"] == "demo-x"


def test_raycluster_kind_mounts_the_configuration() -> None:
    objects = render(kind="RayCluster")
    head = one(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]
    mount = next(m for m in head["containers"][0]["volumeMounts"] if m["name"] == "serve-config")
    config = yaml.safe_load(one(objects, "ConfigMap")["data"]["serve.yaml"])
    assert mount["mountPath"] == "/etc/everwarm/serve"
    assert config == serve_config(render())


def test_notes_give_the_first_request() -> None:
    done = run("4", "install", "demo", str(CHART), "--dry-run=client", "--namespace", "llm")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for text in ("port-forward svc/demo-everwarm-serve-svc", "/v1/chat/completions", "helm test demo -n llm"):
        assert text in notes


@pytest.mark.parametrize("wanted", ["true", "false"])
def test_access_log_reaches_every_process(wanted: str) -> None:
    """A deployment's own logging options, which the application sets, outrank those of all of Serve."""
    config = serve_config(template("4", "--set", f"serve.accessLog={wanted}"))
    (application,) = config["applications"]
    deployments = {entry["name"]: entry["logging_config"] for entry in application["deployments"]}
    assert deployments.keys() == {"Router", "Replica"}
    for logging_config in (config["logging_config"], *deployments.values()):
        assert logging_config == {"encoding": "JSON", "enable_access_log": wanted == "true"}


def test_names_are_cut_to_the_operators_limit() -> None:
    long = run("4", "template", "r" * 53, str(CHART), "--kube-version", "1.34")
    names = {d["metadata"]["name"] for d in yaml.safe_load_all(long.stdout) if d and d["kind"] == "RayService"}
    assert {len(name) for name in names} == {47}
