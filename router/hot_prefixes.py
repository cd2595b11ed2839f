"""Which shared prefixes are hot: a bounded table for ``GET /v1/directory``. Hashes only, never prompt text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HotPrefix:
    """``hits``: matched requests, halved when the table is pruned so that yesterday's prefixes fade."""

    page_hash: bytes
    tokens: int
    hits: float = 0.0


class HotPrefixes:
    """Deepest matched page of each request, counted. At most ``capacity`` prefixes are kept between prunings."""

    def __init__(self, capacity: int = 1024) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}; at least 1 is allowed")
        self._capacity = capacity
        self._table: dict[int, HotPrefix] = {}

    def __len__(self) -> int:
        return len(self._table)

    def hit(self, key: int, page_hash: bytes, tokens: int) -> None:
        """A request matched ``tokens`` tokens that end in the page ``page_hash``, whose directory key is ``key``."""
        entry = self._table.get(key)
        if entry is None:
            entry = self._table[key] = HotPrefix(page_hash, tokens)
        entry.hits += 1.0
        if len(self._table) >= 2 * self._capacity:
            self._prune()

    def top(self, count: int) -> list[tuple[int, HotPrefix]]:
        """(key, prefix), most hits first."""
        return sorted(self._table.items(), key=lambda item: -item[1].hits)[:count]

    def _prune(self) -> None:
        kept = self.top(self._capacity)
        for _, entry in kept:
            entry.hits /= 2
        self._table = dict(kept)

    def check_invariants(self) -> None:
        assert len(self._table) < 2 * self._capacity
        assert all(entry.hits > 0 and entry.tokens > 0 for entry in self._table.values())
