"""Structured output over HTTP: what comes out satisfies what was asked for, and what can't be is a 400."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from grammar_schemas import REFUSED, SCHEMAS
from pydantic import BaseModel

pytest.importorskip("llguidance")

import jsonschema

from replica.grammar import Grammars as Masks
from router.api import Api, ApiOptions, create_app
from router.backend import Job
from router.text.grammar import GrammarBusy
from tests.router.http_fakes import FakeBackend, make_card, make_tokenizer, served

TOKENIZER = make_tokenizer()
CARD = make_card(TOKENIZER, max_model_len=4096)
MASKS = Masks(
    TOKENIZER.token_bytes,
    vocab_size=CARD.vocab_size,
    eos_token_ids=CARD.eos_token_ids,
    special_ids=sorted(TOKENIZER.special_ids),
)
LEAN = np.array([3.0 if text[:1] in (b'"', b"}", b"]") else 0.0 for text in TOKENIZER.token_bytes] + [0.0] * 8)
LEAN[list(CARD.eos_token_ids)] = 5.0


def random_model(job: Job) -> list[int]:
    """Random weights behind the job's own grammar; unconstrained without one."""
    rng, ids = np.random.default_rng(job.sampling.seed), []
    mask = MASKS(job.sampling.grammar) if job.sampling.grammar else None
    for _ in range(min(400, job.sampling.max_tokens)):
        allowed = np.arange(TOKENIZER.vocab_size)
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask.mask(1)[0].view(np.uint8), bitorder="little"))
        ids.append(int(allowed[np.argmax(rng.standard_normal(len(allowed)) + LEAN[allowed])]))
        if mask is not None:
            mask.accept(ids[-1])
        if ids[-1] in CARD.eos_token_ids:
            break
    return ids


FAKE = FakeBackend(random_model)


@pytest.fixture(scope="module")
def app() -> Iterator[Api]:
    """One for all tests: each application has its own compile processes."""
    made = create_app(FAKE, CARD, ApiOptions())
    yield made
    made.services.grammars.close()


@pytest.fixture
async def http(app: Api) -> AsyncIterator[httpx.AsyncClient]:
    FAKE.jobs.clear()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://everwarm") as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "go"}], "max_tokens": 400, "temperature": 1, **fields}


def with_schema(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


async def test_200_requests_over_40_schemas_16_at_a_time(http: httpx.AsyncClient) -> None:
    gate, ended = asyncio.Semaphore(16), Counter[str]()

    async def ask(name: str, seed: int) -> None:
        request = body(response_format=with_schema(SCHEMAS[name]), seed=seed, max_tokens=160)
        async with gate:
            answer = await http.post("/v1/chat/completions", json=request)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            ended[name] += 1
            checker = jsonschema.FormatChecker()
            validator = jsonschema.validators.validator_for(SCHEMAS[name], jsonschema.Draft202012Validator)
            validator(SCHEMAS[name], format_checker=checker).validate(json.loads(choice["message"]["content"]))

    await asyncio.gather(*(ask(name, seed) for seed in range(5) for name in SCHEMAS))
    assert 5 * len(SCHEMAS) >= 200 and sum(ended.values()) >= 140 and len(ended) >= 38, ended


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streamed_equals_whole_and_both_routes_take_it(http: httpx.AsyncClient, path: str) -> None:
    request = {"response_format": {"type": "json_object"}, "seed": 11, "max_tokens": 300}
    request |= {"prompt": "go"} if path == "/v1/completions" else body() | request
    whole = (await http.post(path, json=request)).json()["choices"][0]
    streamed = (await http.post(path, json={**request, "stream": True})).text
    text = ""
    for line in streamed.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    assert text == (whole["text"] if "text" in whole else whole["message"]["content"])
    if whole["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"\d{3}-\d{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"choice": ["yes", "no", "可能"]}, "yes|no|可能"),
        ({"grammar": 'root ::= "a" ("b" | "c"){1,3}'}, "a[bc]{1,3}"),
        ({"grammar": 'start: "x" NUM\nNUM: /[0-9]{2}/'}, "x[0-9]{2}"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
        ({"json": '{"const": "k"}'}, '"k"'),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
async def test_vllms_structured_outputs(http: httpx.AsyncClient, asked: dict[str, Any], pattern: str) -> None:
    ended = 0
    for seed in range(8):
        answer = await http.post("/v1/chat/completions", json=body(structured_outputs=asked, seed=seed))
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            ended += 1
            assert re.fullmatch(pattern, choice["message"]["content"], re.DOTALL)
    assert ended


async def test_text_is_free_and_choices_share_one_grammar(http: httpx.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=body(response_format={"type": "text"}, max_tokens=3))
    assert FAKE.jobs[-1].sampling.grammar is None
    answer = await http.post("/v1/chat/completions", json=body(structured_outputs={"choice": ["a", "b"]}, n=4))
    assert {choice["message"]["content"] for choice in answer.json()["choices"]} <= {"a", "b"}
    assert len({job.sampling.grammar for job in FAKE.jobs[1:]}) == 1 and len(FAKE.jobs) == 5


@pytest.mark.parametrize("name", REFUSED)
async def test_an_unsupported_schema_is_a_400_that_names_feature_and_path(http: httpx.AsyncClient, name: str) -> None:
    schema, words, path = REFUSED[name]
    answer = await http.post("/v1/chat/completions", json=body(response_format=with_schema(schema)))
    error = answer.json()["error"]
    assert answer.status_code == 400 and not FAKE.jobs
    assert words in error["message"] and (path or "root") in error["message"]
    assert error["param"] == "response_format.json_schema.schema" and error["code"] == "invalid_grammar"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"disable_any_whitespace": True, "regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 400 and not FAKE.jobs, answer.text
    assert (
        answer.json()["error"]["param"].startswith(param) and param.split(".")[0] in answer.json()["error"]["message"]
    )


async def test_a_busy_compiler_is_a_503(http: httpx.AsyncClient, app: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(kind: str, value: Any) -> Any:
        raise GrammarBusy("256 grammars are waiting to be compiled; try again later")

    monkeypatch.setattr(app.services.grammars, "compile", busy)
    answer = await http.post("/v1/chat/completions", json=body(response_format={"type": "json_object"}))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1" and not FAKE.jobs
    assert "waiting" in answer.json()["error"]["message"]


class City(BaseModel):
    name: str
    population: int
    climate: Literal["dry", "wet"]
    twin: City | None = None


@pytest.fixture(scope="module")
def client(app: Api) -> Iterator[openai.OpenAI]:
    with (
        served(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as made,
    ):
        yield made


def test_openai_parse_with_pydantic(client: openai.OpenAI) -> None:
    parsed = 0
    for seed in range(6):
        try:
            answer = client.chat.completions.parse(
                model="tiny",
                messages=[{"role": "user", "content": "go"}],
                response_format=City,
                seed=seed,
                max_tokens=400,
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, City)
        parsed += 1
    assert parsed
