"""Many random requests against a tiny model; and that the soak would have noticed what it looks for."""

from __future__ import annotations

import itertools
import time

import pytest

from replica.soak import Soak
from router.wire import Finish


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int4", "seed": 1}], ids=["exact", "int4"])
def test_nothing_wears_out(options: dict) -> None:
    soak = Soak(4000, **options)
    try:
        figures = soak.run()
    finally:
        soak.close()
    assert not figures["problems"], figures
    assert figures["memory_growth"] is not None
    assert figures["audits"] == 17 and figures["canary"]["compared"] > 1000


@pytest.mark.slow
def test_steps_that_get_slower_would_have_been_noticed() -> None:
    soak = Soak(400)
    enqueue, steps = soak.llm.engine.runner._enqueue, 0

    def slower(batch):
        nonlocal steps
        steps += 1
        until = time.thread_time() + 1e-5 * steps
        while time.thread_time() < until:
            pass
        return enqueue(batch)

    soak.llm.engine.runner._enqueue = slower
    try:
        figures = soak.run()
    finally:
        soak.close()
    assert any("slower" in problem for problem in figures["problems"]), figures["slower"]


def test_a_damaged_page_would_have_been_noticed() -> None:
    soak = Soak(100)
    engine, flipped = soak.llm.engine, []

    def flip(sent: int, memory: int) -> None:
        if sent >= 40 and (keys := engine.pool.keys()):
            page = engine.pool.page_of(keys[0])
            if page is not None:
                engine.runner.kv.flip_bit(page, word=7, bit=6)
                flipped.append(page)

    try:
        figures = soak.run(flip)
    finally:
        soak.close()
    assert flipped and figures["problems"], "neither the canary nor a probe saw it"
    assert sum(figures["ends"].get(str(finish), 0) for finish in Finish) == 100


@pytest.mark.parametrize("settled", [10, 90, 2000])
def test_memory_that_grows_would_have_been_noticed(settled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the allocator has settled, and not before."""
    monkeypatch.setattr("replica.soak.SETTLED", settled)
    memory = itertools.count(1 << 30, 50 << 20)  # what a process really holds hangs on the tests before this one
    monkeypatch.setattr("replica.soak.resident_bytes", lambda: next(memory))
    soak = Soak(100)
    try:
        figures = soak.run()
    finally:
        soak.close()
    grew = any("memory grew" in problem for problem in figures["problems"])
    assert grew == (settled < 100)
    assert (figures["memory_growth"] is None) == (settled > 100)


def test_a_run_without_time_has_shown_nothing() -> None:
    soak = Soak(100)
    try:
        figures = soak.run(seconds=1e-9)
    finally:
        soak.close()
    assert figures["requests"] == 0 and figures["memory_growth"] is None
    assert "no probes: the load is too light to show anything" in figures["problems"]
