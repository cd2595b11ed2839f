"""Grammars on a real (tiny, random) model through the whole engine and its own threads."""

from __future__ import annotations

import re

import pytest
from runner_driver import make_config, make_runner, prompts

pytest.importorskip("llguidance")

from replica.grammar import Grammars
from replica.llm import LLM
from router.wire import Sampling

EOS, VOCAB = 255, 256
GRAMMARS = Grammars([bytes([byte]) for byte in range(255)] + [b"</s>"], vocab_size=VOCAB, eos_token_ids=[EOS])
HEADER = '%llguidance {"no_forcing": true}\n'
KINDS = {
    r"\[\d+(,\d+)*\]": 'start: "[" NUM ("," NUM)* "]"\nNUM: /[0-9]{1,2}/',
    "(yes|no)": 'start: "yes" | "no"',
    "[a-z]{3}-[0-9]{2,5}": "start: /[a-z]{3}-[0-9]{2,5}/",
}


def asks() -> list[Sampling]:
    """Greedy and random, structured and free, so that every step mixes them."""
    made = []
    for seed, temperature in ((1, 0.0), (2, 1.0)):
        shared = {"max_tokens": 24, "seed": seed, "temperature": temperature, "stop_token_ids": (EOS,)}
        made += [Sampling(**shared, grammar=("llguidance", HEADER + source)) for source in KINDS.values()]
        made.append(Sampling(**shared))
    return made


def generate(*, together: bool, **options: object) -> list[list[int]]:
    runner = make_runner(**options)
    given = list(zip(prompts((9, 40, 5, 33, 12, 21, 60, 7)), asks(), strict=True))
    with LLM(make_config(**options), runner, masks=GRAMMARS) as llm:
        groups = [given] if together else [[pair] for pair in given]
        outputs = [out for group in groups for out in llm.generate([p for p, _ in group], [s for _, s in group])]
        llm.engine.check_invariants()
    assert all(output.error is None for output in outputs), outputs
    return [output.ids for output in outputs]


def test_alone_together_and_one_step_ahead_give_the_same_valid_texts() -> None:
    alone = generate(together=False, async_scheduling=False)
    assert generate(together=True, async_scheduling=True) == alone
    assert generate(together=True, async_scheduling=True, chunk_size=16, max_batch_size=8) == alone
    patterns = [*KINDS, None] * 2
    ended = 0
    for pattern, ids in zip(patterns, alone, strict=True):
        if pattern is not None and ids[-1] == EOS:
            ended += 1
            assert re.fullmatch(pattern, bytes(ids[:-1]).decode())
    assert ended >= 4
