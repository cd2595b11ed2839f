"""Frames go round unchanged, and no bytes that decode as msgpack get past the type checks."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory import Directory
from router.placement import ReplicaState
from router.stream_state import StreamState
from router.wire import (
    Code,
    EventBatch,
    Kind,
    Load,
    Logprob,
    ProtocolError,
    Refusal,
    Sampling,
    Snapshot,
    Submit,
    TokenDelta,
    encode,
    rechunk,
)
from tests.frames import frames_in

KEYS = bytes(range(48))
SUBMIT = Submit(
    "q", b"\1\0\0\0" * 40, 36, b"r" * 16, b"h" * 32, Sampling(max_tokens=9, seed=(1 << 64) - 1), 250, -3, "t"
)
BATCH = EventBatch(
    "r1", 5, 6, 7, [(1, 0, KEYS)], [(1, KEYS[:8])], [("a", KEYS)], ["b"],
    Load(1, 2, 3, 4, 5, 6, (0.1, 0.2, 0.3, 0.4, 0.5)), [(3, 1 << 63), (0, 0)],
)  # fmt: skip
CHUNK = Snapshot("r1", 5, 6, 1, 2, 0, KEYS, [(6, 9), (0, 0)], [("a", KEYS)], Load(running=3))


def decode(frame: bytes) -> list[Any]:
    (only,) = frames_in(frame)
    return only


def test_round_trips() -> None:
    assert Submit.from_frame(decode(SUBMIT.to_frame())) == SUBMIT
    assert EventBatch.from_frame(decode(BATCH.to_frame())) == BATCH
    assert Snapshot.from_frame(decode(CHUNK.to_frame())) == CHUNK
    name, refusal = Refusal.from_frame(decode(Refusal(Code.OVERLOADED, "full", "n", 2.5).to_frame("q")))
    assert (name, refusal.code, refusal.message, refusal.param, refusal.retry_after_s) == (
        "q", "overloaded", "full", "n", 2.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta("q", [1, 2]),
        TokenDelta("q", [], "stop"),
        TokenDelta("q", [5], None, 32),
        TokenDelta("q", [5], "length", 0, [Logprob(-0.5, 1, ((5, -0.5), (7, -1.25)))]),
        TokenDelta("q", [5], None, 3, None, [None, Logprob(-2.0, 9)]),
        TokenDelta("q", [], "error", error="why"),
    ],
)
def test_deltas_go_round_and_are_short(delta: TokenDelta) -> None:
    (raw,) = decode(encode(Kind.TOKENS, [delta.to_wire()]))[1]
    assert TokenDelta.from_wire(raw) == delta
    if delta == TokenDelta("q", [1, 2]):
        assert raw == ["q", [1, 2]]


def test_every_sampling_field_goes_round_and_is_type_checked() -> None:
    values: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 1, "min_tokens": 1,
        "stop_token_ids": (1, 2), "frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1,
        "logit_bias": ((3, -1.5),), "allowed_token_ids": (4,), "bad_words": ((1, 2), (3,)), "logprobs": 0,
        "prompt_logprobs": 2, "grammar": ("regex", "a+"),
    }  # fmt: skip
    assert set(values) == {field.name for field in dataclasses.fields(Sampling)}, "a new field needs a check too"
    sampling = Sampling(**values)
    assert Sampling.from_wire(msgpack.unpackb(msgpack.packb(sampling.to_wire()))) == sampling
    assert Sampling().to_wire() == {}
    for name in values:
        for wrong in ("x", [["x"]], {"a": 1}, True, b"x"):
            with pytest.raises(ProtocolError, match=name):
                Sampling.from_wire({name: wrong})
    for wrong in ({"seed": -1}, {"seed": 1 << 64}, {"stop_token_ids": [-1]}, {"logit_bias": [[1]]}, {"tempratur": 1.0}):
        with pytest.raises(ProtocolError):
            Sampling.from_wire(wrong)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 64) | st.floats() | st.text(max_size=5) | st.binary(max_size=17),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(which=st.sampled_from([SUBMIT, BATCH, CHUNK]), place=st.integers(0, 12), value=junk, cut=st.integers(0, 12))
def test_one_wrong_element_is_a_protocol_error_or_harmless(which: Any, place: int, value: Any, cut: int) -> None:
    frame = decode(which.to_frame())
    if place < len(frame) - 1:
        frame[place + 1] = value
    else:
        del frame[cut:]
    try:
        decoded = type(which).from_frame(frame)
    except ProtocolError:
        return
    if which is SUBMIT:
        return
    # what decodes can be applied: a router must not stop half-way through a batch
    directory = Directory()
    sink = ReplicaState("r1", directory, 16)
    state = StreamState("r1", directory, sink)
    state.attach(decoded.epoch, 0.0)
    first = Snapshot("r1", decoded.epoch, decoded.seq - 1, 0, 1, 0, b"", [(0, 0), (0, 0)])
    for part in (first, decoded) if which is BATCH else (dataclasses.replace(decoded, index=0),):
        (state.on_batch if isinstance(part, EventBatch) else state.on_snapshot)(part, 0.0)
        directory.check_invariants()


def test_trailing_elements_of_a_newer_peer_are_ignored() -> None:
    for message in (SUBMIT, BATCH, CHUNK):
        assert type(message).from_frame([*decode(message.to_frame()), "new"]) == message


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 100])
def test_rechunking_keeps_every_key_and_the_reservations(count: int) -> None:
    keys = random.Random(count).randbytes(8 * count)
    halves = [keys[: 8 * (count // 2)], keys[8 * (count // 2) :]]
    snapshot = [Snapshot("r", 1, 2, i, 2, 0, half, [(count, 1), (0, 0)]) for i, half in enumerate(halves)]
    snapshot[-1].reservations = [("q", b"")]
    cut = rechunk(snapshot, 3)
    assert b"".join(part.keys for part in cut) == keys
    assert all(len(part.keys) <= 24 for part in cut)
    assert [(part.index, part.total) for part in cut] == [(i, len(cut)) for i in range(len(cut))]
    assert [part.reservations for part in cut] == [[]] * (len(cut) - 1) + [[("q", b"")]]
