"""The engine: one thread that schedules, launches and reads back, one step ahead of the device.

    device      | step k ......... | step k+1 ....... | step k+2 ...
    loop thread   schedule+launch k+1 | read k | schedule+launch k+2 | read k+1

While step k runs, step k+1 is scheduled with what is certain: ids not yet read back are FROM_DEVICE, ends by count are
predicted, an end by a stop id is noticed one step late and its surplus token dropped. Everything that makes a page or
a token *visible* happens at read-back, so a step that fails leaves nothing to undo but its own requests.

Other threads reach the loop only through its inbox. The loop never blocks longer than a heartbeat.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from replica.batch import Row, Runner, Step, StepResult, finish_of
from replica.config import ResolvedConfig
from replica.events import EventLog
from replica.host_tier import HostTier
from replica.inbox import Inbox
from replica.lead import LaunchLead
from replica.masking import MaskFactory
from replica.outbox import Outbox
from replica.page_pool import PagePool
from replica.request import Request, build_request
from replica.scheduler import Scheduler
from replica.speculation import Speculation
from replica.status import Health, describe, probe
from replica.step_time import StepTimeModel
from replica.turn import Plan
from replica.watch import Watch
from router.pages import RootFields, keys64
from router.wire import Code, EventBatch, Finish, Refusal, Snapshot, Submit, TokenDelta

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # so many in a row mean a broken device rather than broken requests
ARRIVAL_POLL_S = 0.01  # how late an arrival may be noticed while a step runs and the next could be launched
FIRST_OUT = 512  # what a step sampled goes out before its pages are published when a request has so many tokens of them


@dataclass(slots=True)
class _Flight:
    plan: Plan
    step: Step
    launched: float


class Engine:
    """Continuous batching over one Runner. Callbacks run on the engine thread and must return quickly.

    ``on_deltas`` gets, once per processed step, every (owner, delta); owner is the object given to ``submit``.
    ``on_events`` gets one EventBatch per step with changes and a heartbeat at least every 50 ms.
    ``on_said`` is called once after either or both, so that a step's output can be sent in one go.
    ``masks`` makes a request's grammar mask source; without it, grammars are refused. ``clock``: seconds.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        *,
        root: RootFields,
        replica_id: str = "local",
        on_deltas: Callable[[list[tuple[Any, TokenDelta]]], None],
        on_events: Callable[[EventBatch], None],
        on_said: Callable[[], None] = lambda: None,
        masks: MaskFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        room = (runner.num_pages - 1) * config.page_size
        max_model_len = min(config.max_model_len, runner.max_model_len, room)
        self.config = replace(config, num_pages=runner.num_pages, max_model_len=max_model_len)
        self.root = root
        self.events = EventLog(replica_id)
        self.step_time, self.lead = StepTimeModel(), LaunchLead()
        cached = min(config.prefix_cache_max_pages, runner.num_pages - 1)
        self.host = HostTier(config.num_host_pages, self.events) if config.num_host_pages else None
        parts = (self._audit_states, self._audit_index, self._audit_events, self._audit_requests)
        self.watch = Watch(self.config, self.events, runner, audit=parts, end=self._end)
        self.pool = PagePool(runner.num_pages, self.watch.sink, max_cached=cached, host=self.host)
        self.speculation = Speculation.of(self.config, self.step_time)
        self.scheduler = Scheduler(self.config, self.pool, self.speculation, self.step_time)
        self.counters: Counter[str] = Counter()
        self.runner, self._vocab_size = runner, runner.vocab_size
        self._masks = masks
        self._clock = clock
        self._depth = 2 if config.async_scheduling else 1
        self._flights: deque[_Flight] = deque()
        self._live: dict[tuple[int, str], Request] = {}
        self._taking = threading.Lock()
        """Held while a request is live and not yet on its way to the scheduler."""
        self._deadlines: list[tuple[float, int, Request]] = []
        self._unsettled: list[tuple[Request, Finish | None]] = []
        """Of the step being read back: those with pages to publish, a first token or an end."""
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._started = False
        self._stopping = self.draining = False
        self._fatal: str | None = None
        self._serials = itertools.count()
        self.num_steps = self._failed_in_a_row = 0
        self._last_done = self._clock()
        self.step_ms: deque[float] = deque(maxlen=1024)
        self.outbox = Outbox(
            self.events, self.scheduler, self.step_time,
            on_deltas=on_deltas, on_events=on_events, on_said=on_said, clock=clock,
        )  # fmt: skip

    # --- what other threads call

    def start(self) -> None:
        """Raises RuntimeError after ``stop``."""
        if self._stopping:
            raise RuntimeError("a stopped engine can't be started again")
        if not self._started:
            self._started = True
            self._inbox.open(self._thread)
            self._thread.start()

    def stop(self) -> None:
        """Ends the loop at once; live requests get no further delta. Drain first to end them properly."""
        self._stopping = True
        self._inbox.wake()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch: still on their way to the scheduler, queued, or preempted."""
        return len(self._live) - len(self.scheduler.running)

    def prepare(self, request: Submit) -> None:
        """Compiles the request's grammar, if it has one and it is new, so that :meth:`submit` is quick."""
        if request.sampling.grammar is not None and self._masks is not None:
            with suppress(Exception):  # submit says what is wrong with it
                self._masks(request.sampling.grammar)

    def submit(self, owner: Any, request: Submit) -> None:
        """Takes the request or raises Refusal: invalid, overloaded or draining."""
        self._refuse_if_ended()
        if (num_waiting := self.num_waiting) >= self.config.max_waiting:
            raise Refusal(
                Code.OVERLOADED,
                f"{num_waiting} requests are waiting; at most {self.config.max_waiting} may",
                retry_after_s=min(60.0, max(1.0, self.scheduler.queued_tokens * self.outbox.fit[0] / 1e3)),
            )
        taken = build_request(request, owner, self.config, self.runner.vocab_size, self._clock(), self._masks)
        key = (id(owner), request.request_id)
        with self._taking:
            self._refuse_if_ended()
            if self._live.setdefault(key, taken) is not taken:
                raise Refusal(Code.INVALID, f"request_id: {request.request_id!r} is running already", "request_id")
            self._inbox.post(self._enqueue, taken)

    def _refuse_if_ended(self) -> None:
        if self._stopping or self.draining or self._fatal:
            raise Refusal(Code.DRAINING, self._fatal or "this replica takes no new requests", retry_after_s=1.0)

    def cancel(self, owner: Any, request_id: str) -> None:
        """Ends the request with a last delta, ABORT; does nothing when it is over or unknown."""
        with self._taking:
            request = self._live.get((id(owner), request_id))
        if request is not None:
            self._inbox.post(self._abort, request)

    def replay(self, from_seq: int) -> list[EventBatch] | None:
        """Event batches from ``from_seq`` on; None: too old, ask for a snapshot."""
        return self.events.replay(from_seq)

    def snapshot(self) -> list[Snapshot]:
        """Residency at a batch that ``on_events`` has been given before this returns."""
        return self._inbox.ask(lambda: self.outbox.snapshot(self.pool.residency))

    def drain(self) -> None:
        """No new requests from now on; those taken are finished."""
        self.draining = True

    def idle(self) -> bool:
        return not self._live

    @property
    def ended(self) -> str | None:
        """Why the loop does not run (any more); None while it does."""
        return self._fatal or ("the engine is not running" if self._stopping or not self._started else None)

    def health(self) -> Health:
        """A round trip through the loop, plus the age of the step that it waits for."""
        ended = self.ended
        if self._failed_in_a_row >= MAX_FAILED_STEPS:  # it fails fast, so it would look idle and draw all traffic
            ended = f"the last {self._failed_in_a_row} steps failed"
        return probe(self._inbox.ask, self._progress, self.step_ms, self.config.device, ended)

    def info(self) -> dict[str, Any]:
        """JSON-able state: config in force, pages, queue, step times, counters, the runner's description."""
        return self._inbox.ask(lambda: describe(self))

    def check_invariants(self) -> None:
        """Exact audit of pages, references, queues and the event stream; raises AssertionError."""
        self._inbox.ask(self._audit)

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.iterate()
        except BaseException as error:
            log.exception("the engine loop failed")
            with self._taking:
                self._fatal = f"the engine loop failed: {error!r}"
                ended = list(self._live.values())
                self._live.clear()
            for request in ended:
                delta = TokenDelta(request.request_id, [], Finish.ERROR, error=self._fatal)
                self.outbox.deltas.append((request.owner, delta))
            self.outbox.send_tokens()
        for flight in self._flights:
            flight.step.wait(5.0)
        self._stopping = True
        self._inbox.close()

    def iterate(self) -> None:
        """One turn of the loop. For the engine's thread, or for a caller who never starts it."""
        now = self._clock()
        self._inbox.run()
        self._expire(now)
        self.watch.turn(now, self.scheduler, idle=not self._live and not self._flights)
        depth = 1 if self.speculation is not None and self.speculation.waits else self._depth
        early = self._earliness(now)
        launched = early <= 0 and len(self._flights) < depth and self._launch(now)
        if launched and len(self._flights) < depth:
            return  # fill the pipeline before waiting for its head
        self.outbox.send()  # what the inbox brought is echoed now, not after a step
        patience = self.outbox.patience(now)
        if early > 0:
            patience = min(patience, early)
        if self._flights:
            if len(self._flights) < depth:
                patience = min(patience, ARRIVAL_POLL_S)
            if self._flights[0].step.wait(patience):
                self._read_back(self._flights.popleft())
        elif self.outbox.is_empty:
            self._inbox.wait(patience)
        self.outbox.send()

    def _earliness(self, now: float) -> float:
        """Seconds until the step after the one under way should be launched. The later it is, the more of those who
        arrive meanwhile are in it; but it has to be there when the device is done."""
        if len(self._flights) != 1 or not self._launches_late:
            return 0.0
        flight = self._flights[0]
        expected = self.step_time.predict(flight.plan.shape) / 1e3
        begun = max(flight.launched, self._last_done)
        return begun + self.lead.wait_s(expected) - now

    @property
    def _launches_late(self) -> bool:
        return self.config.device == "cuda" and self.outbox.fit[0] > 0

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.finish is None:
                self._end(request, Finish.DEADLINE)

    def _launch(self, now: float) -> bool:
        """Schedules and launches the next step; False when there is nothing to compute now."""
        scheduler = self.scheduler
        plan = scheduler.schedule(self.num_steps, now)
        for slot in scheduler.released_slots:
            self.runner.release(slot)
        scheduler.released_slots.clear()
        if self.host and (moves := self.host.take_moves()):
            self.runner.move(moves)
        if plan is None:
            if (scheduler.running or scheduler.waiting) and not self._flights:
                raise RuntimeError(f"{len(scheduler.waiting)} waiting requests can't be scheduled")
            return False
        self.num_steps += 1
        try:
            self._flights.append(_Flight(plan, self.runner.launch(plan.batch), now))
        except Exception as error:
            self._fail(plan, error)
        if len(self._flights) > 1 and self._launches_late:
            self.lead.learn(late=self._flights[0].step.wait(0.0))
        return True

    def _read_back(self, flight: _Flight) -> None:
        try:
            result = flight.step.result()
        except Exception as error:
            self._last_done = self._clock()
            self._fail(flight.plan, error)
            return
        self._failed_in_a_row = 0
        now = self._clock()
        step_ms = (now - max(flight.launched, self._last_done)) * 1e3
        self._last_done = now
        self.step_ms.append(step_ms)
        self.step_time.update(flight.plan.shape, step_ms)
        plan = flight.plan
        self.counters["prompt_tokens"] += plan.shape.prefill_tokens
        before = len(self.outbox.deltas)
        self._end_faulty(plan, result)
        for index, (request, row) in enumerate(zip(plan.requests, plan.batch.rows, strict=True)):
            if request.finish is None:
                self._advance(request, row, index, result)
            elif index not in result.faults:
                self.counters["wasted_tokens"] += row.num_samples
        self.counters["generated_tokens"] += sum(len(delta.ids) for _, delta in self.outbox.deltas[before:])
        self._settle()

    def _end_faulty(self, plan: Plan, result: StepResult) -> None:
        """Ends the requests of faulty rows and, where a fault came from a page that others share, its other readers."""
        spoilt = [page for page in result.spoilt if self.pool.is_indexed(page)]
        for index, fault in result.faults.items():
            if (request := plan.requests[index]).finish is None:
                self.scheduler.retract(request)
                self._end(request, finish_of(fault), fault)
        for page in spoilt:
            self.watch.distrust(page, self.scheduler, "a page of its context was not finite")

    def _advance(self, request: Request, row: Row, index: int, result: StepResult) -> None:
        """One sound row: its samples become tokens, its KV counts as written, up to the last accepted guess. What
        follows from that is for :meth:`_settle`."""
        if result.prompt_logprobs and (chunk := result.prompt_logprobs[index]) is not None:
            request.prompt_logprobs.extend(chunk)
        ids = result.ids[index]
        num_sampled, request.num_pending = len(ids), request.num_pending - row.num_samples
        finish, problem = request.take(ids, self._vocab_size)
        if problem is not None:
            self.scheduler.retract(request)
            self._end(request, Finish.ERROR, problem)
            return
        if len(ids) < num_sampled:
            self.counters["wasted_tokens"] += num_sampled - len(ids)
        if request.slot >= 0:  # else preempted since: its pages are gone, its tokens are not
            num_rejected = row.num_samples - len(ids)
            request.num_written = row.start + len(row.token_ids) - num_rejected
            request.num_computed -= num_rejected
        if finish is not None or not request.announced or request.num_written >= request.publish_at:
            self._unsettled.append((request, finish))
        if not row.num_samples:
            return
        if self.speculation is not None:
            self.speculation.observe(request, row, len(ids))
        logprobs = result.logprobs[index] if result.logprobs else None
        delta = TokenDelta(request.request_id, ids, finish, None, logprobs and logprobs[: len(ids)])
        self.outbox.deltas.append((request.owner, delta))
        if not request.announced:
            request.announced = True
            delta.num_cached = request.num_cached
            delta.prompt_logprobs = request.prompt_logprobs or None

    def _settle(self) -> None:
        """The pages of the step that was read back serve others from now on, and those of its requests that are over
        are let go. Nobody waits for a first token while the pages of a long prompt are published."""
        settled = self._unsettled
        if any(request.num_written - request.publish_at >= FIRST_OUT for request, _ in settled):
            self.outbox.send_tokens()
        for request, finish in settled:
            if request.num_written >= request.publish_at:
                self.scheduler.publish(request)
            if request.announced:
                self.events.end(request.request_id)
            if finish is not None:
                self._forget(request, finish)
        settled.clear()

    # --- how requests begin and end

    def _enqueue(self, request: Request) -> None:
        hits = self.scheduler.add(request)
        coming = request.hashes[hits:] if self.config.prefix_caching else []
        self.events.accept(request.request_id, keys64(coming))
        if request.num_tokens >= request.max_total:  # a resumed stream that had everything but its end
            self._end(request, Finish.LENGTH)
        elif request.deadline != float("inf"):
            if len(self._deadlines) > 64 + 2 * len(self._live):  # most are of requests long over
                self._deadlines = [entry for entry in self._deadlines if entry[2].finish is None]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, next(self._serials), request))

    def _abort(self, request: Request) -> None:
        if request.finish is None:
            self._end(request, Finish.ABORT)

    def _end(self, request: Request, finish: Finish, error: str | None = None) -> None:
        """Ends a request outside the normal flow, with a delta that says so."""
        if error is not None:
            log.warning("request %s failed: %s", request.request_id, error)
        delta = TokenDelta(request.request_id, [], finish, request.num_cached, error=error)
        self.outbox.deltas.append((request.owner, delta))
        self._forget(request, finish)

    def _forget(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        self.scheduler.remove(request)
        self.events.end(request.request_id)
        self.counters[f"finished_{finish.value}"] += 1
        self._live.pop((id(request.owner), request.request_id), None)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """A whole step failed. Pages are published at read-back only, so none that it touched is indexed."""
        log.error("step %d failed", plan.batch.step, exc_info=error)
        self.counters["failed_steps"] += 1
        self._failed_in_a_row += 1
        for request in plan.requests:
            if request.finish is None:
                self._end(request, Finish.ERROR, f"the engine step failed: {error!r}")

    # --- what is asked of the loop

    def _progress(self) -> tuple[float, float]:
        if not self._flights:
            return 0.0, 0.0
        flight = self._flights[0]
        age = self._clock() - max(flight.launched, self._last_done)
        return age, self.step_time.predict(flight.plan.shape) / 1e3

    def _audit(self) -> None:
        self._audit_states()
        self._audit_index()
        self._audit_events()
        self._audit_requests()

    def _audit_states(self) -> None:
        self.pool.check_states()

    def _audit_index(self) -> None:
        self.pool.check_index()

    def _audit_events(self) -> None:
        self.events.check_invariants(self.pool.residency())

    def _audit_requests(self) -> None:
        self.scheduler.check_requests()
        with self._taking:
            live, coming = set(self._live.values()), self._inbox.pending(self._enqueue)
        known = {*self.scheduler.running, *self.scheduler.waiting, *coming}
        assert live == known, "live and scheduled requests differ"
