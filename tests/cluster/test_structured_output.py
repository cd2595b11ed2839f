"""Structured output through all of it but Ray: HTTP, router, token plane, engine, model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from stack import Stack, stack, until
from tiny import EOS

from tests.router.grammar_schemas import SCHEMAS

pytest.importorskip("llguidance")

CLOSERS = {**{str(ord(char)): 6 for char in '"]}'}, str(EOS): 9, "32": -4, "10": -4}
"""Bias for the tiny model (one id per byte): most of its random texts then end."""


def schema_body(name: str, seed: int, **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name], "strict": True}}
    ask = f"Give a short JSON answer for {name}, please."
    return {"messages": [{"role": "user", "content": ask}], "response_format": form, "seed": seed, **fields}


async def ask_all(made: Stack, asked: list[tuple[str, int]], at_once: int, **fields: Any) -> Counter[str]:
    """How many answers ended by schema; every one that did is valid."""
    gate, ended = asyncio.Semaphore(at_once), Counter[str]()

    async def ask(name: str, seed: int) -> None:
        async with gate:
            response = await made.http.post("/v1/chat/completions", json=schema_body(name, seed, **fields))
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            validator = jsonschema.validators.validator_for(SCHEMAS[name], jsonschema.Draft202012Validator)
            value = json.loads(choice["message"]["content"])
            validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker()).validate(value)
            ended[name] += 1

    await asyncio.gather(*(ask(name, seed) for name, seed in asked))
    return ended


def all_pages_free(made: Stack) -> bool:
    counts = [engine.pool.counts() for engine, _ in made.replicas.values()]
    return all(count["held"] == 0 for count in counts)


@pytest.mark.timeout(240)
async def test_random_weights_answer_every_schema(tiny: Path) -> None:
    async with stack(str(tiny), 2, max_num_pages=1024) as made:
        asked = [(name, 1) for name in SCHEMAS]
        ended = await ask_all(made, asked, 16, temperature=1, max_tokens=200, logit_bias=CLOSERS)
        assert sum(ended.values()) >= 0.7 * len(asked) and len(ended) >= 32, ended
        await until(lambda: all_pages_free(made))
        for engine, _ in made.replicas.values():
            engine.check_invariants()


@pytest.mark.timeout(120)
async def test_a_dead_replicas_answer_goes_on_elsewhere_within_its_grammar(tiny: Path) -> None:
    grammar = {"structured_outputs": {"regex": "([a-f]{1,3}[0-9] ){60}end"}}
    body = {"messages": [{"role": "user", "content": "go"}], "temperature": 1, "seed": 3, "max_tokens": 400, **grammar}
    async with stack(str(tiny), 2, max_num_pages=1024) as made:
        whole = (await made.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        running = asyncio.ensure_future(made.http.post("/v1/chat/completions", json=body))
        victim: list[str] = []

        def answering() -> bool:
            for name, (engine, _) in made.replicas.items():
                if any(request.num_emitted >= 40 for request in engine.scheduler.running):
                    victim[:] = [name]
            return bool(victim)

        await until(answering)
        engine, server = made.replicas[victim[0]]
        await server.close(abort=True)
        await asyncio.to_thread(engine.stop)
        resumed = (await running).json()["choices"][0]
        assert resumed["message"]["content"] == whole["message"]["content"]
        assert resumed["finish_reason"] == whole["finish_reason"] == "stop"


DEAD_ENDS: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["abc"]}, "allowed_token_ids": [0, 1]},
    {
        "structured_outputs": {"regex": "a+b"},
        "bad_words": ["b"],
        "allowed_token_ids": [66, 67],
        "logit_bias": {"66": 5},
    },
    {"allowed_token_ids": [65], "bad_words": ["b"]},
    {"allowed_token_ids": [EOS], "min_tokens": 2},
]


@pytest.mark.timeout(120)
async def test_a_request_that_leaves_itself_no_token_is_refused(tiny: Path) -> None:
    async with stack(str(tiny), 1, max_num_pages=64) as made:
        byte = {raw: index for index, raw in enumerate(made.api.services.card.tokenizer.token_bytes)}
        assert byte[b"b"] == 65, "the ids of the cases"
        beside = asyncio.create_task(made.http.post("/v1/completions", json={"prompt": "y", "max_tokens": 100}))
        for fields in DEAD_ENDS:
            body = {"prompt": "x", "max_tokens": 8, **fields}
            answer = await made.http.post("/v1/completions", json=body)
            assert answer.status_code == 400 and "leave no token" in answer.json()["error"]["message"], answer.text
            lines = (await made.http.post("/v1/completions", json={**body, "stream": True})).text.split("\n\n")
            assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "invalid_request_error"
        assert (await beside).status_code == 200
        await until(lambda: all_pages_free(made))


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_random_weights_answer_200_requests_over_40_schemas(tiny: Path) -> None:
    async with stack(str(tiny), 2, max_num_pages=1024) as made:
        asked = [(name, seed) for seed in range(5) for name in SCHEMAS]
        ended = await ask_all(made, asked, 16, temperature=1, max_tokens=250, logit_bias=CLOSERS)
        assert len(asked) >= 200
        assert sum(ended.values()) >= 0.7 * len(asked) and len(ended) >= 36, ended
        print(f"{sum(ended.values())} of {len(asked)} answers ended by their schema, all valid")


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_default_model_answers_200_requests_over_40_schemas() -> None:
    async with stack(None, 1) as made:
        asked = [(name, seed) for seed in range(5) for name in SCHEMAS]
        ended = await ask_all(made, asked, 16, temperature=0.7, max_tokens=120)
        assert len(asked) >= 200
        assert sum(ended.values()) >= 0.5 * len(asked) and len(ended) >= 35, ended
        print(f"{sum(ended.values())} of {len(asked)} answers ended by their schema, all valid")
