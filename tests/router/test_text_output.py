"""Detokenizer, stop strings and the output stream: for any split, the same text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.output import OutputStream, TextOptions
from router.text.stops import StopMatcher, StopStrings
from router.wire import Logprob
from tests.router.http_fakes import make_tokenizer

TOKENIZER = make_tokenizer()
EOS_ID = TOKENIZER.eos_token_ids[0]
BYTES = [TOKENIZER.token_id(char) for char in sorted(TOKENIZER.backend.get_vocab()) if len(char) == 1]
TEXTS = ["👩‍👩‍👧‍👦🏳️‍🌈", "日本語", "العربية", "é̂́", "𐍈\u200d", "plain text"]

_valid = st.sampled_from(TEXTS).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False))
_raw = st.lists(st.sampled_from(BYTES), min_size=1, max_size=4)
_any = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), min_size=1, max_size=3)
ids_strategy = st.lists(st.one_of(_valid, _raw, _any), max_size=8).map(
    lambda parts: [i for part in parts for i in part]
)


@settings(deadline=None)
@given(ids_strategy, st.booleans())
def test_stream_concatenates_to_the_whole_and_breaks_no_character(ids: list[int], skip: bool) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.feed(token_id))
        detokenizer.check_invariants()
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == whole
    assert sum(delta.count("\ufffd") for delta in deltas) == whole.count("\ufffd")


def _reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop to end wins, then the longest: by trying every prefix of the text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


_letters = st.text("abc", min_size=1, max_size=4)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(_letters, min_size=1, max_size=4, unique=True))
def test_stops_match_in_text_order_for_any_split(parts: list[str], stops: list[str]) -> None:
    text = "".join(parts)
    shown, matched = _reference(text, stops)
    matcher = StopMatcher(StopStrings(stops))
    out = ""
    for part in parts:
        out += matcher.feed(part)
        if matcher.matched is not None:
            break
        matcher.check_invariants()
        # Held back only as far as needed: what is held begins some stop string.
        held = "".join(parts)[len(out) :]
        assert shown.startswith(out) or matched is None, held
    else:
        out += matcher.finish()
    assert (out, matcher.matched) == (shown, matched)


def test_nothing_is_held_when_no_stop_can_begin() -> None:
    matcher = StopMatcher(StopStrings(["<end>", "###"]))
    assert matcher.feed("hello <") == "hello "
    assert matcher.feed("b") == "<b"
    assert matcher.feed("##") == ""
    assert matcher.feed(" #") == "## "
    assert matcher.finish() == "#"


def _run(ids: list[int], options: TextOptions, cuts: list[int], finish: str = "length"):
    stream = OutputStream(TOKENIZER, options)
    text, records, last = "", [], None
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    chunks = [ids[a:b] for a, b in pairwise(edges)] or [[]]
    for number, chunk in enumerate(chunks):
        logprobs = [Logprob(-float(i), 1) for i in chunk]
        piece = stream.feed(chunk, logprobs, finish if number == len(chunks) - 1 else None)
        text += piece.text
        records += piece.tokens
        stream.check_invariants()
        if piece.finish_reason is not None:
            last = (piece.finish_reason, piece.stop_reason)
            break
    return text, [(r.token_id, r.offset, r.cut) for r in records], last, stream.num_tokens


@settings(deadline=None, max_examples=100)
@given(
    ids_strategy,
    st.lists(st.integers(0, 100), max_size=6),
    st.lists(st.sampled_from(["a", "te", "text", "本", "\ufffd", "👩", "<|im"]), max_size=3, unique=True),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
def test_output_is_the_same_for_any_split(
    ids: list[int], cuts: list[int], stops: list[str], include: bool, skip: bool, min_tokens: int
) -> None:
    options = TextOptions(
        stops=StopStrings(stops) if stops else None,
        include_stop=include,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
        stop_token_ids=frozenset({EOS_ID}),
        eos_token_ids=frozenset({EOS_ID}),
        keep_tokens=True,
    )
    one_by_one = _run(ids, options, list(range(len(ids) + 1)))
    split = _run(ids, options, cuts)
    assert split == one_by_one
    text, records, last, num_tokens = split
    assert last is not None and [r[0] for r in records] == ids[:num_tokens]
    assert all(0 <= offset <= len(text) or cut for _, offset, cut in records)
    if not include and min_tokens == 0:
        assert not any(stop in text for stop in stops)


def _piece(ids: list[int], options: TextOptions, finish: str | None = None):
    return OutputStream(TOKENIZER, options).feed(ids, None, finish)


def test_stop_token_text_is_left_out_unless_asked_for() -> None:
    ids = TOKENIZER.encode("hi there", add_special_tokens=False)
    stop_id = TOKENIZER.token_id("!")
    options = TextOptions(stop_token_ids=frozenset({EOS_ID, stop_id}), eos_token_ids=frozenset({EOS_ID}))
    piece = _piece([*ids, stop_id], options, "stop")
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("hi there", "stop", stop_id)
    piece = _piece([*ids, EOS_ID], options, "stop")
    assert (piece.text, piece.stop_reason) == ("hi there", None)
    shown = TextOptions(include_stop=True, stop_token_ids=frozenset({stop_id}))
    assert _piece([*ids, stop_id], shown, "stop").text == "hi there!"


def test_records_begin_inside_the_text_and_those_after_a_stop_are_cut() -> None:
    ids = TOKENIZER.encode("abcSTOPxyz", add_special_tokens=False)
    options = TextOptions(stops=StopStrings(["STOP"]), keep_tokens=True)
    text, records, last, count = _run(ids, options, list(range(len(ids))))
    assert text == "abc" and last == ("stop", "STOP")
    assert count == len(records) < len(ids)
    for _, offset, cut in records:
        assert cut == (offset >= 3)
