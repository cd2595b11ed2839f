"""CRD structural schemas as strict JSON schemas: unknown fields are errors, as `kubectl apply` reports them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parent / "crds"
DROPPED = ("description", "default", "format", "nullable", "example")


def strict(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema's node as JSON schema.

    The API server fills defaults in before it validates, so a required field with a default may be missing.
    """
    if node.get("x-kubernetes-int-or-string"):
        text = {"type": "string"} | {k: node[k] for k in ("pattern",) if k in node}
        return {"anyOf": [{"type": "integer"}, text]}
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key.startswith("x-kubernetes") or key in DROPPED:
            continue
        if key == "properties":
            value = {name: strict(child) for name, child in value.items()}
        elif key in ("allOf", "anyOf", "oneOf"):
            value = [strict(child) for child in value]
        elif key in ("items", "not") or (key == "additionalProperties" and isinstance(value, dict)):
            value = strict(value)
        elif key == "required":
            value = [name for name in value if "default" not in node.get("properties", {}).get(name, {})]
        result[key] = value
    closed = "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields")
    if closed and "additionalProperties" not in node:
        result["additionalProperties"] = False
    if node.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result


@functools.cache
def validators() -> dict[tuple[str, str], Draft202012Validator]:
    """(apiVersion, kind) -> validator, for every CRD in the folder."""
    found = {}
    for path in FOLDER.glob("*.json"):
        crd = json.loads(path.read_text())
        for version in crd["spec"]["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {"metadata": {"type": "object"}}
            for name in ("apiVersion", "kind"):
                schema["properties"].setdefault(name, {"type": "string"})
            key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
            found[key] = Draft202012Validator(schema)
    return found


def errors(thing: dict[str, Any]) -> list[str] | None:
    """What is wrong with a custom resource; None when its kind is not among the CRDs."""
    validator = validators().get((thing["apiVersion"], thing["kind"]))
    if validator is None:
        return None
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(thing)]
