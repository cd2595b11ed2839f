"""Who computes what in the next step: one token budget, handed out in one pass.

Order of service. Every request has one key for life, ``arrival + priority * ageing_s``: a level of priority is worth
``ageing_s`` seconds of waiting, so nobody is overtaken for ever, and a victim of preemption keeps its place.

Bounds that hold whatever arrives:

- A request that is admitted owns the pages of all its known tokens, so only decoding grows, by at most one page per
  request and step, and over-admission can't make admitted prompts starve each other.
- A victim has sampled since it was admitted, or it is the very request that needs the page. So every preemption is
  paid for by a new token: preemptions <= tokens, and thrash can't happen.
- A request that waited ``ageing_s`` and finds no room is not overtaken any more.
- A long prompt gets at least min(long_prefill_tokens, half the step, what decoding leaves) tokens in each step it is
  first in line; where steps may be long, at least every other such step, to itself.
- Where prefill goes first, nobody who decodes is left out for longer than ``ageing_s``.
- A request may wait for a page that another computes (single flight), but only for one that is admitted; admitted
  requests wait for nobody, and whoever leaves, for whatever reason, gives its claims up.
"""

from __future__ import annotations

from bisect import insort
from itertools import takewhile
from math import inf
from operator import attrgetter

import numpy as np

from replica.batch import NULL_PAGE
from replica.config import ResolvedConfig
from replica.page_pool import PagePool
from replica.request import Request
from replica.speculation import Speculation
from replica.step_budget import StepBudget
from replica.step_time import StepTimeModel
from replica.turn import Kind, Plan, Turn

LOOKAHEAD = 16
"""Waiting requests without room that admission looks past, in one step."""
_key = attrgetter("key")


class Scheduler:
    """Owns the waiting and running requests, their slots and their pages. Not thread-safe."""

    def __init__(
        self,
        config: ResolvedConfig,
        pool: PagePool,
        speculation: Speculation | None = None,
        step_time: StepTimeModel | None = None,
    ) -> None:
        """``step_time``: the fit that ``itl_target_ms`` is held by."""
        self.config = config
        self._step_budget = StepBudget(config, step_time or StepTimeModel())
        self.pool = pool
        self.speculation = speculation
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.released_slots: list[int] = []
        """Slots given up since the loop last told the runner."""
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        """Tokens looked up, and found, at first admissions."""
        self._computing: dict[bytes, Request] = {}
        self._free_slots = list(range(config.max_batch_size - 1, -1, -1))
        self._passed_over = False
        """The next long step is a long prompt's, as one had to let short ones pass; without a free slot it stays so."""
        self._all_decoded = -inf
        """When a step last had a token for each that decodes."""
        self._serial = 0
        self.queued_tokens = 0
        """Tokens that the waiting have to prefill, as estimated when they were queued."""
        self._watermark = int(config.watermark * (pool.num_pages - 1)) if config.kv_cache_paging else 0

    # --- requests come and go

    def add(self, request: Request) -> int:
        """Queues a request; returns how many of its pages are there now, on the device or the host."""
        request.key = (request.arrival + request.priority * self.config.ageing_s, self._serial)
        self._serial += 1
        hits = self._match(request, self._hit_limit(request))[1]
        self._enqueue(request, request.num_tokens - hits * self.config.page_size)
        return hits

    def remove(self, request: Request) -> None:
        """The request is over, from whatever state."""
        if request.slot >= 0:
            self._leave(request)
        else:
            self.waiting.remove(request)
            self.queued_tokens -= request.uncached_estimate

    def _enqueue(self, request: Request, uncached: int) -> None:
        request.uncached_estimate = uncached
        self.queued_tokens += uncached
        insort(self.waiting, request, key=_key)

    def publish(self, request: Request) -> None:
        """Full pages among the num_written tokens, read back as sound, may serve others from now on."""
        size = self.config.page_size
        while request.num_written >= request.publish_at:
            index = request.num_published
            page_hash = request.hash_of(index, size)
            page = int(request.table[index])
            answer = self.pool.publish(page, page_hash, request.tail)
            if answer == NULL_PAGE:
                request.publish_at = inf
                self._give_up_claims(request)
                return
            if self._computing.get(page_hash) is request:
                del self._computing[page_hash]
            if answer != page:
                request.pins.append((index, answer))
            request.tail = answer
            request.num_published = index + 1
            request.publish_at += size

    def retract(self, request: Request) -> None:
        """What this request computed is in doubt: no page of it, nor any built upon one, serves others."""
        doubtful = request.hashes[request.num_hits :]
        self.pool.unpublish(list(takewhile(bool, map(self.pool.lookup, doubtful))))
        if self.pool.host:
            self.pool.host.drop(doubtful)

    # --- one step

    def schedule(self, step: int, now: float) -> Plan | None:
        """The next step, or None when nothing can be computed now. ``now`` is on the clock of ``Request.arrival``."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            progressed = request.num_tokens + request.num_pending > request.admitted_total
            (decoding if progressed else prefilling).append(request)
        turn = self._open_turn(decoding, prefilling)
        apart = turn.budget > self._step_budget.typical and self.config.scheduler == "continuous"
        prefill = self._prefill_apart if apart else self._prefill_together
        prefill_first = self.config.prefill_priority == "high" and now - self._all_decoded < self.config.ageing_s
        if prefill_first:
            prefill(prefilling, turn, now)
        if self._decode(decoding, turn):
            self._all_decoded = now
        if not prefill_first:
            prefill(prefilling, turn, now)
        if turn.preempted and not self.running:  # alone, it gave itself up for the copies it pinned: now there is room
            self._admit(turn, now)
        if self.speculation is not None:
            self.speculation.extend(turn, self.pool, self.config.page_size)
        return turn.plan(step, self.config.page_size) if turn.grants else None

    def _open_turn(self, decoding: list[Request], prefilling: list[Request]) -> Turn:
        cap, most = self.config.long_prefill_tokens, self.config.chunk_size
        if not self._step_budget.varies or not (prefilling or self.waiting):
            return Turn(most, cap, cap)
        context = sum(request.num_computed for request in decoding)
        start = prefilling[0].num_computed if prefilling else 0
        budget = self._step_budget.tokens(context, len(decoding), start)
        cap = min(cap, max(1, budget // 2))
        return Turn(budget, cap, cap)

    def _decode(self, decoding: list[Request], turn: Turn) -> bool:
        """False: the budget was gone before everybody had a token."""
        size, grants, room = self.config.page_size, turn.grants, turn.budget
        for request in decoding:
            if request.num_tokens + request.num_pending >= request.max_total or request.slot < 0:
                continue
            if room <= 0:
                turn.budget = room
                return False
            if request.num_computed >= request.num_pages * size and not self._grow(request, turn):
                continue
            grants[request] = 1
            room -= 1
        turn.budget = room
        return True

    def _grow(self, request: Request, turn: Turn) -> bool:
        """One more page, at the expense of the last in line if need be; False when that is the request itself."""
        while not self.pool.num_available:
            victim = next(r for r in reversed(self.running) if r is request or r.is_decoding)
            assert victim not in turn.grants, "decoding is served best first, so the last in line has no row yet"
            self._preempt(victim)
            turn.preempted = True
            if victim is request:
                return False
        request.add_pages(self.pool.allocate(1))
        return True

    def _prefill(self, prefilling: list[Request], turn: Turn, now: float) -> None:
        for request in prefilling:
            if not turn.leaves_out(request.num_total - request.num_computed):
                self._grant_prefill(request, turn)
        if not turn.preempted:
            self._admit(turn, now)

    def _prefill_together(self, prefilling: list[Request], turn: Turn, now: float) -> None:
        self._prefill(prefilling, turn, now)
        self._top_up(turn)

    def _prefill_apart(self, prefilling: list[Request], turn: Turn, now: float) -> None:
        """Short prompts or one long one, in turn where both wait: a token costs the same in any step that is not small,
        so whoever shares a step with a longer prompt only gets its first token later."""
        if not prefilling and not self.waiting:
            return
        room, before = turn.budget, sum(turn.grants.values())
        self._look_again(turn.cap)
        kinds: tuple[Kind, Kind] = ("long", "short") if self._passed_over else ("short", "long")
        for kind in kinds:
            turn.only, turn.budget = kind, room
            self._prefill(prefilling, turn, now)
            if turn.num_prefills:
                passed_over = turn.passed_over or (self._passed_over and not self._free_slots)
                self._passed_over = passed_over and not kind == turn.only == "long"
                break
        turn.only = ""
        turn.budget = room - (sum(turn.grants.values()) - before)

    def _look_again(self, cap: int) -> None:
        """Estimates of those next in line that seem long: their pages may have been computed since they were queued."""
        for request in self.waiting[:LOOKAHEAD]:
            if request.uncached_estimate <= cap or request.awaits in self._computing:
                continue
            hits = self._match(request, self._hit_limit(request))[1]
            estimate = request.num_tokens - hits * self.config.page_size
            self.queued_tokens += estimate - request.uncached_estimate
            request.uncached_estimate = estimate

    def _grant_prefill(self, request: Request, turn: Turn) -> None:
        remaining = request.num_total - request.num_computed
        if turn.budget <= 0 or turn.num_prefills >= self.config.max_prefill_batch:
            return
        count = min(remaining, turn.budget)
        if not self.config.chunked_prefill:
            if count < remaining and turn.num_prefills:
                return
            count = remaining  # a prompt that is never cut may exceed the budget when it is the step's only one
        elif not turn.only and self._is_capped(remaining, turn):
            turn.capped.append(request)
            count = min(count, turn.long_budget)
            turn.long_budget -= count
        if count > 0:
            turn.grants[request] = count
            turn.budget = 0 if turn.only == "long" else turn.budget - count
            turn.num_prefills += 1

    def _is_capped(self, remaining: int, turn: Turn) -> bool:
        """Whether a prefill of so many tokens must leave room, as shorter ones wait."""
        cap = turn.cap
        if remaining <= cap:
            return False
        if turn.shorts_wait is None:
            turn.shorts_wait = any(not r.is_decoding and r.num_total - r.num_computed <= cap for r in self.running) or (
                bool(self._free_slots) and any(r.uncached_estimate <= cap and not r.awaits for r in self.waiting[:64])
            )
        return turn.shorts_wait

    def _top_up(self, turn: Turn) -> None:
        """What nobody shorter needed goes to the long prompts after all."""
        for request in turn.capped:
            granted = turn.grants.get(request, 0)
            extra = min(turn.budget, request.num_total - request.num_computed - granted)
            if granted and extra > 0:
                turn.grants[request] = granted + extra
                turn.budget -= extra

    # --- admission and preemption

    def _admit(self, turn: Turn, now: float) -> None:
        static = self.config.scheduler == "static"
        if static and self.running:
            return
        num_blocked = num_admitted = 0
        for request in self.waiting:
            if not self._free_slots or num_blocked >= LOOKAHEAD:
                break
            if not static and (turn.budget <= 0 or turn.num_prefills >= self.config.max_prefill_batch):
                break
            if request.num_pending or (request.awaits and request.awaits in self._computing):
                continue
            if not static and not self._would_start(request, turn):
                if turn.only and request.lacked_room and now - request.arrival >= self.config.ageing_s:
                    break
                continue
            if self._try_admit(request):
                num_admitted += 1
                if turn.takes(request.num_total - request.num_computed):
                    self._grant_prefill(request, turn)
            elif not request.awaits:
                if now - request.arrival >= self.config.ageing_s:
                    break
                num_blocked += 1
        if num_admitted:
            self.waiting = [r for r in self.waiting if r.slot < 0]

    def _would_start(self, request: Request, turn: Turn) -> bool:
        if not self.config.chunked_prefill:
            return request.uncached_estimate <= turn.budget or not turn.num_prefills
        if turn.only:
            return not turn.leaves_out(request.uncached_estimate)
        return turn.long_budget > 0 or not self._is_capped(request.uncached_estimate, turn)

    def _hit_limit(self, request: Request) -> int:
        """Pages that may come from the index: at least one token must be computed to have logits, and
        log-probabilities of the prompt need all of it."""
        if not self.config.prefix_caching or (request.sampling.prompt_logprobs is not None and not request.announced):
            return 0
        return (request.num_tokens - 1) // self.config.page_size

    def _match(self, request: Request, limit: int) -> tuple[int, int]:
        """Leading pages that are indexed on the device; the same with those after them that the host tier keeps."""
        num_hits = self.pool.match(request.hashes, limit)
        host = self.pool.host
        return num_hits, num_hits + (host.match(request.hashes, num_hits, limit) if host else 0)

    def _try_admit(self, request: Request) -> bool:
        """Takes slot and pages. False: no room, or (``awaits`` set) another request computes the next page."""
        config, pool = self.config, self.pool
        limit = self._hit_limit(request)
        num_full = request.num_tokens // config.page_size if config.prefix_caching else 0
        if num_full:
            request.hash_of(num_full - 1, config.page_size)
        num_hits, num_ready = self._match(request, limit)
        request.awaits = b""
        if config.scheduler == "continuous":  # a static batch must not leave its members out
            for index in (num_hits, num_ready):
                if index < limit and request.hashes[index] in self._computing:
                    request.awaits = request.hashes[index]
                    return False
        tokens = request.num_tokens if config.kv_cache_paging else config.max_model_len
        needed = config.pages_for(tokens) - num_hits
        spare = pool.num_available - needed - self._headroom(request, num_ready)
        hits = [pool.lookup(page_hash) for page_hash in request.hashes[:num_hits]] if spare >= 0 else []
        request.lacked_room = spare < pool.num_idle(hits)
        if request.lacked_room:
            return False
        pool.acquire(hits)
        fresh = pool.allocate(needed, request.hashes[num_hits:num_ready])
        assert config.kv_cache_paging or fresh[-1] - fresh[0] == needed - 1, "a reservation is not contiguous"
        request.table = np.array([*hits, *fresh, NULL_PAGE, NULL_PAGE], dtype=np.int32)
        request.num_pages = num_hits + needed
        request.view = request.table[: request.num_pages]
        request.num_hits = request.num_published = num_hits
        request.tail = hits[-1] if hits else NULL_PAGE
        request.publish_at = (num_hits + 1) * config.page_size if config.prefix_caching else inf
        request.num_computed = num_ready * config.page_size
        request.num_written = num_hits * config.page_size  # what comes from the host is indexed when it is read back
        request.admitted_total = request.num_total
        request.slot = self._free_slots.pop()
        request.fresh = True
        request.prompt_logprobs = []
        for page_hash in request.hashes[num_hits:num_full]:
            self._computing.setdefault(page_hash, request)
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.num_computed
        insort(self.running, request, key=_key)
        self.queued_tokens -= request.uncached_estimate
        return True

    def _headroom(self, request: Request, num_ready: int) -> int:
        """Pages to leave for the growth of the running while this request is being prefilled."""
        if not self.running or not self.config.kv_cache_paging:
            return 0
        num_tokens = request.num_tokens - num_ready * self.config.page_size
        num_steps = 2 + num_tokens // min(self.config.long_prefill_tokens, max(1, self._step_budget.typical // 2))
        return max(self._watermark, len(self.running) * self.config.pages_for(num_steps))

    def _preempt(self, request: Request) -> None:
        """Gives up the pages, not the tokens nor the place in line; the prefix cache often returns the pages."""
        self._leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.num_computed = request.num_written = 0
        self._enqueue(request, request.num_tokens)

    def _leave(self, request: Request) -> None:
        # A launched step may still write these pages; later steps run after it on the device, so they may be reused.
        self._give_up_claims(request)
        self.pool.release(request.held_pages())
        request.num_pages = request.num_published = 0
        request.pins.clear()
        self._free_slots.append(request.slot)
        self.released_slots.append(request.slot)
        request.slot = -1
        self.running.remove(request)

    def _give_up_claims(self, request: Request) -> None:
        for page_hash in request.hashes[request.num_published :]:
            if self._computing.get(page_hash) is request:
                del self._computing[page_hash]

    def check_invariants(self) -> None:
        """Exact audit of pages, slots, references, queues and claims; raises AssertionError."""
        self.pool.check_invariants()
        self.check_requests()

    def check_requests(self) -> None:
        """The audit without the pages' own."""
        assert self.running == sorted(self.running, key=_key) and self.waiting == sorted(self.waiting, key=_key)
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_batch_size)), "slots lost or shared"
        held: set[int] = set()
        for request in self.running:
            pages = request.held_pages()
            assert len(set(pages)) == len(pages), f"{request.request_id} holds a page twice"
            held.update(pages)
            assert request.finish is None and request.num_written <= request.num_computed <= request.num_total
            assert request.num_computed <= request.num_pages * self.config.page_size
        assert len(held) == self.pool.num_held, "pages are held by nobody"
        assert self.queued_tokens == sum(r.uncached_estimate for r in self.waiting)
        assert all(r.slot < 0 and not r.num_pages and not r.pins and r.finish is None for r in self.waiting)
        assert all(r.slot >= 0 for r in self._computing.values()), "a page is claimed by a request that left"
