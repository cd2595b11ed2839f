"""Whatever a client sends to the real app: a 4xx with a JSON body, and the next request works."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from conftest import Deployed
from jsonschema import Draft202012Validator

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240, func_only=True)]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}
CANDIDATES: list[Any] = [True, "x", "", -3, 1 << 70, 1.5, -1e300, [], {}, [[]], [None], {"x": {}}, [-1], [1 << 40]]
RAW = {
    "empty": b"",
    "cut short": b'{"model":',
    "array": b"[]",
    "string": b'"x"',
    "number": b"1",
    "null": b"null",
    "boolean": b"true",
    "not UTF-8": b'{"prompt":"\xff\xfe"}',
    "surrogate": b'{"prompt":"\\ud800"}',
    "NaN": b'{"prompt":"hi","temperature":NaN}',
    "trailing": b'{"prompt":"hi"} more',
    "deep": b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "form": b"prompt=hi&model=tiny",
}
UNFIT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": [320]}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": [1 << 32]}),
    ("/v1/completions", {"prompt": "x" * 2048}),
    ("/v1/completions", {"prompt": [1] * 2048}),
    ("/v1/completions", {"prompt": "x" * 1_000_000}),
    ("/v1/completions", {"prompt": [1] * 2000, "max_tokens": 100}),
    ("/v1/completions", {"stop_token_ids": [320]}),
    ("/v1/completions", {"allowed_token_ids": [320]}),
    ("/v1/completions", {"logit_bias": {"320": 1}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2048}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": 7}}}),
]


def is_error(response: httpx.Response, what: object) -> dict[str, Any]:
    assert 400 <= response.status_code < 500, f"{what}: {response.status_code} {response.text[:300]}"
    assert response.headers["content-type"] == "application/json", what
    error: dict[str, Any] = response.json()["error"]
    assert error["message"] and {"type", "param", "code"} < set(error), what
    return error


async def works(client: httpx.AsyncClient, url: str) -> None:
    for path, body in GOOD.items():
        response = await client.post(url + path, json=body)
        assert response.status_code == 200, response.text


def wrong_values(document: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """(field, value) for every field of the request and every candidate that the published schema forbids there."""
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    model = document["components"]["schemas"][reference.rpartition("/")[2]]
    found = []
    for name, schema in model["properties"].items():
        check = Draft202012Validator({**schema, "components": document["components"]})
        wrong = [(name, value) for value in CANDIDATES if not check.is_valid(value)]
        assert len(wrong) >= 5 or name == "metadata" or name == "chat_template_kwargs", (name, wrong)
        found += wrong
    assert len(model["properties"]) > 30
    return found


@pytest.mark.parametrize("path", GOOD)
async def test_every_field_with_every_wrong_value(pair: Deployed, path: str) -> None:
    gate = asyncio.Semaphore(8)
    async with httpx.AsyncClient(timeout=60) as client:
        document = (await client.get(f"{pair.url}/openapi.json")).json()

        async def refused(name: str, value: Any) -> None:
            async with gate:
                body = json.dumps({**GOOD[path], name: value})
                error = is_error(await client.post(pair.url + path, content=body), (name, value))
                assert name in error["message"] or name in (error["param"] or ""), (name, value, error)

        await asyncio.gather(*(refused(name, value) for name, value in wrong_values(document, path)))
        await works(client, pair.url)


async def test_bodies_that_are_no_json_object(pair: Deployed) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        for path in (*GOOD, "/tokenize", "/detokenize"):
            for name, body in RAW.items():
                is_error(await client.post(pair.url + path, content=body), (path, name))
        await works(client, pair.url)


async def test_ten_megabytes(pair: Deployed) -> None:
    """Refused by size whether the length is announced or not, and whatever is inside."""
    text = b'{"model":"tiny","prompt":"' + b"x" * (10 << 20) + b'"}'

    async def unannounced() -> Any:
        for start in range(0, len(text), 1 << 18):
            yield text[start : start + (1 << 18)]

    async with httpx.AsyncClient(timeout=60) as client:
        for content in (text, unannounced(), b"\xff" * (10 << 20)):
            response = await client.post(f"{pair.url}/v1/completions", content=content)
            assert is_error(response, "10 MB")["code"] == "body_too_large" and response.status_code == 413
            await works(client, pair.url)


async def test_prompts_that_cannot_be_served(pair: Deployed) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        for path, changes in UNFIT:
            what = (path, str(changes)[:80])
            is_error(await client.post(pair.url + path, json={**GOOD[path], **changes}), what)
            is_error(await client.post(pair.url + path, json={**GOOD[path], **changes, "stream": True}), what)
        unknown = await client.post(f"{pair.url}/v1/completions", json={"model": "none", "prompt": "x"})
        assert is_error(unknown, "model")["code"] == "model_not_found" and unknown.status_code == 404
        await works(client, pair.url)
