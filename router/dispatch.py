"""The cluster as the HTTP layer sees it: :class:`Dispatcher` implements :class:`router.backend.Backend`.

Keeps one :class:`router.link.Link` per member and one picture of them all (:class:`router.placement.Placement`);
:class:`router.streams.Streams` does the work of each request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.backend import Job, Ticket
from router.handshake import ROOT_FIELDS, RouterHandshake, check_secret, compare_roots, root_to_wire
from router.hot_prefixes import HotPrefixes
from router.link import Address, Link, LinkOptions, LinkState
from router.pages import RootFields
from router.placement import Placement
from router.policy import PolicyOptions
from router.streams import Streams, StreamsOptions


@dataclass(frozen=True)
class DispatchOptions:
    """``tick_s``: how often unanswered questions are repeated, silence is judged and dead slots are swept."""

    tick_s: float = 0.05
    hot_prefixes: int = 1024
    streams: StreamsOptions = field(default_factory=StreamsOptions)
    link: LinkOptions = field(default_factory=LinkOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)


class Dispatcher:
    """``expect``: root fields this router insists on (any of model, tokenizer, kv_dtype, page_size); the rest is
    adopted from the first replica and then demanded of all others for as long as one of them is connected."""

    def __init__(
        self,
        secret: bytes,
        *,
        expect: Mapping[str, str | int] | None = None,
        router_id: str | None = None,
        options: DispatchOptions | None = None,
    ) -> None:
        if unknown := set(expect or {}) - set(ROOT_FIELDS):
            raise ValueError(f"unknown root fields {sorted(unknown)}; allowed are {list(ROOT_FIELDS)}")
        self.router_id = router_id or secrets.token_hex(8)
        self.options = options or DispatchOptions()
        self.placement = Placement(page_size=16, options=self.options.policy)
        self.links: dict[str, Link] = {}
        self.hot = HotPrefixes(self.options.hot_prefixes)
        self.counters: Counter[str] = Counter()
        self.streams = Streams(self.placement, self.links, self.hot, self.counters, self.options.streams)
        self._secret = check_secret(secret)
        self._expect = [(expect or {}).get(name) for name in ROOT_FIELDS]
        self._root: RootFields | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._members: dict[str, Address] = {}

    # --- life and membership

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.create_task(self._tick_forever(), name="dispatcher tick")
        self._apply_members()

    async def close(self) -> None:
        """Ends every stream with Unavailable, then every connection."""
        self._loop = None
        if self._ticker is not None:
            self._ticker.cancel()
        self.streams.close()
        for link in list(self.links.values()):
            link.close()

    def update_replicas(self, replicas: Mapping[str, Address]) -> None:
        """The cluster's members now: replica id -> (host, port). From any thread, before or after ``start``."""
        self._members = dict(replicas)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._apply_members)

    def _apply_members(self) -> None:
        if self._loop is None:
            return
        members = self._members
        # In an update to another model, the old routers outlive the last replica that they can use by a moment.
        needed = not any(link.replica.accepting for name, link in self.links.items() if name in members)
        for name, link in list(self.links.items()):
            if name not in members:
                link.leave(last_resort=needed)
        for name, address in members.items():
            if (known := self.links.get(name)) is not None:
                known.rejoin(address)
            else:
                state = self.placement.add(name)
                self.links[name] = Link(name, address, state, self, self.options.link)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.options.tick_s)
            for link in list(self.links.values()):
                link.tick()
            self.placement.directory.sweep()

    # --- router.link.Host

    def greet(self) -> RouterHandshake:
        return RouterHandshake(self._secret, self.router_id, self._expect)

    def check_root(self, replica: str, root: RootFields) -> None:
        connected = any(link.state in (LinkState.OPEN, LinkState.DRAINING) for link in self.links.values())
        if self._root is not None and connected:
            compare_roots(root_to_wire(root), root_to_wire(self._root), (f"replica {replica}", "another replica"))
        self._root = root
        self.placement.page_size = root.page_size

    def on_link_change(self, link: Link) -> None:
        if link.replica.accepting:
            for state in self.placement.retiring():
                self.links[state.name].leave()
        if link.state == LinkState.CLOSED and self.links.get(link.name) is link:
            del self.links[link.name]
            self.placement.remove(link.name)
            if link.name in self._members:  # it has left and come back meanwhile
                self._apply_members()
            # The last replica of another model may have been what kept the others out.
            for other in list(self.links.values()):
                other.retry()
        self.streams.changes.notify()

    # --- router.backend.Backend

    async def admit(self, job: Job) -> Ticket:
        """Raises Refused, Overloaded, Unavailable, DeadlineExceeded or EngineFault, and nothing stays behind."""
        now = asyncio.get_running_loop().time()
        deadline = now + job.deadline_s if job.deadline_s is not None else None
        until = now + self.options.streams.admit_wait_s
        try:
            while self._root is None or not self.placement.takers():
                await self.streams.wait_for_replica(until, deadline)
            ticket = await self.streams.admit(job, self._root, until, deadline)
        except Exception as error:
            self.counters[f"not_admitted_{type(error).__name__}"] += 1
            raise
        self.counters["admitted"] += 1
        return ticket

    def ready(self) -> bool:
        return any(state.accepting for state in self.placement.replicas.values())

    def limits(self) -> dict[str, int]:
        smallest: dict[str, int] = {}
        for state in self.placement.takers():
            for name, value in self.links[state.name].limits.items():
                smallest[name] = min(value, smallest.get(name, value))
        return smallest

    def directory(self, top: int) -> dict[str, Any]:
        directory = self.placement.directory
        slots = [link.replica.slot for link in self.links.values()]
        return {
            "router": self.router_id,
            "root": dict(zip(ROOT_FIELDS, root_to_wire(self._root), strict=True)) if self._root else None,
            "in_sync": bool(slots) and all(slot is not None and slot.synced for slot in slots),
            "pages": directory.num_pages(),
            "ttft_prediction": self.placement.prediction.describe(),
            "pending_reservations": len(directory.pending),
            "replicas": [link.describe() for _, link in sorted(self.links.items())],
            "prefixes": [
                {
                    "hash": prefix.page_hash.hex(),
                    "tokens": prefix.tokens,
                    "holders": directory.holders(key),
                    "hits": round(prefix.hits, 1),
                }
                for key, prefix in self.hot.top(top)
            ],
        }

    async def engines(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        async def ask(link: Link) -> dict[str, Any]:
            known: dict[str, Any] = {"replica": link.name, "state": str(link.state)}
            try:
                return known | await link.inspect(timeout_s)
            except (TimeoutError, ConnectionError) as error:
                return known | {"error": str(error) or "no answer in time"}

        return await asyncio.gather(*(ask(link) for _, link in sorted(self.links.items())))

    def check_invariants(self) -> None:
        self.placement.check_invariants()
        self.streams.check_invariants()
        self.hot.check_invariants()
        for link in self.links.values():
            link.stream.check_invariants()
