"""The KV pages of one device: who holds them, which are cached, which leaves next.

Every page but the null page is in exactly one of three states:

    free    not indexed, not referenced           on the free stack
    held    referenced by at least one request    indexed once it is full and its step has been read back
    cached  indexed, not referenced               on the LRU list; allocation takes its oldest when no page is free

The *index* maps a page hash to the one page that answers for it. It is **prefix-closed**: an indexed page's parent is
indexed too. Two rules make that hold without a tree: whoever references an indexed page references its indexed
parent as well, and pages are released children first. So on the LRU list a child always stands before its parent,
and the oldest entry is a leaf. A page that is evicted goes to the host tier, if there is one.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from replica.batch import NULL_PAGE
from replica.host_tier import HostTier, ResidencySink
from router.pages import key64


class PagePool:
    """Reference counts, prefix index and LRU of ``num_pages`` pages, page 0 included. Not thread-safe."""

    def __init__(
        self, num_pages: int, sink: ResidencySink, *, max_cached: int | None = None, host: HostTier | None = None
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: {num_pages}; at least 2 are needed, as page 0 is the null page")
        self.num_pages = num_pages
        self.max_cached = num_pages if max_cached is None else max_cached
        self.num_cached = 0
        self.host = host
        self._sink = sink
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._refs = [0] * num_pages
        self._hash: list[bytes] = [b""] * num_pages
        self._parent = [NULL_PAGE] * num_pages
        self._num_children = [0] * num_pages
        self._index: dict[int, int] = {}
        # The LRU list is circular through the null page: _next[0] is the oldest, _prev[0] the newest.
        self._next = [NULL_PAGE] * num_pages
        self._prev = [NULL_PAGE] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can give: free ones and, by eviction, all cached ones."""
        return len(self._free) + self.num_cached

    def counts(self) -> dict[str, int]:
        """free + cached + held == all."""
        return {
            "all": self.num_pages - 1,
            "free": self.num_free,
            "cached": self.num_cached,
            "held": self.num_held,
            "indexed": len(self._index),
        }

    def lookup(self, page_hash: bytes) -> int:
        """The page that answers for this hash, or the null page."""
        page = self._index.get(key64(page_hash), NULL_PAGE)
        return page if page and self._hash[page] == page_hash else NULL_PAGE

    def match(self, hashes: Sequence[bytes], limit: int) -> int:
        """How many leading pages of the chain are indexed, at most ``limit``. O(log n): the index is prefix-closed."""
        return bisect(range(min(limit, len(hashes))), False, key=lambda i: not self.lookup(hashes[i]))

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these indexed pages nobody references: acquiring them takes them from ``num_available``."""
        refs = self._refs
        return sum(1 for page in pages if refs[page] == 0)

    def acquire(self, pages: Iterable[int]) -> None:
        """References indexed pages. Acquire hits before allocating, or the allocation may evict them."""
        for page in pages:
            if self._refs[page] == 0:
                self._unlink(page)
            self._refs[page] += 1

    def allocate(self, count: int, restore: Sequence[bytes] = ()) -> list[int]:
        """``count`` fresh pages with one reference each; evicts the least recently used. Needs num_available >= count.
        The first of them get what the host tier keeps under ``restore`` before the next step's rows run.

        Without caching, equal-sized allocations that are released whole come back contiguous: the free stack is
        then always a sequence of whole runs.
        """
        assert count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        if self.host and restore:
            self.host.pin(restore)
        while len(self._free) < count:
            self._evict_oldest()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        if self.host and restore:
            self.host.load(restore, pages[: len(restore)])
        return pages

    def publish(self, page: int, page_hash: bytes, parent: int) -> int:
        """Indexes a full, held page under its hash; ``parent`` is the indexed page before it (null for the first).

        Returns the page that answers for the hash from now on: ``page``, or an equal one that was indexed before,
        which is then referenced for the caller too (both copies stay). Returns the null page when the chain
        can't be continued: the parent was unpublished, or the key is taken by another hash.
        """
        if parent and not self._hash[parent]:
            return NULL_PAGE
        key = key64(page_hash)
        known = self._index.setdefault(key, page)
        if known != page:
            if self._hash[known] != page_hash:
                return NULL_PAGE
            self.acquire((known,))
            return known
        assert self._refs[page] and not self._hash[page], f"page {page} is not a held, unindexed page"
        self._hash[page] = page_hash
        self._parent[page] = parent
        self._num_children[parent] += 1
        if self.host:
            self.host.discard(page_hash)
        self._sink.stored(key, key64(self._hash[parent]) if parent else 0)
        return page

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page; children must come before their parents."""
        for page in pages:
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._hash[page]:
                    self._link_newest(page)
                    if self.num_cached > self.max_cached:
                        self._evict_oldest()
                else:
                    self._free.append(page)

    def unpublish(self, chain: Sequence[int]) -> int:
        """Takes these indexed pages, parents first, and everything below them out of the index: their content is in
        doubt. Returns how many pages left. Walks the index only when others have built upon the chain."""
        order = list(reversed(chain))
        if any(self._num_children[page] != (i > 0) for i, page in enumerate(order)):
            doomed, spared = {chain[0]}, {NULL_PAGE}
            for node in self._index.values():
                path = []
                while node not in doomed and node not in spared:
                    path.append(node)
                    node = self._parent[node]
                (doomed if node in doomed else spared).update(path)
            # A page enters the index after its parent, so the reverse order takes children first.
            order = [node for node in reversed(self._index.values()) if node in doomed]
        for node in order:
            if self.host:
                self.host.drop_below(self._hash[node])
            self._drop_from_index(node)
            if self._refs[node] == 0:
                self._unlink(node)
                self._free.append(node)
        return len(order)

    def is_indexed(self, page: int) -> bool:
        return bool(self._hash[page])

    def keys(self) -> list[int]:
        """Directory keys of all indexed pages, parents before children."""
        return list(self._index)

    def page_of(self, key: int) -> int | None:
        """The page that is indexed under this directory key."""
        return self._index.get(key)

    def residency(self) -> list[list[int]]:
        """The keys per tier."""
        return [self.keys(), self.host.keys() if self.host else []]

    def _evict_oldest(self) -> None:
        """The oldest cached page becomes free."""
        page = self._next[NULL_PAGE]
        assert page != NULL_PAGE and self._num_children[page] == 0, f"page {page} is not a cached leaf"
        self._unlink(page)
        if self.host:
            self.host.save(page, self._hash[page], self._hash[self._parent[page]])
        self._drop_from_index(page)
        self._free.append(page)

    def _drop_from_index(self, page: int) -> None:
        key = key64(self._hash[page])
        del self._index[key]
        self._num_children[self._parent[page]] -= 1
        self._hash[page] = b""
        self._parent[page] = NULL_PAGE
        self._sink.removed(key)

    def _link_newest(self, page: int) -> None:
        newest = self._prev[NULL_PAGE]
        self._next[newest] = self._prev[NULL_PAGE] = page
        self._prev[page], self._next[page] = newest, NULL_PAGE
        self.num_cached += 1

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        self.num_cached -= 1

    def check_invariants(self) -> None:
        """Exact audit of every page; raises AssertionError."""
        self.check_states()
        self.check_index()

    def check_states(self) -> None:
        """Half of the audit: every page is free, held or cached. On arrays, since an idle engine has 40,000 pages."""
        lru = self._walk_lru()
        free, refs = np.array(self._free, np.int64), np.array(self._refs)
        assert len(lru) == self.num_cached <= self.max_cached, "LRU list and its count differ"
        assert refs.min() >= 0 and refs[NULL_PAGE] == 0, "negative count or a referenced null page"
        groups = (free, lru, np.flatnonzero(refs))
        states = np.sum([np.bincount(pages, minlength=self.num_pages) for pages in groups], axis=0)
        assert states.max() <= 1, "a page is in two states, or twice on the free stack"
        assert states[NULL_PAGE] == 0 and states.sum() == self.num_pages - 1, "a page is in no state"
        indexed = np.array(list(map(bool, self._hash)))
        assert not indexed[free].any() and indexed[lru].all(), "a free page is indexed or a cached one is not"

    def _walk_lru(self) -> np.ndarray:
        """Pages int64, the oldest first."""
        following, before, lru = self._next, self._prev, []
        page = following[NULL_PAGE]
        while page != NULL_PAGE:
            assert before[following[page]] == page, f"broken link at page {page}"
            lru.append(page)
            page = following[page]
        return np.array(lru, np.int64)

    def check_index(self) -> None:
        """The other half: keys, parents and children; whoever is held or cached has a parent that leaves after it."""
        pages, refs = np.fromiter(self._index.values(), np.int64, len(self._index)), np.array(self._refs)
        indexed = np.array(list(map(bool, self._hash)))
        assert np.array_equal(np.sort(pages), np.flatnonzero(indexed)), "index and hashes differ"
        assert list(self._index) == [key64(self._hash[page]) for page in self._index.values()], (
            "a key is not its page's"
        )
        parents = np.array(self._parent)[pages]
        assert np.array_equal(np.bincount(parents, minlength=self.num_pages), self._num_children), "child counts differ"
        inner = parents != NULL_PAGE
        pages, parents = pages[inner], parents[inner]
        assert indexed[parents].all(), "a page is indexed, its parent is not"
        assert not (refs[pages] > 0)[refs[parents] == 0].any(), "a page is held, its parent is not"
        place, lru = np.full(self.num_pages, -1), self._walk_lru()
        place[lru] = np.arange(len(lru))
        both = (place[pages] >= 0) & (place[parents] >= 0)
        assert (place[pages] < place[parents])[both].all(), "a page would be evicted after its parent"
        if self.host:
            self.host.check_invariants(lambda page_hash: bool(self.lookup(page_hash)))
