"""Pages that the device evicted, kept in host memory to come back instead of being recomputed.

    device   indexed pages, prefix-closed                         (PagePool)
                 | evicted: saved          ^ looked up: loaded into a fresh page, indexed when its step is read back
    host     entries, each in one slot of host memory             (this)

*Both tiers together are prefix-closed*: an entry's parent is indexed on the device or is an entry too. The device
evicts children first, so a child enters before its parent and the oldest entry is always a leaf; an entry leaves when
the device answers for its hash again, and what is built upon doubtful content leaves with it.

Nothing here touches memory: it says, in order, which page goes where, and the runner does that in the same order before
the next step. So a slot or a page may be given away at once: whoever comes later copies later.
"""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from replica.batch import Move
from router.pages import key64
from router.wire import Tier


class ResidencySink(Protocol):
    """Hears of every change of what a tier holds, in order."""

    def stored(self, key: int, parent_key: int, tier: Tier = Tier.DEVICE) -> None: ...

    def removed(self, key: int, tier: Tier = Tier.DEVICE) -> None: ...


@dataclass(slots=True)
class _Entry:
    page_hash: bytes
    parent_hash: bytes
    """Empty for the first page of a chain."""
    slot: int


class HostTier:
    """Which evicted page lies in which of ``num_pages`` slots, and what is still to be copied. Not thread-safe."""

    def __init__(self, num_pages: int, sink: ResidencySink) -> None:
        self.num_pages = num_pages
        self.num_saved = self.num_restored = self.num_evicted = 0
        self._sink = sink
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """By directory key, oldest first."""
        self._children: dict[bytes, set[int]] = {}
        """Hash of a parent on whichever tier -> keys of its entries here."""
        self._pinned: set[int] = set()
        self._moves: list[Move] = []
        self._busy: set[int] = set()
        """Slots, and pages as their complement, of the last move: one move never touches either twice."""

    def counts(self) -> dict[str, int]:
        return {
            "all": self.num_pages,
            "used": len(self._entries),
            "saved": self.num_saved,
            "restored": self.num_restored,
            "evicted": self.num_evicted,
        }

    def keys(self) -> list[int]:
        """Directory keys of all entries, parents before children."""
        return list(reversed(self._entries))

    def holds(self, page_hash: bytes) -> bool:
        entry = self._entries.get(key64(page_hash))
        return entry is not None and entry.page_hash == page_hash

    def match(self, hashes: Sequence[bytes], start: int, limit: int) -> int:
        """How many pages of the chain are here from ``start`` on, where the device's part ends, up to ``limit``."""
        end = min(limit, len(hashes))
        if start >= end or not self.holds(hashes[start]):
            return 0
        return bisect(range(start, end), False, key=lambda i: not self.holds(hashes[i]))

    # --- the page pool's side

    def save(self, page: int, page_hash: bytes, parent_hash: bytes) -> None:
        """The device evicts this page; the least recently evicted entry makes room."""
        key = key64(page_hash)
        slot = self._take_slot() if key not in self._entries else None  # taken only by another hash of the same key
        if slot is None:
            self.drop_below(page_hash)
            return
        self._entries[key] = _Entry(page_hash, parent_hash, slot)
        self._children.setdefault(parent_hash, set()).add(key)
        self._move(True, page, slot)
        self.num_saved += 1
        self._sink.stored(key, key64(parent_hash) if parent_hash else 0, Tier.HOST)

    def pin(self, hashes: Sequence[bytes]) -> None:
        """These entries, parents first, stay until :meth:`load`, whatever is saved; they are the newest from now on."""
        for page_hash in reversed(hashes):
            self._entries.move_to_end(key64(page_hash))
        self._pinned.update(map(key64, hashes))

    def load(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """The content of these entries goes to ``pages``. They stay until the device answers for them."""
        for page_hash, page in zip(hashes, pages, strict=True):
            self._move(False, page, self._entries[key64(page_hash)].slot)
        self._pinned.clear()
        self.num_restored += len(hashes)

    def discard(self, page_hash: bytes) -> None:
        """The device answers for this hash from now on; what is built upon it stays."""
        if self.holds(page_hash):
            self._remove(key64(page_hash))

    def drop(self, hashes: Iterable[bytes]) -> None:
        """The content of these pages is in doubt: they and all that is built upon them leave."""
        for page_hash in hashes:
            self.drop_below(page_hash)
            self.discard(page_hash)

    def drop_below(self, page_hash: bytes) -> None:
        """Entries built upon this page leave."""
        doomed = list(self._children.get(page_hash, ()))
        for key in doomed:
            doomed += self._children.get(self._entries[key].page_hash, ())
        for key in reversed(doomed):
            self._remove(key)

    def _take_slot(self) -> int | None:
        if not self._free:
            oldest = next(iter(self._entries))
            if oldest in self._pinned:  # so are all that are not newer than this allocation
                return None
            self._remove(oldest)
            self.num_evicted += 1
        return self._free.pop()

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        siblings = self._children[entry.parent_hash]
        siblings.remove(key)
        if not siblings:
            del self._children[entry.parent_hash]
        self._free.append(entry.slot)
        self._sink.removed(key, Tier.HOST)

    # --- the runner's side

    def _move(self, to_host: bool, page: int, slot: int) -> None:
        last = self._moves[-1] if self._moves else None
        if last is None or last.to_host != to_host or slot in self._busy or ~page in self._busy:
            last = Move(to_host, [], [])
            self._moves.append(last)
            self._busy.clear()
        last.pages.append(page)
        last.slots.append(slot)
        self._busy.update((slot, ~page))

    def take_moves(self) -> list[Move]:
        """What is to be copied before the next step's rows, in order."""
        moves, self._moves = self._moves, []
        self._busy.clear()
        return moves

    def check_invariants(self, is_indexed: Callable[[bytes], bool]) -> None:
        """Exact audit; ``is_indexed``: whether the device answers for a hash. Raises AssertionError."""
        slots = [entry.slot for entry in self._entries.values()] + self._free
        assert sorted(slots) == list(range(self.num_pages)), "slots lost or shared"
        assert not self._pinned, "an entry is still pinned"
        seen: set[bytes] = set()
        for key, entry in reversed(self._entries.items()):
            assert key == key64(entry.page_hash) and not is_indexed(entry.page_hash), "a page is on both tiers"
            assert not entry.parent_hash or entry.parent_hash in seen or is_indexed(entry.parent_hash), "no parent"
            assert key in self._children[entry.parent_hash]
            seen.add(entry.page_hash)
        assert sum(map(len, self._children.values())) == len(self._entries)
