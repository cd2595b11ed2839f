"""docs/kubernetes.md: each command is run here, or marked † as not run."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from chart import MAJORS, ROOT, binary

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def blocks() -> list[tuple[str, list[str]]]:
    """(text before a code block, its commands)."""
    found = []
    for before, body in re.findall(r"((?:[^\n]*\n)\n?) *```\n(.*?)```", PAGE, re.DOTALL):
        found.append((before, [line.strip() for line in body.splitlines() if line.strip()]))
    return found


def paragraph(before: str) -> str:
    """The whole paragraph that ends with ``before``."""
    return PAGE[: PAGE.index(before) + len(before)].rstrip().rpartition("\n\n")[2]


UNMARKED = [command for before, commands in blocks() if "†" not in paragraph(before) for command in commands]


def test_there_are_commands_of_both_kinds() -> None:
    assert len(UNMARKED) >= 3
    assert sum(len(commands) for _, commands in blocks()) > len(UNMARKED) + 5
    assert all(command.startswith("helm ") for command in UNMARKED)


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("command", UNMARKED)
def test_command(major: str, command: str) -> None:
    _, *arguments = shlex.split(command)
    done = subprocess.run([binary(major), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_inline_commands_are_marked_too() -> None:
    """Commands in tables and sentences: what talks to a cluster carries the mark on its line."""
    for line in PAGE.splitlines():
        for command in re.findall(r"`(kubectl [^`]+|helm upgrade[^`]*)`", line):
            if not line.startswith(" " * 3):
                assert "†" in line or command == "kubectl drain", line


def test_figures_of_the_chart_are_current() -> None:
    values = (ROOT / "helm" / "everwarm" / "values.yaml").read_text()
    assert "drain_timeout_s: 120" in values and "replacementSeconds: 60" in values
    assert "(120 s)" in PAGE and "+ `drain.replacementSeconds` (60 s)" in PAGE
