"""Grammars are compiled off the event loop, and a submission that waits for that can be cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from engine_harness import Harness

from replica.port import Preparer
from router.wire import Finish, Refusal, Sampling, Submit


def submit(name: str, grammar: tuple[str, str] | None = ("llguidance", "x")) -> Submit:
    return Submit(name, b"\0" * 4, 1, b"\0" * 16, b"", Sampling(grammar=grammar))


class SlowEngine:
    """``prepare`` blocks its thread until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: list[str] = []

    def prepare(self, request: Submit) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(10)


async def until_empty(preparer: Preparer) -> None:
    async with asyncio.timeout(10):
        while len(preparer) or preparer._tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_only_grammars_wait_and_the_loop_goes_on() -> None:
    engine: Any = SlowEngine()
    preparer, done = Preparer(), []
    preparer.run(engine, "router", submit("slow"), lambda owner, request: done.append(request.request_id))
    preparer.run(engine, "router", submit("free", None), lambda owner, request: done.append(request.request_id))
    assert done == ["free"] and ("router", "slow") in preparer
    await asyncio.sleep(0.02)
    engine.go.set()
    await until_empty(preparer)
    assert done == ["free", "slow"] and len(engine.threads) == 1 and "MainThread" not in engine.threads
    preparer.close()


async def test_what_is_cancelled_meanwhile_never_reaches_the_engine() -> None:
    engine: Any = SlowEngine()
    preparer, done = Preparer(), []
    for owner, name in (("a", "1"), ("a", "2"), ("b", "3"), ("c", "4")):
        preparer.run(engine, owner, submit(name), lambda owner, request: done.append(request.request_id))
    preparer.cancel("a", "1")
    preparer.cancel("a", "unknown")
    preparer.cancel_all("b")
    assert len(preparer) == 2
    engine.go.set()
    await until_empty(preparer)
    assert sorted(done) == ["2", "4"]
    preparer.close()


def test_the_engine_prepares_by_compiling_and_leaves_complaints_to_submit() -> None:
    compiled: list[tuple[str, str]] = []

    def masks(grammar: tuple[str, str]) -> Any:
        compiled.append(grammar)
        raise ValueError("no such grammar")

    harness = Harness(masks=masks)
    harness.engine.prepare(submit("x", None))
    assert not compiled
    harness.engine.prepare(submit("x"))
    assert len(compiled) == 1
    with pytest.raises(Refusal, match="no such grammar"):
        harness.submit([1, 2, 3], max_tokens=2, grammar=("llguidance", "x"))
    free = harness.submit([1, 2, 3], max_tokens=2)
    harness.finish()
    assert harness.outputs[free].finish == Finish.LENGTH
