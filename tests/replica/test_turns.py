"""Short and long prompts in turn, under whatever arrives: sharing, preemption, cancellation, eviction, guesses."""

from __future__ import annotations

import random

import pytest
from drafters import StubOracle
from engine_harness import VOCAB, Harness, host_gb

from replica.stub import expected_ids
from replica.turn import Plan, Turn
from router.wire import Finish

BUSY, LONG = 16, 24


class Observer:
    """Stands between an engine and its scheduler, and checks each step that is handed out."""

    def __init__(self, harness: Harness) -> None:
        self.scheduler = harness.engine.scheduler
        self._open, self._schedule = self.scheduler._open_turn, self.scheduler.schedule
        self.scheduler._open_turn, self.scheduler.schedule = self.open, self.schedule  # type: ignore[method-assign]
        self.turn: Turn | None = None
        self.num_apart = {"short": 0, "long": 0}
        self.left_out = {"short": 0, "long": 0}
        """Steps that may be long in a row, that held none of these while one was admitted."""

    def open(self, *running) -> Turn:
        self.turn = self._open(*running)
        self.budget = self.turn.budget
        return self.turn

    def schedule(self, step: int, now: float) -> Plan | None:
        at_first = [
            (request, request.num_total - request.num_computed)
            for request in self.scheduler.running
            if not request.is_decoding
        ]
        plan = self._schedule(step, now)
        assert plan is not None or not at_first, "a prompt under way was left alone"
        if plan is not None:
            self.check(plan, at_first)
        return plan

    def check(self, plan: Plan, at_first) -> None:
        assert plan.batch.num_tokens <= self.budget
        if self.budget <= BUSY:
            return
        left = []
        for request, row in zip(plan.requests, plan.batch.rows, strict=True):
            total = request.num_total - row.num_samples
            if total <= request.admitted_total:
                left.append(total - row.start)
        cap = self.turn.cap
        assert len(left) <= 1 or max(left) <= cap, (left, cap)
        held = {"short": any(count <= cap for count in left), "long": any(count > cap for count in left)}
        for kind, is_held in held.items():
            self.num_apart[kind] += is_held
            waits = any((count > cap) == (kind == "long") for _, count in at_first)
            self.left_out[kind] = self.left_out[kind] + 1 if waits and not is_held else 0
            assert self.left_out[kind] <= 1, f"{kind} prompts were left out twice"


@pytest.mark.parametrize("seed", range(24))
def test_turns(seed: int) -> None:
    rng = random.Random(seed)
    guesses, host = rng.choice([None, None, 3]), rng.choice([0, 0, 20])
    harness = Harness(
        chunk_size=128, busy_chunk_size=BUSY, long_prefill_tokens=LONG, max_batch_size=rng.choice([4, 16]),
        max_prefill_batch=rng.choice([1, 3, 8]), max_num_pages=rng.choice([25, 60, 300]), max_model_len=350,
        prefill_priority=rng.choice(["low", "high"]), async_scheduling=rng.random() < 0.5, watermark=0.0,
        speculative="off" if guesses is None else "ngram", host_cache_gb=host_gb(host),
    )  # fmt: skip
    if guesses is not None:
        harness.engine.speculation.drafter = StubOracle(0, VOCAB, guesses)
    observer = Observer(harness)
    trunks = [[rng.randrange(VOCAB) for _ in range(320)] for _ in range(3)]
    asked, cancelled = {}, set()
    for _ in range(50):
        trunk, shared = rng.choice(trunks), rng.choice([0, 16, 100, 300])
        prompt = trunk[:shared] + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 10, 24, 25, 50, 200]))]
        prompt, count = prompt[:330], rng.choice([1, 2, 10, 20])
        for _ in range(rng.choice([1, 1, 1, 6])):
            name = harness.submit(prompt, max_tokens=count, temperature=0, priority=rng.choice([0, 0, 1]))
            asked[name] = (prompt, count)
            if rng.random() < 0.2:
                harness.engine._inbox.run()
                harness.request(name).arrival -= 10  # it has aged
        if rng.random() < 0.2 and harness.outputs[name := rng.choice(list(asked))].finish is None:
            harness.engine.cancel(harness, name)
            cancelled.add(name)
        harness.step(rng.randrange(8))
    harness.finish(audit=False)
    assert min(observer.num_apart.values()) > 0
    for name, (prompt, count) in asked.items():
        output, ids = harness.outputs[name], expected_ids(prompt, count, seed=0, vocab_size=VOCAB)
        assert output.ids == ids or (name in cancelled and output.finish == Finish.ABORT), name
