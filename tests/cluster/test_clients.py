"""Each client's first-page example, unchanged but for base URL and model, against the embedded model.

openai and anthropic run with the tests' own interpreter. The others are heavy: ``make test-clients`` gives them an
environment of their own and names its interpreter in EVERWARM_CLIENTS_PYTHON; without it they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Deployed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240, func_only=True)]
SCRIPTS = Path(__file__).parents[1] / "clients"
CLIENTS = {
    "openai_sdk": "openai",
    "anthropic_messages": "anthropic",
    "langchain_chat": "langchain_openai",
    "llama_index_like": "llama_index.llms.openai_like",
    "instructor_extract": "instructor",
    "llm_cli": "llm",
}


def interpreter_with(module: str) -> str | None:
    for python in (sys.executable, os.environ.get("EVERWARM_CLIENTS_PYTHON")):
        probe = [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"]
        if python and subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("script", CLIENTS)
def test_first_page_example(default_model: Deployed, script: str, tmp_path: Path) -> None:
    python = interpreter_with(CLIENTS[script])
    if python is None:
        pytest.skip(f"{CLIENTS[script]} is not installed; see `make test-clients`")
    command = [python, str(SCRIPTS / f"{script}.py"), default_model.url, "SmolLM2-135M-Instruct"]
    done = subprocess.run(
        command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(CLIENTS)
