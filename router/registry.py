"""Where Serve's membership feed leaves what it hears, and where the router process picks it up.

Ray pickles a custom ``RequestRouter``'s module by value, so that module's globals are private copies; this one is
imported by name and is therefore the same object on both sides. It is the one process-wide state of the router.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

Address = tuple[str, int]
Members = dict[str, Address]
"""Serve's replica id -> (host, port) of its token plane."""


class Registry:
    """Members per engine deployment, with listeners. Thread-safe: Serve publishes from its own router thread.

    Listeners run under the lock, so that none sees an older set after a newer one; they must only hand over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, Members] = {}
        self._listeners: dict[str, list[Callable[[Members], None]]] = {}

    def publish(self, deployment: str, members: Mapping[str, Address]) -> None:
        """Replace the deployment's members and tell its listeners, on the caller's thread."""
        snapshot = dict(members)
        with self._lock:
            if self._members.get(deployment) == snapshot:
                return
            self._members[deployment] = snapshot
            for listener in self._listeners.get(deployment, ()):
                listener(dict(snapshot))

    def listen(self, deployment: str, listener: Callable[[Members], None]) -> Callable[[], None]:
        """Call ``listener`` with the members known so far, if any, and at every change. Returns its removal."""
        with self._lock:
            self._listeners.setdefault(deployment, []).append(listener)
            if (known := self._members.get(deployment)) is not None:
                listener(dict(known))

        def remove() -> None:
            with self._lock:
                self._listeners[deployment].remove(listener)

        return remove


membership = Registry()

current_app: ContextVar[Any] = ContextVar("everwarm_asgi_app")
"""The ASGI app of the router under construction: ``serve.ingress`` calls its builder without the instance."""
