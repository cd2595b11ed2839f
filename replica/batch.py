"""The seam between the engine's loop and the runner that owns the device.

The loop schedules rows; the runner turns them into one forward pass and samples. ``launch`` must not wait for the
device: the loop launches step k+1 while step k still runs, so a row's newest input token may exist only on the
device. Such a token is written ``FROM_DEVICE``: the runner takes the id it sampled last for that slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from router.wire import Finish, Logprob, Sampling

FROM_DEVICE = -1
"""In ``Row.token_ids``: the id sampled last for this slot, still on the device."""

FROM_DRAFT = -2
"""In ``Row.drafts``: a guess of the runner's draft model, which it writes in its place before the forward pass."""

NULL_PAGE = 0
"""Never allocated; padded rows write and read there."""


MaskCall = Callable[[int | None], np.ndarray]
"""Makes a row's mask (see Row.mask) just before sampling. It gets the id sampled last for the slot when ``token_ids``
ends with FROM_DEVICE, else None. What it raises is that row's fault."""


class RequestFault(Exception):
    """Raised where a request itself is to blame that it can't go on, and not the engine."""


class OwnFault(str):
    """A row's fault of that kind."""


def finish_of(fault: str) -> Finish:
    return Finish.REFUSED if isinstance(fault, OwnFault) else Finish.ERROR


@dataclass(slots=True)
class Row:
    """One request's share of a step: compute KV of positions [start, start + len(token_ids))."""

    slot: int
    """Persistent device row in [0, max_batch_size)."""
    start: int
    token_ids: np.ndarray
    """int32 [count]; FROM_DEVICE where the id is not on the host yet."""
    pages: np.ndarray
    """int32 block table covering start + count tokens."""
    num_samples: int
    """0: a prefill chunk that ends before the last token. 1: sample after the last position.
    1 + k: sample after each of the last 1 + k positions (speculative verification), whose last k ids are drafts."""
    sampling: Sampling
    new: bool = False
    """First row of this request in this slot: per-slot sampler state must be reset."""
    history: np.ndarray | None = None
    """int32 prompt + emitted ids known on the host; given with ``new`` for penalties and bad words."""
    num_prompt: int = 0
    position_base: int = 0
    """Absolute position of the first sampled token = start + len(token_ids) - num_samples + 1."""
    mask: np.ndarray | MaskCall | None = None
    """Packed int32 grammar bitmask [num_samples, ceil(vocab / 32)], low bit first, or what makes it."""

    @property
    def drafts(self) -> np.ndarray:
        """int32 [num_samples - 1], a view of the end of ``token_ids``."""
        return self.token_ids[len(self.token_ids) - self.num_samples + 1 :]

    def num_kept(self, ids: Sequence[int]) -> int:
        """Of the sampled ids, one per sample, so many become tokens: those up to the first that differs from its
        draft, as what was sampled after it followed a token that never was."""
        for accepted, (token_id, draft) in enumerate(zip(ids, self.drafts.tolist(), strict=False)):
            if token_id != draft:
                return accepted + 1
        return len(ids)

    def make_mask(self, newest: Callable[[int], int]) -> str | None:
        """Puts the mask in place of what makes it; ``newest``: slot -> the id sampled last for it. Returns the fault
        when there is no mask: the row may then be computed, but not sampled from."""
        if not callable(self.mask):
            return None
        call, self.mask = self.mask, None
        try:
            self.mask = call(newest(self.slot) if self.token_ids[-1] == FROM_DEVICE else None)
        except Exception as error:
            return (OwnFault if isinstance(error, RequestFault) else str)(f"grammar: {error}")
        return None


@dataclass(frozen=True, slots=True)
class Move:
    """Whole pages that are copied between device and host memory: ``pages[i]`` and slot ``slots[i]``, none twice."""

    to_host: bool
    pages: list[int]
    slots: list[int]


@dataclass(slots=True)
class Batch:
    step: int
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """Per row of the batch, in order: the sampled ids that become tokens (num_samples of them, fewer where drafts were
    rejected), their logprobs where asked, or a fault."""

    ids: list[list[int]]
    logprobs: list[list[Logprob] | None] = field(default_factory=list)
    prompt_logprobs: list[list[Logprob | None] | None] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    """Row index -> why this row alone failed (non-finite logits, ...); an :class:`OwnFault` blames the request."""
    spoilt: list[int] = field(default_factory=list)
    """Pages that held NaN or infinity. It has been cleared, so they are finite now, and wrong."""
    device_ms: float = 0.0


class Step(Protocol):
    def wait(self, timeout: float) -> bool:
        """True once the result is there; gives up after ``timeout`` seconds."""
        ...

    def result(self) -> StepResult:
        """Blocks. Raises what the forward pass raised."""
        ...


class Sums(Protocol):
    """Checksums under way."""

    cost_s: float
    """Time that they took the device, seconds; once they are there."""

    def wait(self, timeout: float) -> bool:
        """True once they are there; gives up after ``timeout`` seconds."""
        ...

    def result(self) -> list[int]:
        """One per page; waits."""
        ...


class Runner(Protocol):
    """Owns weights, KV memory and the sampler of one device (or one tensor-parallel group)."""

    vocab_size: int
    max_model_len: int
    num_pages: int
    """Including the null page."""

    def launch(self, batch: Batch) -> Step: ...

    def move(self, moves: list[Move]) -> None:
        """Copies pages, after the steps already launched and before those launched later; must not wait for them. A
        runner that fails to is of no further use: it raises, here or at every later launch."""
        ...

    def checksums(self, pages: list[int]) -> Sums:
        """Of the content of pages as the steps launched so far leave it; must not wait for them."""
        ...

    def release(self, slot: int) -> None:
        """The request in ``slot`` is over; its sampler state may go once the launched steps are done."""
        ...

    def describe(self) -> dict[str, Any]:
        """For ``/v1/engine``: device, dtype, kernels in force and why, graph sizes, memory."""
        ...

    def close(self) -> None: ...
