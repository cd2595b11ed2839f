"""Random weights through the masks: whatever ends by the grammar satisfies what the client asked for."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from grammar_schemas import SCHEMAS

pytest.importorskip("llguidance")

import jsonschema

from cluster.checkpoint import default_gguf, gguf_metadata
from replica.grammar import Grammars as Masks
from router.text.grammar import Grammars
from router.text.grammar_process import Vocabulary
from router.text.tokenizer import from_gguf_metadata

MAX_TOKENS = 300


def random_vocabulary(seed: int) -> Vocabulary:
    """All bytes, and random strings of them and of JSON's punctuation: tokens that straddle every boundary."""
    rng = np.random.default_rng(seed)
    pieces = [
        b'"',
        b'":',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b" ",
        b"\n",
        b"\\",
        b"1",
        b"a",
        b"true",
        b"\xe6\x97",
        b"\xa5",
        b"e-",
    ]
    made = {b"".join(pieces[i] for i in rng.integers(0, len(pieces), rng.integers(2, 5))) for _ in range(400)}
    made |= {rng.bytes(int(rng.integers(2, 5))) for _ in range(100)}
    tokens = [b"<eos>", *(bytes([byte]) for byte in range(256)), *sorted(made)]
    return Vocabulary(tokens, len(tokens) + 13, (0,), (0,))


def smollm() -> Vocabulary:
    tokenizer = from_gguf_metadata(gguf_metadata(default_gguf()))
    return Vocabulary(
        tokenizer.token_bytes, tokenizer.vocab_size, tokenizer.eos_token_ids, tuple(tokenizer.special_ids)
    )


@dataclass
class Model:
    """Random logits with a lean towards what closes strings, arrays and objects, so that most texts end."""

    vocabulary: Vocabulary
    grammars: Grammars
    masks: Masks
    lean: np.ndarray

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Model:
        lean = np.full(vocabulary.size, -np.inf, np.float32)
        for token_id, text in enumerate(vocabulary.tokens):
            lean[token_id] = 4.0 if text[:1] in (b'"', b"}", b"]") else -3.0 if text.isspace() else 0.0
        lean[list(vocabulary.eos_ids)] = 6.0
        masks = Masks(
            vocabulary.tokens,
            vocab_size=vocabulary.size,
            eos_token_ids=vocabulary.eos_ids,
            special_ids=vocabulary.special_ids,
        )
        return cls(vocabulary, Grammars(vocabulary), masks, lean)

    def generate(self, grammar: tuple[str, str], seed: int) -> bytes | None:
        """The text, or None when it did not end within MAX_TOKENS."""
        rng, mask, text = np.random.default_rng(seed), self.masks(grammar), bytearray()
        for _ in range(MAX_TOKENS):
            bits = np.unpackbits(mask.mask(1)[0].view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits)
            assert ids[-1] < len(self.vocabulary.tokens)
            chosen = int(ids[np.argmax(rng.standard_normal(len(ids), np.float32) + self.lean[ids])])
            mask.accept(chosen)
            mask.check_invariants()
            if chosen in self.vocabulary.eos_ids:
                return bytes(text)
            text += self.vocabulary.tokens[chosen]
        return None


@pytest.fixture(scope="module", params=["smollm", "random"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    made = Model.of(smollm() if request.param == "smollm" else random_vocabulary(7))
    yield made
    made.grammars.close()


def satisfies(text: bytes, schema: dict[str, Any]) -> None:
    decoded = text.decode("utf-8")
    value = json.loads(decoded)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', decoded)
    assert not re.search(r"[ \t\r\n]{36}|\n\s*\n", bare), f"unbounded whitespace in {decoded!r}"


async def test_every_text_that_ends_satisfies_its_schema(model: Model) -> None:
    runs = 2 if model.vocabulary.size > 10_000 else 3
    ended: Counter[str] = Counter()
    for name, schema in SCHEMAS.items():
        grammar = await model.grammars.compile("json_schema", schema)
        for seed in range(runs):
            text = model.generate(grammar, seed)
            if text is not None:
                satisfies(text, schema)
                ended[name] += 1
        await asyncio.sleep(0)
    assert sum(ended.values()) >= 0.8 * runs * len(SCHEMAS), ended
    assert len(ended) >= len(SCHEMAS) - 2, SCHEMAS.keys() - ended.keys()


async def test_json_object_is_an_object(model: Model) -> None:
    grammar = await model.grammars.compile("json_object")
    texts = [text for seed in range(5) if (text := model.generate(grammar, seed)) is not None]
    assert texts
    for text in texts:
        satisfies(text, {"type": "object"})


@pytest.mark.parametrize(
    "pattern", [r"\d{3}-\d{4}", r"(yes|no), [a-f]+!", r"[a-z]{1,6}@[a-z]{2,5}\.(com|org)", r"é{1,3}/日?", r"^a{2,9}$"]
)
async def test_regex(model: Model, pattern: str) -> None:
    grammar = await model.grammars.compile("regex", pattern)
    ended = 0
    for seed in range(3):
        text = model.generate(grammar, seed)
        if text is not None:
            ended += 1
            assert re.fullmatch(pattern, text.decode("utf-8")), text
    assert ended


async def test_choice(model: Model) -> None:
    options = ["a", "ab", 'say "hi"', "two\nlines", "日本", "back\\slash", "/"]
    grammar = await model.grammars.compile("choice", options)
    seen = {model.generate(grammar, seed) for seed in range(60)}
    assert seen <= {option.encode() for option in options} and len(seen) >= 5


ARITHMETIC = """
root  ::= expr
expr  ::= term ([-+*/] term)*   # left to right
term  ::= num | "(" expr ")"
num   ::= [1-9] [0-9]{0,3}
"""


async def test_ebnf(model: Model) -> None:
    grammar = await model.grammars.compile("ebnf", ARITHMETIC)
    ended = 0
    for seed in range(10):
        text = model.generate(grammar, seed)
        if text is not None:
            ended += 1
            assert re.fullmatch(rb"[0-9()+*/-]+", text)
            assert isinstance(eval(text.replace(b"/", b"+")), int)
    assert ended


async def test_a_replay_of_what_was_emitted_goes_on_identically(model: Model) -> None:
    """A request resumed elsewhere, after a death or a preemption, sees the masks that it would have seen."""
    kind, source = await model.grammars.compile("json_schema", SCHEMAS["tree"])
    rng, first, emitted = np.random.default_rng(3), model.masks((kind, source)), []
    for _ in range(40):
        ids = np.flatnonzero(np.unpackbits(first.mask(1)[0].view(np.uint8), bitorder="little"))
        chosen = int(rng.choice(ids))
        first.accept(chosen)
        emitted.append(chosen)
        second = model.masks((kind, source))
        for token_id in emitted:
            second.accept(token_id)
        assert np.array_equal(first.mask(1), second.mask(1))
        if chosen in model.vocabulary.eos_ids:
            break
