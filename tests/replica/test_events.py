"""The event log: net changes, contiguity, replay, snapshot."""

from __future__ import annotations

import random

import pytest
from engine_harness import Mirror

from replica import events
from replica.events import EventLog
from router.pages import unpack_keys
from router.wire import EventBatch, Load
from tests.frames import frames_in


def test_net_change_of_a_batch() -> None:
    log, mirror = EventLog("r"), Mirror()
    log.stored(1, 0)
    log.stored(2, 1)
    log.stored(9, 0)
    log.removed(2)
    batch = log.emit(Load())
    mirror.apply(batch)
    assert [(p, unpack_keys(k)) for p, _, k in batch.stored] == [(0, [1]), (0, [9])] and not batch.removed
    log.removed(1)
    log.stored(1, 0)
    batch = log.emit(Load())
    mirror.apply(batch)
    assert not batch.stored and not batch.removed, "left and came back: nothing happened"
    log.check_invariants([[1, 9], []])


def test_runs_are_parent_first() -> None:
    log = EventLog("r")
    for key, parent in ((1, 0), (2, 1), (3, 2), (7, 2), (8, 7), (5, 0)):
        log.stored(key, parent)
    batch = log.emit(Load())
    assert [(p, unpack_keys(k)) for p, _, k in batch.stored] == [(0, [1, 2, 3]), (2, [7, 8]), (0, [5])]


def test_random_changes_against_a_mirror() -> None:
    rng = random.Random(3)
    log, mirror = EventLog("r"), Mirror()
    resident: dict[int, int] = {}
    for _ in range(400):
        for _ in range(rng.randrange(6)):
            leaves = [k for k in resident if k not in resident.values()]
            if leaves and rng.random() < 0.5:
                key = rng.choice(leaves)
                del resident[key]
                log.removed(key)
            else:
                key, parent = rng.randrange(1, 60), rng.choice([0, *resident])
                if key not in resident:
                    resident[key] = parent
                    log.stored(key, parent)
        log.check_invariants([list(resident), []])
        wire = log.emit(Load()).to_frame()
        mirror.apply(EventBatch.from_frame(frames_in(wire)[0]))
        assert mirror.keys == set(resident)


def test_reservations_are_echoed_and_ended_once() -> None:
    log, mirror = EventLog("r"), Mirror()
    log.accept("a", [5, 6])
    log.accept("b", [])
    mirror.apply(log.emit(Load()))
    assert mirror.reservations.keys() == {"a", "b"}
    for _ in range(3):
        log.end("a")
        log.end("unknown")
    batch = log.emit(Load())
    mirror.apply(batch)
    assert batch.ended == ["a"] and mirror.reservations.keys() == {"b"}


def test_replay_and_ring() -> None:
    log = EventLog("r", ring=8)
    assert log.replay(0) == [] and log.replay(1) is None and log.replay(-1) is None
    batches = [log.emit(Load()) for _ in range(20)]
    assert [b.seq for b in batches] == list(range(20)) and len({b.epoch for b in batches}) == 1
    assert log.replay(20) == [] and log.replay(21) is None
    assert log.replay(12) == batches[12:] and log.replay(11) is None
    assert EventLog("r").epoch != log.epoch


def test_snapshot_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SNAPSHOT_KEYS", 4)
    log = EventLog("r")
    log.accept("a", [77])
    for key in range(1, 11):
        log.stored(key, key - 1)
    with pytest.raises(AssertionError):
        log.snapshot([range(1, 11), []], Load())
    batch = log.emit(Load())
    chunks = log.snapshot([list(range(1, 11)), []], Load())
    assert [(c.index, c.total, unpack_keys(c.keys)) for c in chunks] == [
        (0, 3, [1, 2, 3, 4]),
        (1, 3, [5, 6, 7, 8]),
        (2, 3, [9, 10]),
    ]
    assert all(c.seq == batch.seq and c.digests == batch.digests for c in chunks)
    assert [c.reservations for c in chunks] == [[], [], [("a", batch.accepted[0][1])]]
    empty = EventLog("r")
    empty.emit(Load())
    assert [(c.index, c.total, c.keys) for c in empty.snapshot([[], []], Load())] == [(0, 1, b"")]
