"""Write the `app` block of the chart's values.schema.json from the application's own options.

    python helm/tools/sync_schema.py [--check]

`--check` writes nothing and exits 1 when the file is out of date.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "helm" / "everwarm" / "values.schema.json"
COMMENT = "generated from cluster.config.AppConfig by helm/tools/sync_schema.py"


def descriptions(model: type) -> dict[str, str]:
    """Field name -> the string literal under it, over the class and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, note in itertools.pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
                found[field.target.id] = " ".join(str(note.value.value).split())
    return found


def property_schema(raw: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A pydantic property as draft-07, with alternatives merged into one schema.

    A validator reports a failed `anyOf` without saying what is allowed. Keywords of JSON schema bind one type
    each, so {integer >= 1} or "auto" can be said as one schema whose message does.
    """
    if "$ref" in raw:
        raw = definitions[raw["$ref"].rpartition("/")[2]] | {k: v for k, v in raw.items() if k != "$ref"}
    merged: dict[str, Any] = {}
    types: list[str] = []
    for branch in raw.get("anyOf", [raw]):
        branch = {k: v for k, v in branch.items() if k not in ("title", "default", "description")}
        kind = branch.pop("type", None)
        types += [t for t in ([kind] if isinstance(kind, str) else kind or []) if t not in types]
        if "const" in branch and kind == "string":
            branch["pattern"] = f"^{branch.pop('const')}$"
        merged |= branch
    if "null" in types:
        merged = {"type": types}
    elif "enum" in merged:
        if {"true", "false"} <= set(merged["enum"]):
            merged["enum"] = [*merged["enum"], True, False]
    elif types:
        merged["type"] = types[0] if len(types) == 1 else types
    return merged


def app_schema() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from cluster.config import AppConfig

    raw = AppConfig.model_json_schema()
    notes = descriptions(AppConfig)
    properties = {}
    for name, field in sorted(raw["properties"].items()):
        text = field.get("description") or notes.get(name)
        properties[name] = ({"description": text} if text else {}) | property_schema(field, raw.get("$defs", {}))
    return {"$comment": COMMENT, "type": "object", "additionalProperties": False, "properties": properties}


def main(argv: list[str]) -> int:
    old = SCHEMA.read_text()
    schema = json.loads(old)
    schema["properties"]["app"] = app_schema()
    new = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    if "--check" in argv:
        if new != old:
            print(f"{SCHEMA.relative_to(ROOT)} is out of date: run python helm/tools/sync_schema.py", file=sys.stderr)
        return int(new != old)
    SCHEMA.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
