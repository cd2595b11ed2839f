"""Sampling options on a tiny model: each changes what it should, none changes a neighbour, all survive a resume."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_driver import GREEDY, Ask, Driver, Got, make_runner, prompts

from replica.batch import Batch, OwnFault, Row
from replica.logit_edits import LogitEdits
from replica.runner import ModelRunner
from router.wire import Sampling

VOCAB = 256
COUNT = 16
RANDOM = Sampling(temperature=1.0, seed=5)
PROMPT = prompts((37,))[0]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner()


def ids(runner: ModelRunner, sampling: Sampling, prompt: list[int] = PROMPT, count: int = COUNT) -> list[int]:
    (got,) = Driver(runner).run([Ask(prompt, sampling)], count)
    assert got.fault is None
    return got.ids


@pytest.fixture(scope="module")
def greedy(runner: ModelRunner) -> list[int]:
    return ids(runner, GREEDY)


@pytest.fixture(scope="module")
def drawn(runner: ModelRunner) -> list[int]:
    return ids(runner, RANDOM)


def _allowed_mask(*allowed: int) -> np.ndarray:
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)[None]


# --- every option


def test_temperature_zero_is_greedy_and_seeds_repeat(runner: ModelRunner, greedy: list[int], drawn: list[int]) -> None:
    assert ids(runner, replace(RANDOM, temperature=0.0)) == greedy
    assert ids(runner, replace(RANDOM, temperature=1e-6)) == greedy
    assert drawn == ids(runner, RANDOM) != greedy
    assert ids(runner, replace(RANDOM, seed=6)) != drawn
    assert ids(runner, replace(RANDOM, seed=2**64 - 1)) != drawn
    assert ids(runner, replace(RANDOM, temperature=3.0)) != drawn


@pytest.mark.parametrize(
    "change", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda c: next(iter(c))
)  # fmt: skip
def test_filters_at_their_tightest_are_greedy(runner: ModelRunner, greedy: list[int], change: dict[str, float]) -> None:
    assert ids(runner, replace(RANDOM, **change)) == greedy


@pytest.mark.parametrize(
    "change", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.3}], ids=lambda c: next(iter(c))
)  # fmt: skip
def test_filters_change_draws(
    runner: ModelRunner, greedy: list[int], drawn: list[int], change: dict[str, float]
) -> None:
    hot = replace(RANDOM, temperature=2.0)
    assert ids(runner, replace(hot, **change)) not in (ids(runner, hot), greedy)


def test_allowed_ids_are_all_that_comes(runner: ModelRunner) -> None:
    for sampling in (GREEDY, RANDOM):
        got = ids(runner, replace(sampling, allowed_token_ids=(3, 5, 250, 9999)))
        assert set(got) <= {3, 5, 250}


def test_logit_bias_forces_and_forbids(runner: ModelRunner, greedy: list[int]) -> None:
    assert ids(runner, replace(GREEDY, logit_bias=((7, 100.0),))) == [7] * COUNT
    without = ids(runner, replace(GREEDY, logit_bias=((greedy[0], -100.0),)))
    assert greedy[0] not in without
    nudged = ids(runner, replace(GREEDY, logit_bias=((greedy[0], -1e-6), (9999, 5.0))))
    assert nudged == greedy


def test_bad_words(runner: ModelRunner, greedy: list[int]) -> None:
    assert greedy[2] not in ids(runner, replace(GREEDY, bad_words=((greedy[2],),)))
    word = tuple(greedy[3:6])
    got = ids(runner, replace(GREEDY, bad_words=(word,)))
    assert got[:5] == greedy[:5] and got[5] != greedy[5]
    assert all(tuple(got[i : i + 3]) != word for i in range(COUNT))
    across = (*PROMPT[-2:], greedy[0])
    assert ids(runner, replace(GREEDY, bad_words=(across,)))[0] != greedy[0]
    longer_than_history = (*([1] * 100), greedy[0])
    assert ids(runner, replace(GREEDY, bad_words=(longer_than_history,))) == greedy


def test_min_tokens_keeps_stop_ids_away(runner: ModelRunner, greedy: list[int]) -> None:
    stop = greedy[0]
    got = ids(runner, replace(GREEDY, stop_token_ids=(stop,), min_tokens=4))
    assert stop not in got[:4]
    biased = replace(GREEDY, stop_token_ids=(stop,), min_tokens=4, logit_bias=((stop, 100.0),))
    got = ids(runner, biased)
    assert stop not in got[:4] and got[4:] == [stop] * (COUNT - 4)
    assert ids(runner, replace(GREEDY, stop_token_ids=(stop,))) == greedy


@pytest.mark.parametrize(
    "change",
    [{"repetition_penalty": 9.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 9.0}],
    ids=lambda c: next(iter(c)),
)
def test_penalties_end_a_loop(runner: ModelRunner, change: dict[str, float]) -> None:
    loop = replace(GREEDY, logit_bias=((11, 9.0),))
    looping = ids(runner, loop)
    assert looping.count(11) > COUNT // 2
    assert ids(runner, replace(loop, **change)).count(11) < looping.count(11)


def test_grammar_mask(runner: ModelRunner) -> None:
    masks = {0: _allowed_mask(9), 1: _allowed_mask(200, 201), 3: _allowed_mask(255)}
    for sampling in (GREEDY, RANDOM, replace(RANDOM, top_k=1)):
        (got,) = Driver(runner).run([Ask(PROMPT, sampling, masks=masks)], 5)
        assert got.ids[0] == 9 and got.ids[1] in (200, 201) and got.ids[3] == 255


def test_a_mask_without_any_token_is_that_rows_fault(runner: ModelRunner, greedy: list[int]) -> None:
    nothing = Ask(PROMPT, RANDOM, masks={2: _allowed_mask()})
    broken, sound = Driver(runner).run([nothing, Ask(PROMPT)], COUNT)
    assert "leave no token" in (broken.fault or "") and isinstance(broken.fault, OwnFault) and len(broken.ids) == 2
    assert sound.ids == greedy and sound.fault is None


# --- rows don't influence each other; nothing depends on chunks, neighbours or a resume

EVERYTHING = [
    GREEDY,
    RANDOM,
    replace(RANDOM, top_p=0.7, seed=1),
    replace(RANDOM, top_k=5, seed=2),
    replace(RANDOM, min_p=0.1, temperature=1.7, seed=3),
    replace(RANDOM, top_k=300, top_p=0.99, seed=4),
    replace(RANDOM, top_k=40, top_p=0.9, min_p=0.02, logprobs=3),
    replace(GREEDY, repetition_penalty=1.4),
    replace(RANDOM, frequency_penalty=0.8, presence_penalty=-0.3),
    replace(GREEDY, bad_words=((5, 6), (9,), (17, 3, 5))),
    replace(RANDOM, allowed_token_ids=tuple(range(40, 90)), repetition_penalty=1.2),
    replace(GREEDY, stop_token_ids=tuple(range(0, 256, 2)), min_tokens=9),
    replace(GREEDY, logit_bias=((4, 3.0), (9, -3.0)), logprobs=0),
]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[Got]:
    asked = prompts(tuple(range(5, 5 + 3 * len(EVERYTHING), 3)), seed=2)
    return [Driver(runner).run([Ask(p, s)], 24)[0] for p, s in zip(asked, EVERYTHING, strict=True)]


@pytest.mark.parametrize("chunk", [8, 512])
def test_a_crowd_changes_nobody(runner: ModelRunner, alone: list[Got], chunk: int) -> None:
    asked = prompts(tuple(range(5, 5 + 3 * len(EVERYTHING), 3)), seed=2)
    together = Driver(runner, chunk=chunk, seed=chunk).run(
        [Ask(p, s) for p, s in zip(asked, EVERYTHING, strict=True)], 24
    )
    for got, expected, sampling in zip(together, alone, EVERYTHING, strict=True):
        assert got.ids == expected.ids, sampling
        for a, b in zip(got.logprobs, expected.logprobs, strict=True):
            assert a.token == pytest.approx(b.token, abs=1e-4) and a.rank == b.rank and len(a.top) == len(b.top)


@pytest.mark.parametrize("cut", [1, 9, 23])
def test_a_resume_goes_on_identically(runner: ModelRunner, alone: list[Got], cut: int) -> None:
    asked = prompts(tuple(range(5, 5 + 3 * len(EVERYTHING), 3)), seed=2)
    asks = [Ask(p, s, before.ids[:cut]) for p, s, before in zip(asked, EVERYTHING, alone, strict=True)]
    for got, before in zip(Driver(runner, chunk=16).run(asks, 24 - cut), alone, strict=True):
        assert got.ids == before.ids[cut:]


def test_a_slot_keeps_nothing_of_its_last_request(runner: ModelRunner, greedy: list[int]) -> None:
    for sampling in EVERYTHING:
        ids(runner, sampling, count=3)
        assert ids(runner, GREEDY) == greedy
    runner.check_invariants()
    assert not runner._sampler.edits._slots


# --- speculative verification: several samples in one row


def _verify(runner: ModelRunner, sampling: Sampling, drafts: list[int]) -> tuple[list[int], list[int]]:
    """Prefill, one row that verifies ``drafts``, then three plain steps from where it ended."""
    pages = np.arange(1, 9, dtype=np.int32)
    history = np.array(PROMPT, np.int32)
    n, end = len(history), len(history) + 1 + len(drafts)
    first = Row(0, 0, history, pages, 1, sampling, True, history, n, n)
    (start,) = runner.launch(Batch(0, [first])).result().ids[0]
    row = Row(0, n, np.array([start, *drafts], np.int32), pages, 1 + len(drafts), sampling, False, None, n, n + 1)
    (sampled,) = runner.launch(Batch(1, [row])).result().ids
    tokens = [start, *sampled]
    for _ in range(3):
        at = n + len(tokens) - 1
        row = Row(0, at, np.array([-1], np.int32), pages, 1, sampling, False, None, n, at + 1)
        tokens += runner.launch(Batch(2, [row])).result().ids[0]
    runner.release(0)
    assert end <= len(pages) * 16
    return tokens, sampled


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        RANDOM,
        replace(RANDOM, frequency_penalty=1.0, repetition_penalty=1.3),
        replace(GREEDY, bad_words=((5, 6), tuple(PROMPT[-2:]))),
    ],
)
def test_verified_drafts_give_the_same_tokens(runner: ModelRunner, sampling: Sampling) -> None:
    plain = ids(runner, sampling, count=9)
    cases = ((plain[1:5], 5), ([*plain[1:3], (plain[3] + 1) % VOCAB, 7], 3), ([(plain[1] + 1) % VOCAB], 1))
    for drafts, kept in cases:
        tokens, sampled = _verify(runner, sampling, drafts)
        assert tokens == plain[: len(tokens)]
        assert len(sampled) == kept, "what follows a wrong draft is dropped"


# --- log-probabilities


def _raw(runner: ModelRunner, sequence: list[int]) -> torch.Tensor:
    """log_softmax of every position, through one forward pass of everything."""
    (got,) = Driver(runner).run([Ask(sequence, replace(GREEDY, prompt_logprobs=VOCAB, logprobs=VOCAB))], 1)
    assert got.prompt_logprobs[0] is None
    scored = [*got.prompt_logprobs[1:], *got.logprobs]
    out = torch.empty(len(scored), VOCAB)
    for i, entry in enumerate(scored):
        assert entry is not None
        for token, value in entry.top:
            out[i, token] = value
    return out


def test_logprobs_are_raw_and_ranked(runner: ModelRunner) -> None:
    for sampling in (
        replace(RANDOM, temperature=2.0, top_k=3, logprobs=5),
        replace(GREEDY, logit_bias=((7, 50.0),), logprobs=0),
    ):
        (got,) = Driver(runner).run([Ask(PROMPT, sampling)], 6)
        raw = _raw(runner, PROMPT + got.ids)[len(PROMPT) - 1 :]
        for i, entry in enumerate(got.logprobs):
            assert entry.token == pytest.approx(float(raw[i, got.ids[i]]), abs=2e-4)
            assert entry.rank == int((raw[i] > raw[i, got.ids[i]] + 1e-5).sum()) + 1
            values, order = raw[i].topk(sampling.logprobs or 1)
            assert [t for t, _ in entry.top] == order.tolist()[: sampling.logprobs]
            np.testing.assert_allclose([v for _, v in entry.top], values[: sampling.logprobs].numpy(), atol=2e-4)


def test_raw_logprobs_are_normalised(runner: ModelRunner) -> None:
    torch.testing.assert_close(_raw(runner, PROMPT).logsumexp(-1), torch.zeros(len(PROMPT)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 16, 20, 36])
def test_prompt_logprobs_do_not_depend_on_chunks(runner: ModelRunner, chunk: int) -> None:
    asks = [Ask(PROMPT, replace(RANDOM, prompt_logprobs=2)), Ask(PROMPT[:20], GREEDY)]
    whole, _ = Driver(runner).run(asks, 2)
    got, other = Driver(runner, chunk=chunk).run(asks, 2)
    assert len(got.prompt_logprobs) == len(PROMPT) and other.prompt_logprobs == []
    for a, b in zip(got.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert a is not None and b is not None and a.rank == b.rank
        assert a.token == pytest.approx(b.token, abs=1e-4) and [t for t, _ in a.top] == [t for t, _ in b.top]


# --- errors


def test_options_that_need_history_say_so(runner: ModelRunner) -> None:
    row = Row(
        0,
        0,
        np.array(PROMPT, np.int32),
        np.arange(1, 9, dtype=np.int32),
        1,
        replace(GREEDY, presence_penalty=1.0),
        True,
    )
    with pytest.raises(ValueError, match="history"):
        runner.launch(Batch(0, [row])).result()
    assert ids(runner, GREEDY)


def test_penalty_tables_are_reused_and_grow() -> None:
    edits = LogitEdits(VOCAB, torch.device("cpu"))
    history = np.array([1, 2, 2], np.int32)
    options = replace(GREEDY, frequency_penalty=1.0)
    for round_ in range(3):
        for slot in range(10):
            edits.begin(Row(slot, 0, history, history, 1, options, True, history, 1))
            edits.check_invariants()
        assert len(edits.tables.counts) == 16, round_
        for slot in range(10):
            entry = edits.get(slot)
            assert entry is not None and edits.tables.counts[entry.pool_row].nonzero().flatten().tolist() == [2]
            edits.end(slot)
            edits.check_invariants()
