"""Drafters for tests, which know what will be said and are wrong now and then, and what to ask of an engine after."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replica.loop import Engine
from replica.stub import expected_ids


class Replay:
    """Guesses the continuation of known sequences, and a wrong id where (position + salt) % wrong_every == 0."""

    foresees = True
    longest_rest = 16

    def __init__(self, sequences: Iterable[list[int]], vocab_size: int, wrong_every: int = 5) -> None:
        self._known = [np.array(ids, np.int32) for ids in sequences]
        self._vocab_size, self._wrong_every = vocab_size, wrong_every

    def guess(self, ids: np.ndarray, count: int) -> np.ndarray:
        for known in self._known:
            if len(known) > len(ids) and (known[: len(ids)] == ids).all():
                return self._spoil(known[len(ids) : len(ids) + count], len(ids), len(known))
        return np.empty(0, np.int32)

    def _spoil(self, guesses: np.ndarray, start: int, salt: int) -> np.ndarray:
        wrong = (np.arange(start, start + len(guesses)) + salt) % self._wrong_every == 0
        return np.where(wrong, (guesses + 1) % self._vocab_size, guesses).astype(np.int32)


class StubOracle(Replay):
    """Computes what a StubRunner will say with one seed."""

    def __init__(self, seed: int, vocab_size: int, wrong_every: int = 5) -> None:
        super().__init__((), vocab_size, wrong_every)
        self._seed, self._memo = seed, {}

    def guess(self, ids: np.ndarray, count: int) -> np.ndarray:
        key = (ids.tobytes(), count)
        if key not in self._memo:
            self._memo[key] = np.array(
                expected_ids(ids.tolist(), count, seed=self._seed, vocab_size=self._vocab_size), np.int32
            )
        return self._spoil(self._memo[key], len(ids), int(ids[0]))


def at_no_price(engine: Engine) -> None:
    """How far it guesses shall not depend on how busy this machine is."""
    if engine.speculation is not None:
        engine.speculation._cost.price = lambda rows: 0.02


def assert_speculated(info: dict) -> None:
    """There were right guesses and wrong ones, and every position counts those who got there."""
    drafted, accepted = info["speculation"]["drafted"], info["speculation"]["accepted"]
    assert drafted == sorted(drafted, reverse=True) and all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert 0 < sum(accepted) < sum(drafted)
    assert info["counters"]["drafted_tokens"] == sum(drafted)
    assert info["counters"]["accepted_tokens"] == sum(accepted)
