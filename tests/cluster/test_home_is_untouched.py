"""A test session that starts the cluster must leave the user's home exactly as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = "def test_probe(cluster):\n    assert cluster.url\n"


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_whole_session_leaves_the_home_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "kept").mkdir(parents=True)
    (home / "kept" / "file").write_text("mine")
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (suite / "test_probe.py").write_text(PROBE)
    markers = ["-o", "markers=ray", "-p", "no:cacheprovider", "--rootdir", str(suite)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *markers, str(suite)],
        env={**os.environ, "HOME": str(home)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    left = sorted(str(p.relative_to(home)) for p in home.rglob("*"))
    assert left == ["kept", "kept/file"] and (home / "kept" / "file").read_text() == "mine"
