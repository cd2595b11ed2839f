"""Progress of long measurements, on stderr: a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Announce = Callable[[str], None]
"""Says what begins now; each call is one step of the total."""


@contextmanager
def steps(total: int, console: Console | None = None) -> Iterator[Announce]:
    """Yields the call that announces each of about ``total`` steps. ``console``: default stderr's."""
    console = Console(stderr=True) if console is None else console
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)

            def announce(what: str) -> None:
                bar.update(task, advance=1, description=what)

            yield announce
        return
    began, done = time.monotonic(), 0

    def say(what: str) -> None:
        nonlocal done
        done += 1
        text = f"[{time.monotonic() - began:4.0f} s] {done}/{max(done, total)} {what}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    yield say
