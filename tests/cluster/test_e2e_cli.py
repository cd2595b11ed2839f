"""The commands that talk to a running cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Deployed
from typer.testing import CliRunner

from cluster.cli import app

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240, func_only=True)]


def test_status_shows_what_the_cluster_says(pair: Deployed, tmp_path: Path) -> None:
    report = tmp_path / "status.json"
    result = CliRunner().invoke(app, ["status", "--url", pair.url, "--json", str(report)])
    assert result.exit_code == 0, result.output
    status = json.loads(report.read_text())
    assert status["ready"] and status["model"] == "tiny" and len(status["replicas"]) == 2
    for replica in status["replicas"]:
        assert replica["state"] == "open" and replica["replica"] in result.output
        pages = replica["pages"]
        assert pages["free"] + pages["cached"] + pages["held"] == pages["all"] == 1023


def test_chat_answers_until_an_empty_line(pair: Deployed) -> None:
    arguments = ["chat", "--url", pair.url, "--max-tokens", "5", "--temperature", "0"]
    result = CliRunner().invoke(app, arguments, input="hello\nand again\n\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("prompt tokens were cached") == 2


@pytest.mark.parametrize("command", ["status", "chat"])
def test_nothing_there_is_exit_code_one(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1 and "no cluster answers" in result.output.lower()
