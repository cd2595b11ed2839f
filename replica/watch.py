"""What an engine does to notice that something went wrong without anybody asking: audits when idle, and the canary.

The *canary* takes a checksum of every page soon after it is indexed, and from then on compares it in sweeps. An indexed
page is never written again, so a page whose sum changed was written by a bug or by failing memory. Checksums are made
by the runner between two steps, so they see what steps see; they take at most ``SHARE`` of the time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from replica.batch import Runner, Sums
from replica.config import ResolvedConfig
from replica.host_tier import ResidencySink
from replica.page_pool import PagePool
from replica.request import Request
from replica.scheduler import Scheduler
from router.wire import Finish, Tier

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 32
SHARE = 0.05
"""Of the time, for checksums: after one that took t, none begins for t / SHARE."""
IDLE_S = 1.0
"""An engine that has had nothing to do for so long audits itself, once until it has worked again."""
AUDIT_EVERY_S = 60.0
"""At most."""


class Canary:
    """Stands between the page pool and the event log, so it hears of every page that comes and goes."""

    def __init__(self, sink: ResidencySink, runner: Runner) -> None:
        self._sink, self._runner = sink, runner
        self._fresh: OrderedDict[int, None] = OrderedDict()
        """Keys without a sum."""
        self._sums: OrderedDict[int, int] = OrderedDict()
        """key -> checksum; the one compared longest ago comes first."""
        self._asked: dict[int, int] = {}
        """key -> its place in the check under way; a key that left meanwhile is not in it any more."""
        self._check: Sums | None = None
        self._next = 0.0
        self.num_compared = self.num_changed = 0

    # --- the page pool's sink

    def stored(self, key: int, parent_key: int, tier: Tier = Tier.DEVICE) -> None:
        self._fresh[key] = None
        self._sink.stored(key, parent_key, tier)

    def removed(self, key: int, tier: Tier = Tier.DEVICE) -> None:
        self._fresh.pop(key, None)
        self._sums.pop(key, None)
        self._asked.pop(key, None)
        self._sink.removed(key, tier)

    # --- the loop's side

    def turn(self, now: float, pool: PagePool) -> list[int]:
        """Takes in a check that is done, begins the next one when it is time. Never waits. Returns indexed pages that
        are not what they were."""
        if self._check is not None:
            if not self._check.wait(0.0):
                return []
            sums = self._check.result()
            self._next = now + self._check.cost_s / SHARE
            self._check = None
            return [page for key in self._compare(sums) if (page := pool.page_of(key)) is not None]
        if now >= self._next and (self._fresh or self._sums):
            keys = list(islice(self._fresh, PAGES_AT_ONCE * 3 // 4))
            keys += islice(self._sums, PAGES_AT_ONCE - len(keys))
            pages = [page for key in keys if (page := pool.page_of(key)) is not None]
            assert len(pages) == len(keys), "a page left unheard"
            self._asked = {key: place for place, key in enumerate(keys)}
            self._check = self._runner.checksums(pages)
        return []

    def _compare(self, sums: list[int]) -> list[int]:
        """Keys whose sum changed."""
        changed = []
        asked, self._asked = self._asked, {}
        for key, place in asked.items():
            if key in self._fresh:
                del self._fresh[key]
            else:
                self.num_compared += 1
                if self._sums.pop(key) != sums[place]:
                    log.critical("page %016x changed after it was written: failing memory, or a bug", key)
                    changed.append(key)
            self._sums[key] = sums[place]
        self.num_changed += len(changed)
        return changed

    def describe(self) -> dict[str, int]:
        return {
            "pages": len(self._sums),
            "not_yet": len(self._fresh),
            "compared": self.num_compared,
            "changed": self.num_changed,
        }


class Watch:
    """Runs the canary, if there is one, and the engine's own audit when it is idle, a part per turn, so that a request
    that comes meanwhile hardly waits. What the audit raises ends the engine: its books are wrong, and a new one is
    started in its place. ``sink`` is for the page pool."""

    def __init__(
        self,
        config: ResolvedConfig,
        events: ResidencySink,
        runner: Runner,
        *,
        audit: Sequence[Callable[[], None]],
        end: Callable[[Request, Finish, str], None],
    ) -> None:
        self._audit, self._end = audit, end
        self._canary = Canary(events, runner) if config.canary else None
        self.sink = self._canary or events
        self._idle_since: float | None = None
        self._part = 0
        """Of the audit, next."""
        self._last = float("-inf")
        self._due = False
        self.num_audits = 0

    def turn(self, now: float, scheduler: Scheduler, *, idle: bool) -> None:
        """Once per turn of the loop."""
        if self._canary is not None:
            for page in self._canary.turn(now, scheduler.pool):
                self.distrust(page, scheduler, "a page of its context changed in memory")
        if not idle:
            self._idle_since, self._due, self._part = None, True, 0
        elif self._idle_since is None:
            self._idle_since = now
        elif self._due and now - self._idle_since >= IDLE_S and now - self._last >= AUDIT_EVERY_S:
            self._audit[self._part]()
            self._part += 1
            if self._part == len(self._audit):
                self._due, self._last, self._part = False, now, 0
                self.num_audits += 1

    def distrust(self, page: int, scheduler: Scheduler, why: str) -> None:
        """The page leaves with all that is built upon it, and those who read it end. It leaves first: once nobody holds
        it, a limited prefix cache would evict it, to the host tier if there is one."""
        if scheduler.pool.is_indexed(page):  # else it left with a page before it
            scheduler.pool.unpublish([page])
        for request in list(scheduler.running):
            if page in request.held_pages():
                self._end(request, Finish.ERROR, why)

    def describe(self) -> dict[str, Any]:
        """For ``/v1/engine``."""
        return {"idle_audits": self.num_audits, "canary": self._canary.describe() if self._canary else None}
