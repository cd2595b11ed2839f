"""Our loggers inside Serve's processes: ``log_level`` decides what they say, Serve's handlers where it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
OURS = ("cluster", "everwarm", "kernels", "replica", "router")
"""Everything below these names."""


def open_logs(level: str) -> None:
    """Serve sets up a logger of its own and no other, so that lines of ours below a warning would be lost. Given its
    handlers, they go to the same file and stream in the same format. For processes of Serve only."""
    handlers = logging.getLogger("ray.serve").handlers
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        if handlers:
            logger.handlers = list(handlers)
            logger.propagate = False


def logged(level: str, make: Callable[[str], T], name: str) -> T:
    """``make(name)``, with the logs open before."""
    open_logs(level)
    return make(name)
