"""The import table of docs/design.md, asserted on the source and on what importing really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cluster", "router", "replica", "kernels")
SHARED = {"router.wire", "router.pages", "router.connection", "router.handshake"}
"""Of the router's modules, what a replica may import: the vocabulary and both ends' connection."""


def imports_of(path: Path) -> set[str]:
    """Absolute module names imported anywhere in a file, inside functions too; type-checking blocks included."""
    names: set[str] = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.split(".")[0] in FOLDERS or name.split(".")[0] in ("torch", "triton")}


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no sources in {folder}"
    return found


def offenders(folder: str, allowed) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in sorted(imports_of(path))
        if not allowed(name)
    ]


def test_router_imports_nothing_of_ours_and_no_torch() -> None:
    assert not offenders("router", lambda name: name.split(".")[0] == "router")


def test_kernels_import_only_torch_and_triton() -> None:
    assert not offenders("kernels", lambda name: name.split(".")[0] in ("kernels", "torch", "triton"))


def test_replica_imports_only_the_shared_vocabulary() -> None:
    def allowed(name: str) -> bool:
        if name.split(".")[0] != "router":
            return name.split(".")[0] != "cluster"
        return name == "router" or any(name == module or name.startswith(module + ".") for module in SHARED)

    assert not offenders("replica", allowed)


def test_the_check_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = ROOT / "router" / "dispatch.py"
    assert "router.link" in imports_of(path) and "router.link.Link" in imports_of(path)


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["router.dispatch", "router.connection", "router.wire", "cluster"])
def test_importing_it_loads_no_torch(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded and not loaded & {"torch", "triton", "transformers"}


@pytest.mark.parametrize("package", ["kernels", "replica", "router"])
def test_packages_are_light(package: str) -> None:
    """The package's own __init__ loads no submodule and nothing heavy."""
    loaded = loaded_by(f"import {package}")
    assert package in loaded
    assert not {name for name in loaded if name.startswith(f"{package}.")}
    assert not loaded & {"torch", "triton", "numpy", "ray", "transformers"}


def test_transformers_does_not_take_our_kernels_for_the_hubs() -> None:
    code = (
        "import kernels, os\n"
        "assert not hasattr(kernels, '__version__')\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available(), os.path.dirname(os.path.abspath(kernels.__file__)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False", str(ROOT / "kernels")]
