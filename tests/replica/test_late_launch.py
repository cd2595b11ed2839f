"""On a GPU the next step is launched late, so that whoever arrives while a step runs is in the one after it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from cluster.bench.schedule import Clock, Costs, VirtualRunner, Workload
from replica.lead import FIRST_S, LEAST_S, MOST_S, LaunchLead
from replica.loop import Engine
from replica.outbox import HEARTBEAT_S
from replica.step_time import StepShape
from router.pages import RootFields, chain, pack_tokens
from router.wire import EventBatch, Sampling, Submit
from tests.replica.engine_harness import Harness

STEP_MS = 300.0


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_arrival_is_in_the_step_after_the_one_under_way(device: str) -> None:
    harness = Harness(step_ms=STEP_MS, chunk_size=64)
    engine = harness.engine
    engine.config = dataclasses.replace(engine.config, device=device)
    for number in range(80):  # a fit that knows how long steps take
        engine.step_time.update(StepShape(8 * (number % 2), 0.0, 40, 1), STEP_MS)
    engine.step_time.settle()
    engine.outbox.fit = (1e-3, 0.0, STEP_MS, 0.0, 0.0)
    first = harness.submit(list(range(20)), max_tokens=8)
    while len(harness.outputs[first].ids) < 2:
        harness.step(audit=False)
    under_way = len(harness.batches)
    harness.step(audit=False)
    second = harness.submit(list(range(30, 50)), max_tokens=2)
    while not any(row.num_prompt == 20 and row.start == 0 for batch in harness.batches[1:] for row in batch.rows):
        harness.step(audit=False)
    between = len(harness.batches) - 1 - under_way
    assert between == 0 if device == "cuda" else between >= 1
    while harness.outputs[second].finish is None:
        harness.step(audit=False)
    assert len(harness.outputs[second].ids) == 2
    harness.audit()


def test_without_a_fit_steps_are_launched_at_once() -> None:
    harness = Harness(step_ms=50.0)
    harness.engine.config = dataclasses.replace(harness.engine.config, device="cuda")
    harness.submit(list(range(20)), max_tokens=6)
    harness.step(2, audit=False)
    assert len(harness.batches) == 2, "the second is launched while the first runs"


@pytest.mark.parametrize("need_ms", [0.7, 1.1, 1.9, 3.5])
def test_the_lead_is_what_the_host_needs(need_ms: float) -> None:
    """About one launch in fifty is late, whatever the host takes; when it takes longer, a few launches tell."""
    lead, noise = LaunchLead(), random.Random(0)

    def launch(need_ms: float) -> bool:
        late = lead.seconds < need_ms / 1e3 * noise.uniform(0.9, 1.1)
        lead.learn(late)
        return late

    for _ in range(2000):
        launch(need_ms)
    assert sum(launch(need_ms) for _ in range(5000)) == pytest.approx(5000 / 51, rel=0.1)
    assert need_ms * 0.85e-3 < lead.seconds < need_ms * 1.1e-3 + 3e-4
    assert sum(launch(need_ms + 1) for _ in range(20)) <= 7
    assert lead.wait_s(0.01) == pytest.approx(0.009 - lead.seconds)


def test_the_lead_has_bounds() -> None:
    lead = LaunchLead()
    assert lead.seconds == FIRST_S
    for late, bound in ((True, MOST_S), (False, LEAST_S)):
        for _ in range(1000):
            lead.learn(late)
        assert lead.seconds == bound
    assert lead.num_late == 1000


class Busy:
    """An engine on a virtual clock with more to do than it can, every step with changes to tell."""

    def __init__(self) -> None:
        config = Workload.parse("qwen3-8b", "S", '{"chunk_size": 256}', "{}", 0, None).config
        self.clock, self.batches = Clock(), list[tuple[float, EventBatch]]()
        runner = VirtualRunner(self.clock, Costs(), config, vocab_size=1000)
        self.engine = Engine(
            config, runner, root=RootFields("bench", "none", config.kv_cache_dtype, config.page_size),
            on_deltas=lambda deltas: None, on_events=lambda batch: self.batches.append((self.clock.now, batch)),
            clock=self.clock,
        )  # fmt: skip
        root = self.engine.root.root()
        for number in range(120):
            length = 400 + number % config.page_size  # so that in every step somebody fills a page
            packed = pack_tokens([number] * length)
            hashes = b"".join(chain(root, packed, config.page_size))
            sampling = Sampling(temperature=0, max_tokens=200)
            self.engine.submit(self, Submit(str(number), packed, length, root, hashes, sampling))

    def run(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.engine.iterate()
            self.clock.now += 5e-5


def test_a_busy_engine_tells_what_steps_cost() -> None:
    """Between batches that steps bring there is never a heartbeat's silence."""
    busy = Busy()
    busy.run(1.2)
    silences = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(busy.batches)]
    assert len(busy.batches) > 40 and max(silences) < HEARTBEAT_S
    assert busy.engine.step_time.num_steps[1] >= 20, "too few prefills for a fit"
    a = busy.batches[-1][1].load.coefficients[0]
    assert 0.01 < a < 0.03
    assert busy.engine.lead.seconds < FIRST_S, "it launches late, and learns how late"
    steps = busy.engine.info()["steps"]
    assert (steps["lead_ms"], steps["late"]) == (busy.engine.lead.seconds * 1e3, busy.engine.lead.num_late)
