"""Write constraints-image.txt: the exact versions that the container image installs.

    .venv/bin/python helm/tools/pin_image.py     # from a venv in which the tests pass

Takes the closure of the project's own dependencies as installed in this interpreter.
torch stands there without its local version, and triton not at all: a CUDA build of torch pins its own.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "constraints-image.txt"
HEADER = "# Versions in the container image; written by helm/tools/pin_image.py from a venv in which the tests pass.\n"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(roots: list[str]) -> dict[str, str]:
    """Canonical name -> installed version of everything that the requirements need on this platform."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonical(r.name), frozenset(r.extras)) for r in map(Requirement, roots)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[canonical(name)] = package.version
        for line in package.requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                todo.append((canonical(requirement.name), frozenset(requirement.extras)))
    return found


def main() -> int:
    # The installed distribution's own metadata may be older than the file.
    versions = closure(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    versions.pop("triton", None)
    lines = [f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(versions.items())]
    TARGET.write_text(HEADER + "".join(lines))
    print(f"{TARGET.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
