"""What ``everwarm status`` and ``chat`` print; what others wrote comes as it is, brackets included."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster import chat, cli, status
from cluster.client import Unreachable


def test_requests_wait_outside_the_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    load = {"running": 2, "waiting": 3}  # placement counts those in the batch that have no first token yet
    engine = {"replica": "a", "state": "open", "waiting": 1, "load": load, "counters": {}}
    lost = {"replica": "b", "state": "lost", "error": "no [/answer]"}
    answers: dict[str, dict[str, Any]] = {
        "/v1/models": {"data": [{"id": "tiny", "max_model_len": 64}]},
        "/v1/engine": {"data": [engine, lost]},
        "/v1/directory?top=10": {"replicas": [], "router": "r", "in_sync": True, "pages": 0, "prefixes": []},
    }
    monkeypatch.setattr(status, "get", lambda client, path: answers[path])
    console = Console(file=io.StringIO(), width=120)
    replicas = status.show_status("http://[fe80::1]:8000", [], console)["replicas"]
    assert [(replica["running"], replica["waiting"]) for replica in replicas] == [(2, 1), (0, 0)]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2/1" in shown and "tiny at http://[fe80::1]:8000" in shown and "no [/answer]" in shown


SAID = "no cluster answers at http://[fe80::1]:8000: [/INST] is no role"


def refuse(*_: Any) -> Any:
    raise Unreachable(SAID)


def test_status_prints_what_is_wrong_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "get", refuse)
    console = Console(file=io.StringIO(), width=120)
    assert not status.show_status("http://nowhere", [], console)["ready"]
    assert SAID in console.file.getvalue()  # type: ignore[attr-defined]


def talking(monkeypatch: pytest.MonkeyPatch, stream: Any) -> Console:
    """A console at which somebody says two things to the model org/[tiny], which ``stream`` answers."""
    turns = iter(["hi", "again", ""])
    console = Console(file=io.StringIO(), width=120)
    monkeypatch.setattr(console, "input", lambda *_: next(turns))
    monkeypatch.setattr(chat, "get", lambda *_: {"data": [{"id": "org/[tiny]"}]})
    monkeypatch.setattr(chat, "stream", stream)
    return console


def test_chat_prints_what_is_wrong_as_it_is_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise chat.StreamError(SAID)

    console = talking(monkeypatch, failing)
    assert chat.converse("http://nowhere", [], None, 0.0, 8, console) == 0
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "org/[tiny]; an empty line ends" in shown and shown.count(SAID) == 2
    monkeypatch.setattr(chat, "get", refuse)
    assert chat.converse("http://nowhere", [], None, 0.0, 8, console) == 1
    assert console.file.getvalue().count(SAID) == 3  # type: ignore[attr-defined]


def test_chat_shows_reasoning_and_does_not_send_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[dict[str, str]]] = []

    def answer(_: Any, body: dict[str, Any]) -> Any:
        sent.append([*body["messages"]])
        for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "hm [/x]"}, {"content": "yes"}, {}):
            yield {"choices": [{"delta": delta}]}

    console = talking(monkeypatch, answer)
    assert chat.converse("http://nowhere", [], None, 0.0, 8, console) == 0
    assert console.file.getvalue().count("hm [/x]\n\nyes\n") == 2  # type: ignore[attr-defined]
    assert sent[1][1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "ftp://x", "http://[::1", "http://x:y"])
@pytest.mark.parametrize("command", ["status", "chat"])
def test_what_is_no_url_is_refused(command: str, url: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--url", url])
    assert result.exit_code == 2 and "http://127.0.0.1:8000 is needed" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["status", "doctor", "verify", "bench engine", "bench serve"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "figures.json"):
        result = CliRunner().invoke(cli.app, [*command.split(), "--json", str(path)])
        assert result.exit_code == 2 and "--json" in result.output
