"""One replica's queue as a router sees it: requests dispatched to it that have no first token yet."""

from __future__ import annotations


class Backlog:
    """Q = sum of the predicted prefill times of waiting requests, minus the progress of the oldest.

    Keyed by request id, so that it is a set of live requests and can't leak like a counter. The oldest one's
    progress is the time since it became the oldest or since the replica last delivered a first token, at most its
    own estimate. Times: seconds for ``now``, milliseconds for estimates.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, float] = {}
        self._sum_ms = 0.0
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: str) -> bool:
        return request in self._waiting

    def push(self, request: str, estimate_ms: float, now: float) -> None:
        """Dispatched. Pushing a known request keeps its place and its first estimate."""
        if request in self._waiting:
            return
        if not self._waiting:
            self._since = now
        self._waiting[request] = estimate_ms
        self._sum_ms += estimate_ms

    def pop(self, request: str, now: float, *, served: bool) -> bool:
        """First token (``served``) or gone. False when it was not waiting."""
        estimate_ms = self._waiting.get(request)
        if estimate_ms is None:
            return False
        if served or next(iter(self._waiting)) == request:
            self._since = now
        del self._waiting[request]
        self._sum_ms = self._sum_ms - estimate_ms if self._waiting else 0.0
        return True

    def queue_ms(self, now: float) -> float:
        """Predicted time until everything now waiting has its first token."""
        if not self._waiting:
            return 0.0
        oldest = next(iter(self._waiting.values()))
        progress = min(max(0.0, (now - self._since) * 1e3), oldest * 0.98)
        return max(0.0, self._sum_ms - progress)

    def requests(self) -> list[str]:
        """Ids, oldest first."""
        return list(self._waiting)

    def check_invariants(self) -> None:
        assert abs(self._sum_ms - sum(self._waiting.values())) < 1e-3 + 1e-9 * abs(self._sum_ms)
        assert all(estimate >= 0 for estimate in self._waiting.values())
