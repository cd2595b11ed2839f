"""A runner without a model, for tests of the engine and for benches of what surrounds it.

Its "KV" is a running hash of the history: position p holds h_p = h_{p-1} + mix(token_p, p), and what it samples after
p depends on every value that the block table shows for 0..p. A wrong page, a stale page, a page freed too early or a
hit on another history therefore changes the output, just as it would in a model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from replica.batch import FROM_DEVICE, Batch, Move, Row, StepResult
from router.wire import Logprob

_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


def _mix(values: np.ndarray) -> np.ndarray:
    """Scrambles uint64 (the finaliser of MurmurHash3)."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    return values ^ (values >> np.uint64(29))


def _token_hash(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return _mix(token_ids.astype(np.uint64) * _MULTIPLY + positions.astype(np.uint64))


def _choose(history: int, seed: int, position: int, vocab_size: int) -> int:
    mixed = (history * 0xD6E8FEB86659FD93 + seed * 0x9E3779B97F4A7C15 + position) & _MASK64
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK64
    return (mixed ^ (mixed >> 32)) % vocab_size


def _history_hash(kv: np.ndarray) -> int:
    weights = np.arange(len(kv), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((kv * weights).sum(dtype=np.uint64))


def expected_ids(prompt: list[int], count: int, *, seed: int, vocab_size: int) -> list[int]:
    """What a StubRunner must emit after ``prompt``, computed without pages or batches."""
    ids = list(prompt)
    for _ in range(count):
        kv = np.cumsum(_token_hash(np.array(ids), np.arange(len(ids))), dtype=np.uint64)
        ids.append(_choose(_history_hash(kv), seed, len(ids), vocab_size))
    return ids[len(prompt) :]


class _StubStep:
    def __init__(self, runner: StubRunner, batch: Batch, ready: float) -> None:
        self._runner, self._batch, self._ready = runner, batch, ready
        self.outcome: StepResult | Exception | None = None

    @property
    def batch(self) -> Batch:
        return self._batch

    def wait(self, timeout: float) -> bool:
        delay = self._ready - time.monotonic()
        if delay > 0:
            time.sleep(min(delay, timeout))
        return time.monotonic() >= self._ready

    def result(self) -> StepResult:
        self.wait(1e9)
        self._runner.execute_through(self)
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class _StubSums:
    """Checksums that are made when they are asked for, in their turn."""

    cost_s = 0.0

    def __init__(self, runner: StubRunner, pages: list[int]) -> None:
        self._runner, self.pages = runner, pages
        self.outcome: list[int] | None = None

    def wait(self, timeout: float) -> bool:
        return True

    def result(self) -> list[int]:
        self._runner.execute_through(self)
        assert self.outcome is not None
        return self.outcome


class StubRunner:
    """Implements replica.batch.Runner.

    ``step_ms`` is a number or a function of the batch. ``content=False`` skips the fake KV: ids are then a function
    of (seed, position) alone and a row costs next to nothing. Steps execute in launch order, but only when a result is
    asked for, so a batch that is changed after its launch shows. ``before_step`` may raise to fail a whole step, or
    return {row index: problem} to fail single rows.
    """

    def __init__(
        self,
        *,
        num_pages: int = 1024,
        page_size: int = 16,
        vocab_size: int = 32000,
        max_model_len: int = 8192,
        max_batch_size: int = 1024,
        step_ms: float | Callable[[Batch], float] = 0.0,
        content: bool = True,
        before_step: Callable[[Batch], dict[int, str] | None] | None = None,
    ) -> None:
        self.vocab_size, self.max_model_len, self.num_pages = vocab_size, max_model_len, num_pages
        self.page_size, self.content, self.before_step = page_size, content, before_step
        self.num_computed = 0
        """Tokens whose KV was computed, over all steps."""
        self._step_ms = step_ms
        self._kv = np.zeros(num_pages * page_size if content else 0, np.uint64)
        self._last = [0] * max_batch_size
        self._occupied = [False] * max_batch_size
        self._host: dict[int, np.ndarray] = {}
        """Content of host slots."""
        self._queue: list[_StubStep | _StubSums | list[Move]] = []
        self._device_free = 0.0
        self._lock = threading.Lock()

    def launch(self, batch: Batch) -> _StubStep:
        ms = self._step_ms(batch) if callable(self._step_ms) else self._step_ms
        self._device_free = max(self._device_free, time.monotonic()) + ms / 1e3
        step = _StubStep(self, batch, self._device_free)
        for row in batch.rows:
            assert row.new or self._occupied[row.slot], f"slot {row.slot} goes on without a first row"
            self._occupied[row.slot] = True
        self._queue.append(step)
        return step

    def move(self, moves: list[Move]) -> None:
        if self.content:
            self._queue.append(moves)

    def _move(self, move: Move) -> None:
        pages = self._kv.reshape(self.num_pages, self.page_size)
        if move.to_host:
            self._host.update(zip(move.slots, pages[move.pages], strict=True))
        else:
            pages[move.pages] = [self._host[slot] for slot in move.slots]

    def checksums(self, pages: list[int]) -> _StubSums:
        sums = _StubSums(self, pages)
        self._queue.append(sums)
        return sums

    def _sum(self, pages: list[int]) -> list[int]:
        content = self._kv.reshape(self.num_pages, -1)[pages] if self.content else np.zeros((len(pages), 1), np.uint64)
        return [_history_hash(page) for page in content]

    def execute_through(self, last: _StubStep | _StubSums) -> None:
        with self._lock:
            while last.outcome is None:
                step = self._queue.pop(0)
                if isinstance(step, list):
                    for move in step:
                        self._move(move)
                    continue
                if isinstance(step, _StubSums):
                    step.outcome = self._sum(step.pages)
                    continue
                try:
                    step.outcome = self._execute(step.batch)
                except Exception as error:
                    step.outcome = error

    def _execute(self, batch: Batch) -> StepResult:
        faults = (self.before_step(batch) if self.before_step else None) or {}
        result = StepResult([], faults=faults)
        for index, row in enumerate(batch.rows):
            if fault := row.make_mask(self._last.__getitem__):
                faults[index] = fault
            histories = self._write(row) if self.content and index not in faults else [0] * row.num_samples
            ids = [
                _choose(history, row.sampling.seed, row.position_base + i, self.vocab_size)
                for i, history in enumerate(histories)
            ]
            if row.mask is not None and not callable(row.mask):
                ids = [_allowed(token_id, mask) for token_id, mask in zip(ids, row.mask, strict=True)]
            if len(ids) > 1:
                ids = ids[: row.num_kept(ids)]
            if ids:
                self._last[row.slot] = ids[-1]
            result.ids.append(ids)
        if any(row.sampling.logprobs is not None for row in batch.rows):
            result.logprobs = [
                None if row.sampling.logprobs is None else [Logprob(-float(i % 7), 1) for i in ids]
                for row, ids in zip(batch.rows, result.ids, strict=True)
            ]
        return result

    def _write(self, row: Row) -> list[int]:
        """Computes the row's KV; returns, for each sample, the hash of all that its block table shows up to there."""
        token_ids = np.array(row.token_ids)
        token_ids[token_ids == FROM_DEVICE] = self._last[row.slot]
        end = row.start + len(token_ids)
        positions = np.arange(row.start, end)
        slots = (row.pages[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)).reshape(-1)[:end]
        assert len(slots) == end and slots.min() >= self.page_size, "block table too short or with the null page"
        before = self._kv[slots[row.start - 1]] if row.start else np.uint64(0)
        sums = np.cumsum(_token_hash(token_ids, positions), dtype=np.uint64)
        self._kv[slots[row.start :]] = sums + before
        self.num_computed += len(token_ids)
        return [_history_hash(self._kv[slots[: end - i]]) for i in reversed(range(row.num_samples))]

    def release(self, slot: int) -> None:
        self._occupied[slot] = False

    def describe(self) -> dict[str, Any]:
        return {"device": "stub", "content": self.content}

    def close(self) -> None: ...


def _allowed(token_id: int, mask: np.ndarray) -> int:
    """The first allowed id at or after ``token_id``, cyclically."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])
