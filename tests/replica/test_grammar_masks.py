"""Grammar masks: what they allow, how they advance, go back and fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from replica.grammar import GrammarFault, GrammarMask, Grammars

HEADER = '%llguidance {"no_forcing": true}\n'
EOS, BOS, OTHER_EOS = 256, 257, 258
TOKENS = [*[bytes([byte]) for byte in range(256)], b"</s>", b"<s>", b"<end>", b"ab", b"abc", b"ab", b"", b"12"]
VOCAB = 300
GRAMMARS = Grammars(TOKENS, vocab_size=VOCAB, eos_token_ids=(EOS, OTHER_EOS), special_ids=(EOS, BOS, OTHER_EOS))


def start(source: str) -> GrammarMask:
    return GRAMMARS(("llguidance", HEADER + source))


def allowed(mask: np.ndarray) -> set[int]:
    assert mask.dtype == np.int32
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_layout_is_one_bit_per_id_of_the_models_vocabulary() -> None:
    mask = start("start: /a(b|bc)?/").mask(1)
    assert mask.shape == (1, -(-VOCAB // 32)) and mask.flags.c_contiguous and mask.flags.owndata
    # Two ids with equal bytes are both allowed; an id without bytes and ids past the tokenizer's never are.
    assert allowed(mask[0]) == {ord("a"), 259, 260, 261}


def test_after_the_end_only_eos_and_special_ids_never() -> None:
    mask = start('start: "a" "b"?')
    assert not mask.finished
    mask.accept(ord("a"))
    assert allowed(mask.mask(1)[0]) == {ord("b"), EOS, OTHER_EOS}
    mask.accept(ord("b"))
    assert mask.finished and allowed(mask.mask(1)[0]) == {EOS, OTHER_EOS}
    mask.accept(EOS)
    mask.accept(OTHER_EOS)
    assert allowed(mask.mask(1)[0]) == {EOS, OTHER_EOS}
    with pytest.raises(GrammarFault, match="not allowed"):
        mask.accept(ord("a"))
    with pytest.raises(GrammarFault, match="not allowed"):
        start("start: /.*/").accept(BOS)


def test_eos_before_the_end_is_a_fault() -> None:
    mask = start('start: "ab"')
    mask.accept(ord("a"))
    with pytest.raises(GrammarFault, match="before the grammar"):
        mask.accept(EOS)
    mask.check_invariants()
    assert allowed(mask.mask(1)[0]) == {ord("b")}


def test_an_id_that_is_not_allowed_is_a_fault_that_changes_nothing() -> None:
    mask = start("start: /[0-9]+/")
    mask.accept(263)
    for wrong in (ord("a"), 262, 299, 10_000):
        with pytest.raises(GrammarFault):
            mask.accept(wrong)
    assert mask.num_accepted == 1
    mask.check_invariants()
    mask.accept(ord("3"))


def test_masks_for_drafted_ids_leave_the_state_alone() -> None:
    mask = start("start: /a[0-9]b?/")
    rows = mask.mask(4, ids("a1b"))
    assert mask.num_accepted == 0
    assert [allowed(row) & {ord("a"), ord("1"), ord("b"), EOS} for row in rows] == [
        {ord("a")},
        {ord("1")},
        {ord("b"), EOS},
        {EOS},
    ]
    broken = mask.mask(4, ids("axb"))
    assert np.array_equal(broken[:2], rows[:2])
    assert allowed(broken[2]) == allowed(broken[3]) == {EOS, OTHER_EOS}
    assert mask.num_allowed(ids("a1x")) == 2 and mask.num_allowed([*ids("a1"), EOS]) == 3
    assert mask.num_allowed(ids("x")) == 0 and mask.num_accepted == 0
    with pytest.raises(GrammarFault, match="need 1 draft"):
        mask.mask(2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=30), st.randoms(use_true_random=False))
def test_going_back_equals_never_having_gone(steps: list[int], random: object) -> None:
    """Any mix of accepting and rolling back, eos included, leaves the mask of the ids that remain."""
    source = "start: (/[a-c]/ | NUM)+\nNUM: /[0-9]{1,3};/"
    mask, held = start(source), []
    for step in steps:
        if step == 0 and held:
            num = random.randint(1, len(held))  # type: ignore[attr-defined]
            mask.rollback(num)
            del held[-num:]
        else:
            choice = random.choice(sorted(allowed(mask.mask(1)[0])))  # type: ignore[attr-defined]
            mask.accept(choice)
            held.append(choice)
        mask.check_invariants()
        assert mask.num_accepted == len(held)
        replayed = start(source)
        for token_id in held:
            replayed.accept(token_id)
        assert np.array_equal(mask.mask(1), replayed.mask(1))


def test_rolling_back_too_far_is_a_fault() -> None:
    mask = start("start: /a*/")
    mask.accept(ord("a"))
    with pytest.raises(GrammarFault, match="2 of 1"):
        mask.rollback(2)


def test_requests_with_one_grammar_do_not_share_a_state() -> None:
    one, two = start("start: /ab/"), start("start: /ab/")
    one.accept(ord("a"))
    assert allowed(two.mask(1)[0]) >= {ord("a")} and ord("b") not in allowed(two.mask(1)[0])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (("json_schema", "{}"), "'json_schema' is unknown"),
        (("llguidance", "start: missing"), "missing"),
        (("llguidance", HEADER + "start: /(/"), "invalid regex"),
        (("llguidance", ""), "."),
    ],
)
def test_bad_sources_are_refused(grammar: tuple[str, str], words: str) -> None:
    with pytest.raises(GrammarFault, match=words):
        GRAMMARS(grammar)


def test_a_mask_that_cannot_be_had_fails_closed() -> None:
    """The library answers an error with a mask that ends the text, which would pass for a finished answer."""
    keys = ",".join(f'"p{i}": {{}}' for i in range(2000))
    mask = start(f'start: %json {{"type": "object", "properties": {{{keys}}}}}')
    with pytest.raises(GrammarFault, match="max is 2000"):
        mask.accept(ord("{"))
    for broken in (lambda: mask.mask(1), lambda: mask.accept(ord('"')), lambda: mask.num_allowed([ord('"')])):
        with pytest.raises(GrammarFault, match="max is 2000"):
            broken()
    no_instance = start('start: %json {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}')
    for _ in range(2):
        with pytest.raises(GrammarFault):
            no_instance.mask(1)


def test_an_eos_id_is_needed() -> None:
    with pytest.raises(ValueError, match="eos_token_ids"):
        Grammars(TOKENS, vocab_size=VOCAB, eos_token_ids=(VOCAB,))


def test_masks_that_hold_everybody_up_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(i) for i in range(1000))
    monkeypatch.setattr("replica.grammar.time.thread_time", lambda: next(clock) * 0.02)
    mask = start("start: /[a-z]+/")
    with pytest.raises(GrammarFault, match="20 ms each"):
        for _ in range(100):
            mask.mask(1)
    assert 10 < mask._num_made < 30, "the grace of a quarter second, and no more"
