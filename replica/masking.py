"""The engine's seam for grammars: masks that are made when the step before is done and the next one is under way.

    device      | forward k | sample k | forward k+1 ........ | sample k+1
    runner                             id of k -> accept, mask ^ copied and applied here

The loop schedules step k+1 without knowing step k's id, so it gives the runner a :data:`replica.batch.MaskCall`
instead of a mask. Whoever learns of an id first, the runner or the loop, tells the mask source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from replica.batch import MaskCall


class MaskSource(Protocol):
    """One per request. What it raises ends that request with an error: a mask that is lost fails closed."""

    def mask(self, num: int, draft: Sequence[int] = ()) -> np.ndarray:
        """Packed int32 [num, ceil(vocab / 32)]: which ids may come next and, for speculative verification, after each
        of the ``num - 1`` ids of ``draft``, which are not accepted by this."""
        ...

    def accept(self, token_id: int) -> None: ...


MaskFactory = Callable[[tuple[str, str]], MaskSource]
"""(kind, source) of a grammar -> its mask source; raises for a bad grammar. Runs in the submitting thread."""


class Masking:
    """A request's mask source and the ids that it has been told. Thread-safe; ids are numbered from the first emitted
    one, so telling it twice does nothing and a gap is an error."""

    def __init__(self, source: MaskSource, emitted: Sequence[int] = ()) -> None:
        """Raises what the source raises for ids emitted elsewhere."""
        self._source = source
        self._ids: list[int] = []
        self._lock = threading.Lock()
        for index, token_id in enumerate(emitted):
            self.accept(index, token_id)

    def accept(self, index: int, token_id: int) -> None:
        """Emitted id number ``index`` is ``token_id``. Raises what the source raises, every time it is told."""
        with self._lock:
            self._accept(index, token_id)

    def mask_call(self, index: int, draft: Sequence[int] | np.ndarray = ()) -> MaskCall:
        """Masks for the emitted ids number ``index`` on, as many as ``draft`` has and one more, to be made once number
        ``index - 1`` is known, and those of ``draft``, which is read then."""

        def make(newest: int | None) -> np.ndarray:
            with self._lock:
                if newest is not None:
                    self._accept(index - 1, newest)
                if len(self._ids) != index:
                    raise RuntimeError(f"the mask of id {index} was asked for after {len(self._ids)} ids")
                return self._source.mask(1 + len(draft), [int(token_id) for token_id in draft])

        return make

    def _accept(self, index: int, token_id: int) -> None:
        known = len(self._ids)
        if index > known or (index < known and self._ids[index] != token_id):
            raise RuntimeError(f"id {token_id} as number {index} contradicts the {known} ids before")
        if index == known:
            self._source.accept(token_id)
            self._ids.append(token_id)
