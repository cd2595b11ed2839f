"""``everwarm status`` says what the engines say."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cluster import status


def test_requests_wait_outside_the_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    load = {"running": 2, "waiting": 3}  # placement counts those in the batch that have no first token yet
    engine = {"replica": "a", "state": "open", "waiting": 1, "load": load, "counters": {}}
    lost = {"replica": "b", "state": "lost", "error": "no answer"}
    answers: dict[str, dict[str, Any]] = {
        "/v1/models": {"data": [{"id": "tiny", "max_model_len": 64}]},
        "/v1/engine": {"data": [engine, lost]},
        "/v1/directory?top=10": {"replicas": [], "router": "r", "in_sync": True, "pages": 0, "prefixes": []},
    }
    monkeypatch.setattr(status, "get", lambda client, path: answers[path])
    console = Console(file=io.StringIO(), width=120)
    replicas = status.show_status("http://nowhere", [], console)["replicas"]
    assert [(replica["running"], replica["waiting"]) for replica in replicas] == [(2, 1), (0, 0)]
    assert "2/1" in console.file.getvalue()  # type: ignore[attr-defined]
