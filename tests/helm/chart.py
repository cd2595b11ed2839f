"""Renders the chart with real Helm binaries; the results of one set of arguments are kept for the session."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "everwarm"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
KUBE_VERSION = "1.34"
MAJORS = ("3", "4")

Object = dict[str, Any]


def tool(name: str) -> Any:
    """A module of helm/tools (a folder of scripts, not a package)."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "helm" / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def binary(major: str) -> str:
    return str(tool("get_helm").helm(major))


def run(major: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([binary(major), *arguments], capture_output=True, text=True, timeout=60)


@functools.cache
def template(major: str, *arguments: str) -> tuple[Object, ...]:
    """`helm template demo CHART …`, parsed. Raises AssertionError with Helm's message when it refuses."""
    done = run(major, "template", "demo", str(CHART), "--namespace", "llm", "--kube-version", KUBE_VERSION, *arguments)
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document)


def example(name: str, major: str = "4") -> tuple[Object, ...]:
    return template(major, "-f", str(CHART / "ci" / f"{name}-values.yaml"))


def one(objects: tuple[Object, ...], kind: str, suffix: str = "") -> Object:
    """The only object of that kind (and name ending)."""
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} objects of kind {kind} {suffix!r}"
    return found[0]


def cluster(objects: tuple[Object, ...]) -> Object:
    """The RayClusterSpec."""
    return one(objects, "RayService")["spec"]["rayClusterConfig"]


def pod_templates(spec: Object) -> dict[str, Object]:
    """Group name ("head" for the head) -> pod template."""
    groups = {group["groupName"]: group["template"] for group in spec.get("workerGroupSpecs", [])}
    return {"head": spec["headGroupSpec"]["template"]} | groups


def serve_config(objects: tuple[Object, ...]) -> Object:
    return yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])
