"""The whole engine under random operations: submissions, cancellations, faults, failed steps, tiny pools, right and
wrong guesses to verify.

After every operation: exact audit, and a consumer of the event stream knows exactly the pool's residency. In the end
every request has its own right tokens, or the end that was inflicted on it, and no page is held.
"""

from __future__ import annotations

import random

from drafters import StubOracle
from engine_harness import VOCAB, Harness, host_gb
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replica.stub import expected_ids
from router.pages import unpack_keys
from router.wire import Finish

_expected: dict[tuple, list[int]] = {}


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    key = (prompt, count)
    if key not in _expected:
        _expected[key] = expected_ids(list(prompt), count, seed=0, vocab_size=VOCAB)
    return _expected[key]


def family(branch: int, length: int) -> tuple[int, ...]:
    """Prompts of a branch are prefixes of each other; branches share their first 40 tokens."""
    trunk = random.Random(0)
    head = [trunk.randrange(VOCAB) for _ in range(40)]
    tail = random.Random(branch + 1)
    return tuple((head + [tail.randrange(VOCAB) for _ in range(200)])[:length])


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        async_scheduling=st.booleans(),
        prefix_caching=st.sampled_from([True, True, False]),
        chunk=st.sampled_from([8, 32, 256]),
        busy=st.sampled_from([None, 8]),
        pages=st.sampled_from([12, 20, 60]),
        capacity=st.sampled_from(["auto", 3]),
        priority=st.sampled_from(["low", "high"]),
        scheduler=st.sampled_from(["continuous", "continuous", "static"]),
        wrong_every=st.sampled_from([None, None, 1, 3, 1000]),
        host=st.sampled_from([0, 3, 30]),
    )
    def start(
        self, async_scheduling, prefix_caching, chunk, busy, pages, capacity, priority, scheduler, wrong_every, host
    ) -> None:
        self.fail_step = False
        self.fail_row: int | None = None
        self.harness = Harness(
            before_step=self.before_step,
            async_scheduling=async_scheduling,
            prefix_caching=prefix_caching,
            chunk_size=chunk,
            busy_chunk_size=busy,
            max_num_pages=pages,
            prefix_cache_max_pages=capacity,
            prefill_priority=priority,
            scheduler=scheduler,
            max_batch_size=6,
            max_model_len=170,
            watermark=0.0,
            speculative="off" if wrong_every is None else "ngram",
            host_cache_gb=host_gb(host) if prefix_caching else 0,
        )
        if wrong_every is not None:
            self.harness.engine.speculation.drafter = StubOracle(0, VOCAB, wrong_every)
        self.requests: dict[str, tuple[tuple[int, ...], int, int]] = {}
        self.cancelled: set[str] = set()

    def before_step(self, batch) -> dict[int, str] | None:
        if self.fail_step:
            self.fail_step = False
            raise RuntimeError("injected step failure")
        if self.fail_row is not None:
            row, self.fail_row = self.fail_row % len(batch.rows), None
            return {row: "injected row fault"}
        return None

    @rule(
        branch=st.integers(0, 2),
        length=st.sampled_from([1, 15, 16, 17, 32, 47, 48, 49, 64, 90, 150]),
        count=st.sampled_from([1, 2, 16, 40]),
        emitted=st.sampled_from([0, 0, 0, 5]),
        salt=st.sampled_from(["", "", "other"]),
        level=st.integers(-1, 1),
    )
    def submit(self, branch, length, count, emitted, salt, level) -> None:
        prompt = family(branch, min(length, 170 - 1))
        full = expected(prompt, min(count, 170 - len(prompt)))
        done = full[: min(emitted, len(full))]
        request_id = self.harness.submit(prompt, emitted=done, max_tokens=count, salt=salt, priority=level)
        self.requests[request_id] = (prompt, count, len(done))

    @rule(pick=st.integers(0, 30))
    def cancel(self, pick) -> None:
        open_ids = [r for r in self.requests if self.harness.outputs[r].finish is None]
        if open_ids:
            request_id = open_ids[pick % len(open_ids)]
            self.harness.engine.cancel(self.harness, request_id)
            self.cancelled.add(request_id)

    @rule(count=st.integers(1, 8))
    def step(self, count) -> None:
        self.harness.step(count)

    @rule(row=st.integers(0, 5))
    def spoil_a_row(self, row) -> None:
        self.fail_row = row
        self.harness.step(2)

    @rule()
    def spoil_a_step(self) -> None:
        self.fail_step = True
        self.harness.step(2)

    @rule()
    def resync(self) -> None:
        """A snapshot and a replay say the same as the stream so far."""
        chunks = self.harness.engine.snapshot()
        assert chunks[-1].seq == self.harness.mirror.batches[-1].seq
        listed: list[set[int]] = [set(), set()]
        for chunk in chunks:
            listed[chunk.tier].update(unpack_keys(chunk.keys))
        assert listed == [self.harness.mirror.keys, self.harness.mirror.host]
        assert dict(chunks[-1].reservations) == self.harness.mirror.reservations
        assert self.harness.engine.replay(chunks[-1].seq + 1) == []

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "harness"):
            self.harness.audit()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.fail_step, self.fail_row = False, None
        self.harness.finish(audit=False)
        for request_id, (prompt, count, skipped) in self.requests.items():
            output = self.harness.outputs[request_id]
            ids = expected(prompt, min(count, 170 - len(prompt)))[skipped:]
            assert output.ids == ids[: len(output.ids)], "wrong tokens"
            if output.finish == Finish.ERROR:
                assert "injected" in output.error
            elif output.finish == Finish.ABORT:
                assert request_id in self.cancelled
            else:
                assert output.finish == Finish.LENGTH and output.ids == ids


EngineMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_engine_model = EngineMachine.TestCase
