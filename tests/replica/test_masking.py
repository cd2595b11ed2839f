"""Grammars inside the engine: every step, one step ahead, and the same tokens whatever happens around them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_harness import VOCAB, Harness

from replica.batch import FROM_DEVICE, Row
from replica.masking import Masking
from router.wire import Finish, Sampling

pytest.importorskip("llguidance")

from replica.grammar import GrammarMask, Grammars

EOS = 256
TOKENS = [*[bytes([byte]) for byte in range(256)], b"</s>", *[b"%d" % i for i in range(10, 100)]]
GRAMMARS = Grammars(TOKENS, vocab_size=VOCAB, eos_token_ids=[EOS])
LIST = (
    "llguidance",
    '%llguidance {"no_forcing": true}\nstart: "[" NUM ("," NUM)* "]"\nNUM: /[1-9][0-9]{0,2}/',
)
ENDLESS = ("llguidance", '%llguidance {"no_forcing": true}\nstart: /([a-z]{1,8} ){40,}/')


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def text_of(ids: list[int]) -> str:
    return b"".join(TOKENS[i] for i in ids if i != EOS).decode()


def run(prompts: list[list[int]], grammar: tuple[str, str], max_tokens: int, **options: Any) -> tuple[Harness, Any]:
    harness = Harness(masks=GRAMMARS, **options)
    ids = [
        harness.submit(prompt, max_tokens=max_tokens, seed=i, grammar=grammar, stop_token_ids=(EOS,))
        for i, prompt in enumerate(prompts)
    ]
    harness.finish()
    return harness, [harness.outputs[request_id] for request_id in ids]


def test_one_step_ahead_gives_the_same_tokens_and_loses_no_step() -> None:
    prompts = [prompt_of(20, seed) for seed in range(4)]
    _, waiting = run(prompts, ENDLESS, 40, async_scheduling=False)
    harness, ahead = run(prompts, ENDLESS, 40)
    assert [output.ids for output in ahead] == [output.ids for output in waiting]
    assert all(len(output.ids) == 40 and output.finish == Finish.LENGTH for output in ahead)
    assert any(row.token_ids[-1] == FROM_DEVICE for batch in harness.batches for row in batch.rows)
    assert len(harness.batches) <= 42, "a structured request skipped steps"


def test_structured_requests_leave_their_neighbours_alone() -> None:
    harness = Harness(masks=GRAMMARS)
    free = [harness.submit(prompt_of(30, seed), max_tokens=30, seed=seed) for seed in range(3)]
    bound = [
        harness.submit(prompt_of(30, seed), max_tokens=200, seed=seed, grammar=LIST, stop_token_ids=(EOS,))
        for seed in range(3)
    ]
    harness.finish()
    alone = Harness()
    for seed, request_id in enumerate(free):
        expected = alone.submit(prompt_of(30, seed), max_tokens=30, seed=seed)
        alone.finish()
        assert harness.outputs[request_id].ids == alone.outputs[expected].ids
    for request_id in bound:
        output = harness.outputs[request_id]
        if output.finish == Finish.STOP:
            assert all(0 < number < 1000 for number in eval(text_of(output.ids)))


def test_preemption_changes_no_token_and_really_happens() -> None:
    prompts = [prompt_of(30, seed) for seed in range(6)]
    _, roomy = run(prompts, ENDLESS, 60, max_num_pages=200)
    harness, tight = run(prompts, ENDLESS, 60, max_num_pages=20, watermark=0.0, max_model_len=128)
    assert harness.engine.scheduler.num_preemptions > 0
    assert [output.ids for output in tight] == [output.ids for output in roomy]


@pytest.mark.parametrize("cut", [0, 1, 7, 29])
def test_a_resumed_stream_goes_on_as_if_nothing_had_happened(cut: int) -> None:
    prompt = prompt_of(25)
    _, (whole,) = run([prompt], ENDLESS, 30)
    harness = Harness(masks=GRAMMARS)
    again = harness.submit(prompt, emitted=whole.ids[:cut], max_tokens=30, seed=0, grammar=ENDLESS)
    harness.finish()
    assert whole.ids[:cut] + harness.outputs[again].ids == whole.ids


def test_after_the_grammars_end_only_eos_comes() -> None:
    harness = Harness(masks=GRAMMARS)
    grammar = ("llguidance", '%llguidance {"no_forcing": true}\nstart: "ab"')
    stops = harness.submit(prompt_of(5), max_tokens=9, grammar=grammar, stop_token_ids=(EOS,))
    ignores = harness.submit(prompt_of(5), max_tokens=9, grammar=grammar)
    harness.finish()
    assert harness.outputs[stops].ids == [97, 98, EOS] and harness.outputs[stops].finish == Finish.STOP
    assert harness.outputs[ignores].ids == [97, 98, *[EOS] * 7] and harness.outputs[ignores].finish == Finish.LENGTH


def test_a_lost_mask_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    make = GrammarMask.mask

    def losing(self: GrammarMask, num: int, draft: Any = ()) -> np.ndarray:
        if self.num_accepted == 5 and self is victim[0]:
            raise OSError("the mask is lost")
        return make(self, num, draft)

    victim: list[GrammarMask] = []

    def masks(grammar: tuple[str, str]) -> GrammarMask:
        victim.append(GRAMMARS(grammar))
        return victim[-1]

    monkeypatch.setattr(GrammarMask, "mask", losing)
    harness = Harness(masks=masks)
    ids = [harness.submit(prompt_of(20), max_tokens=20, seed=1, grammar=ENDLESS) for _ in range(2)]
    free = harness.submit(prompt_of(20), max_tokens=20)
    harness.finish()
    lost, kept = (harness.outputs[request_id] for request_id in ids)
    assert lost.finish == Finish.ERROR and "the mask is lost" in (lost.error or "") and len(lost.ids) == 5
    assert kept.finish == Finish.LENGTH and kept.ids[:5] == lost.ids
    assert harness.outputs[free].finish == Finish.LENGTH


class Recording:
    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.drafts: list[list[int]] = []

    def mask(self, num: int, draft: Any = ()) -> np.ndarray:
        self.drafts.append(list(draft))
        return np.full((num, 1), len(self.accepted), np.int32)

    def accept(self, token_id: int) -> None:
        if token_id == 13:
            raise ValueError("13 is not allowed")
        self.accepted.append(token_id)


def test_masking_is_told_once_by_whoever_comes_first() -> None:
    masking = Masking(source := Recording(), [4, 5])
    call = masking.mask_call(3, [8])
    with pytest.raises(RuntimeError, match="after 2 ids"):
        call(None)
    assert call(6).tolist() == [[3], [3]] and source.drafts == [[8]]
    masking.accept(2, 6)
    assert source.accepted == [4, 5, 6]
    with pytest.raises(RuntimeError, match="contradicts"):
        masking.accept(1, 6)
    with pytest.raises(RuntimeError, match="contradicts"):
        masking.accept(4, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="13"):
            masking.accept(3, 13)
    masking.accept(3, 14)
    assert source.accepted == [4, 5, 6, 14]


def test_a_row_makes_its_mask_from_the_newest_id_only_when_it_needs_one() -> None:
    def row(token_ids: list[int], mask: Any) -> Row:
        return Row(3, 0, np.array(token_ids, np.int32), np.zeros(1, np.int32), 1, Sampling(), mask=mask)

    seen: list[int | None] = []
    mask = np.zeros((1, 1), np.int32)
    for token_ids in ([1, 2], [FROM_DEVICE]):
        made = row(token_ids, lambda newest: seen.append(newest) or mask)
        assert made.make_mask(lambda slot: 70 + slot) is None and made.mask is mask
    assert seen == [None, 73]
    broken = row([FROM_DEVICE], lambda newest: mask)
    assert broken.make_mask({}.__getitem__) == "grammar: 3" and broken.mask is None
