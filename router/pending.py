"""Pages that a dispatched request is about to compute: the directory's overlay of credit not yet earned.

A reservation belongs to a slot (one replica's incarnation) and names the keys of the pages that its request will
compute. It is made by the router that dispatches, at once, and by every router when the replica echoes it; it ends
on an event (first token, cancel, failure, the replica's death), never on a timer.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pending:
    """key64 -> bitset of slots where some live reservation covers the key.

    ``bits`` is read directly by :meth:`router.directory.Directory.warm`. Bounded by the pages of live reservations.
    """

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}
        self._counts: dict[int, dict[int, int]] = {}
        """slot bit -> key -> how many of the slot's reservations cover it."""
        self._live: dict[int, dict[str, list[int]]] = {}
        """slot bit -> reservation id -> its keys."""

    def __len__(self) -> int:
        return sum(len(live) for live in self._live.values())

    def reservations(self, bit: int) -> dict[str, list[int]]:
        """The slot's live reservations; not to be modified."""
        return self._live.get(bit, {})

    def reserve(self, bit: int, reservation: str, keys: Iterable[int]) -> None:
        """Add or replace a reservation."""
        self.release(bit, reservation)
        held = list(dict.fromkeys(keys))
        self._live.setdefault(bit, {})[reservation] = held
        counts = self._counts.setdefault(bit, {})
        bits = self.bits
        for key in held:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                bits[key] = bits.get(key, 0) | bit

    def release(self, bit: int, reservation: str) -> bool:
        """End a reservation; False when there was none."""
        held = self._live.get(bit, {}).pop(reservation, None)
        if held is None:
            return False
        counts = self._counts[bit]
        bits = self.bits
        for key in held:
            count = counts[key] - 1
            if count:
                counts[key] = count
                continue
            del counts[key]
            left = bits[key] & ~bit
            if left:
                bits[key] = left
            else:
                del bits[key]
        return True

    def drop(self, bit: int) -> dict[str, list[int]]:
        """End all of a slot's reservations and return them."""
        gone = dict(self._live.get(bit, {}))
        for reservation in gone:
            self.release(bit, reservation)
        self._live.pop(bit, None)
        self._counts.pop(bit, None)
        return gone

    def check_invariants(self) -> None:
        expected: dict[int, int] = {}
        for bit, live in self._live.items():
            counts: dict[int, int] = {}
            for held in live.values():
                for key in held:
                    counts[key] = counts.get(key, 0) + 1
                    expected[key] = expected.get(key, 0) | bit
            assert counts == self._counts.get(bit, {}), f"counts of slot bit {bit:#x} differ from its reservations"
        assert expected == self.bits, "pending bits differ from the live reservations"
