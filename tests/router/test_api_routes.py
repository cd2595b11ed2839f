"""Everything around generation: routing, keys, errors, bad bodies, metrics, tokenization."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from router.api import create_app
from router.api.errors import from_validation
from router.api.options import ApiOptions, narrowed_salt
from router.api.reference import ROUTES
from router.api.refused import ignored_header
from router.api.schemas.base import Request
from router.backend import DeadlineExceeded, EngineFault, Overloaded, Refused, Unavailable
from tests.router.http_fakes import FakeBackend, asgi_client, make_card, make_tokenizer, saying

TOKENIZER = make_tokenizer()
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TEXT = {"model": "tiny", "prompt": "hi", "temperature": 0, "max_tokens": 4}


def backend(**changes: Any) -> FakeBackend:
    return FakeBackend(saying(TOKENIZER, "Paris."), **changes)


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


async def test_state_routes() -> None:
    async with asgi_client(backend()) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert "version" in (await client.get("/version")).json()
        models = (await client.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["tiny", "tiny-alias"] and models["data"][0]["max_model_len"] == 512
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert error_of(await client.get("/v1/models/none"), 404)["code"] == "model_not_found"
        assert (await client.get("/v1/directory?top=3")).json()["top"] == 3
        for bad in ("0", "x", "1001", "", "-1", "٣"):
            assert error_of(await client.get("/v1/directory", params={"top": bad}), 400)["param"] == "top"
        assert (await client.get("/v1/engine")).json()["data"][0]["replica"] == "fake-0"


async def test_not_ready_and_draining() -> None:
    fake = backend(is_ready=False)
    async with asgi_client(fake) as client:
        assert (await client.get("/health")).status_code == 200
        for response in (await client.get("/ready"), await client.post("/v1/completions", json=TEXT)):
            assert error_of(response, 503)["code"] == "unavailable" and response.headers["retry-after"] == "1"
        fake.is_ready = True
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
        app = client._transport.app  # type: ignore[attr-defined]
        assert await app.drain(1.0)
        response = await client.post("/v1/completions", json=TEXT)
        assert error_of(response, 503)["code"] == "draining" and "retry-after" in response.headers
        assert (await client.get("/health")).status_code == 200


async def test_wrong_paths_and_methods() -> None:
    async with asgi_client(backend()) as client:
        assert error_of(await client.get("/nope"), 404)["code"] == "not_found"
        assert "embedding" in error_of(await client.post("/v1/embeddings", json={}), 404)["message"]
        assert error_of(await client.get("/v1/files/abc"), 404)["code"] == "route_not_served"
        assert "/tokenize" in error_of(await client.post("/v1/responses/input_tokens", json={}), 404)["message"]
        response = await client.get("/v1/completions")
        assert error_of(response, 405) and response.headers["allow"] == "POST"
        response = await client.request("BREW", "/health")
        assert error_of(response, 405) and response.headers["allow"] == "GET, HEAD"
        response = await client.head("/health")
        assert response.status_code == 200 and response.content == b""


async def test_every_served_error_maps_to_its_status() -> None:
    cases = [
        (Refused("too long", param="prompt"), 400, {}),
        (Overloaded("full", retry_after_s=2.2, param="x-ttft-slo-ms"), 429, {"retry-after": "3"}),
        (Unavailable("none", retry_after_s=1), 503, {"retry-after": "1"}),
        (DeadlineExceeded("late"), 408, {"x-should-retry": "false"}),
        (EngineFault("nan"), 500, {}),
    ]
    async with asgi_client(fake := backend()) as client:
        for failure, status, headers in cases:
            for stream in (False, True):
                fake.refuse = failure
                response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
                error = error_of(response, status)
                assert (error["message"], error["param"]) == (failure.message, getattr(failure, "param", None))
                assert headers.items() <= dict(response.headers).items()
        fake.refuse = None
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_unforeseen_faults_say_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    fake = backend()
    fake.refuse = RuntimeError("secret detail")  # type: ignore[assignment]
    async with asgi_client(fake) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc"})
        error = error_of(response, 500)
        assert "secret" not in response.text and "abc" in error["message"] and "secret detail" in caplog.text


BODIES = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"1",
    b"null",
    b"true",
    b"\xff\xfe{}",
    b'{"a":NaN}',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"\xed\xa0\x80"}',
    b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"max_tokens":' + b"9" * 5000 + b"}",
    b'{"prompt":"hi"} trailing',
    b"prompt=hi&model=tiny",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:20].decode("latin-1"))
async def test_bad_bodies_get_a_json_400_and_the_next_request_works(body: bytes) -> None:
    async with asgi_client(fake := backend()) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            error_of(await client.post(path, content=body), 400)
        assert not fake.jobs
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


@pytest.mark.parametrize("number", [b"1e999", b"-1E+999", b"9" * 400 + b".5"])
async def test_numbers_that_no_double_holds(number: bytes) -> None:
    async with asgi_client(fake := backend()) as client:
        for body in (b'{"input":"hi","metadata":{"a":[%s]}}', b'{"input":"hi","tools":[{"parameters":{"b":%s}}]}'):
            error_of(await client.post("/v1/responses", content=body % number), 400)
        assert not fake.jobs
        response = await client.post("/v1/responses", content=b'{"input":"hi 1e999","metadata":{"a":1e300}}')
        assert response.json()["metadata"] == {"a": 1e300}


@pytest.mark.parametrize("number", [b"9" * 309 + b".0", b"9" * 210 + b"e99", b"-" + b"9" * 215 + b".5E+94"])
async def test_a_number_too_large_is_found_wherever_it_stands(number: bytes) -> None:
    async with asgi_client(fake := backend()) as client:
        for at in range(0, 330, 7):
            body = b'{"prompt":"%s","metadata":{"a":%s}}' % (b"x" * at, number)
            assert "range of a double" in error_of(await client.post("/v1/completions", content=body), 400)["message"]
        assert not fake.jobs


@pytest.mark.parametrize("prompt", [[True, 2], [1.5], [1, -1], [1, 1 << 31], [1, "2"], [[1], [True]], [], [[]], [None]])
async def test_prompts_of_ids_are_ids(prompt: list[object]) -> None:
    async with asgi_client(fake := backend()) as client:
        message = error_of(await client.post("/v1/completions", json={**TEXT, "prompt": prompt}), 400)["message"]
        assert "prompt" in message and not fake.jobs


@pytest.mark.parametrize("number", [b"1e999", b"9" * 400, b"-1e999"])
async def test_absurd_numbers(number: bytes) -> None:
    async with asgi_client(fake := backend()) as client:
        for field in (b"temperature", b"max_tokens", b"seed", b"top_k", b"priority"):
            response = await client.post("/v1/completions", content=b'{"prompt":"hi","%s":%s}' % (field, number))
            message = error_of(response, 400)["message"]
            assert (field.decode() if number.isdigit() else "range of a double") in message
        assert not fake.jobs


async def test_long_bodies_get_a_413() -> None:
    async with asgi_client(fake := backend(), max_body_bytes=2000) as client:

        async def unannounced():
            for _ in range(30):
                yield b" " * 100

        for content in (b" " * 2001, unannounced()):
            response = await client.post("/v1/completions", content=content)
            assert error_of(response, 413)["code"] == "body_too_large" and response.headers["connection"] == "close"
        assert not fake.jobs


WRONG: list[tuple[str, list[Any]]] = [
    ("prompt", [None, 1, True, {}, "", [], [""], [[]], [1.5], [-1], [999], [1 << 40], ["a", 1], [[1], "a"], [[[1]]]]),
    ("n", [0, -1, 129, "2", 1.5, True, []]),
    ("max_tokens", [-1, 0, "5", 1.5, 513, 1 << 40, [], {}]),
    ("temperature", [-0.1, 2.1, "1", [], True]),
    ("top_p", [0, 1.1, -1, "x"]),
    ("top_k", [-2, "1", 1.5, 1 << 40]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("seed", ["1", 1.5, 1 << 65, -(1 << 64)]),
    ("stop", ["", [""], [1], 5, ["x"] * 65, "y" * 4097, {}]),
    ("stop_token_ids", [[-1], [999], "x", ["1"], [1.5]]),
    ("frequency_penalty", [2.1, -2.1, "0"]),
    ("presence_penalty", [2.1, -2.1, "0"]),
    ("repetition_penalty", [0, -1, 11, "1"]),
    ("logit_bias", [{"a": 1}, {"1": 101}, {"1": "x"}, {"999": 1}, {"-1": 1}, [], {"1": None}]),
    ("allowed_token_ids", [[], [-1], [999], "x"]),
    ("bad_words", [[""], [1], "x", ["w" * 4097]]),
    ("min_tokens", [-1, 5, "1"]),
    ("logprobs", [-1, 21, "1", True]),
    ("prompt_logprobs", [-1, 21, "1"]),
    ("truncate_prompt_tokens", [0, -2, 1.5, "1"]),
    ("priority", ["1", 1.5, 1 << 40]),
    ("cache_salt", ["", 1, "s" * 513]),
    ("stream", ["yes", 1]),
    ("stream_options", [{"include_usage": True}, [], {"include_usage": 1}, {"include_obfuscation": True}]),
    ("echo", ["yes", 1]),
    ("request_id", ["", "a b", "é", 1]),
    ("metadata", ["x", []]),
    ("suffix", ["after"]),
    ("best_of", [2]),
    ("response_format", [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, "json"]),
    ("structured_outputs", [{}, {"regex": 1}, {"regex": "a", "choice": ["b"]}, {"regex": "a", "structural_tag": {}}]),
    ("guided_json", [{"type": "object"}]),
    ("use_beam_search", [True]),
]


@pytest.mark.parametrize(("name", "values"), WRONG, ids=[name for name, _ in WRONG])
async def test_wrong_values_name_the_field(name: str, values: list[Any]) -> None:
    async with asgi_client(fake := backend()) as client:
        for value in values:
            error = error_of(await client.post("/v1/completions", json={**TEXT, name: value}), 400)
            assert name in error["message"] and (error["param"] or "").startswith(name), (value, error)
        assert not fake.jobs


WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages.0", [1]),
    ("messages.0", [{}]),
    ("messages.0", [{"role": "robot", "content": "x"}]),
    ("messages.0.content", [{"role": "user"}]),
    ("messages.0.content", [{"role": "user", "content": None}]),
    ("messages.0.content", [{"role": "user", "content": 5}]),
    ("messages.0.content", [{"role": "user", "content": []}]),
    ("messages.0.content.0.text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages.0.content.0.type", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages.0", [{"role": "assistant"}]),
    ("messages.0.tool_calls.0.function", [{"role": "assistant", "tool_calls": [{"id": "x"}]}]),
    ("max_completion_tokens", 0),
    ("top_logprobs", 3),
    ("continue_final_message", True),
    ("n", 129),
    ("tools.0.type", [{"type": "retrieval", "function": {"name": "f"}}]),
    ("tools.0.function", [{"type": "function"}]),
    ("tools.0.function.name", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tools.0.function.parameters", [{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("reasoning_effort", "high"),
    ("thinking_token_budget", 10),
    ("audio", {"voice": "x"}),
    ("modalities", ["audio"]),
    ("echo", True),
    ("store", True),
    ("functions", [{}]),
    ("chat_template", "x"),
    ("chat_template_kwargs.messages", {"messages": []}),
    ("chat_template_kwargs.tools", {"tools": [{}]}),
    ("chat_template_kwargs.documents", {"documents": []}),
    ("chat_template_kwargs.add_generation_prompt", {"add_generation_prompt": False}),
    ("chat_template_kwargs.continue_final_message", {"continue_final_message": True}),
]


@pytest.mark.parametrize(("param", "value"), WRONG_CHAT, ids=[f"{p}-{i}" for i, (p, _) in enumerate(WRONG_CHAT)])
async def test_wrong_chat_values_name_the_field(param: str, value: Any) -> None:
    body = {**CHAT, param.split(".")[0]: value}
    if param == "continue_final_message":
        body["add_generation_prompt"] = True
    async with asgi_client(fake := backend()) as client:
        error = error_of(await client.post("/v1/chat/completions", json=body), 400)
        assert error["param"] == param, error
        assert not fake.jobs


async def test_an_error_names_value_and_limit() -> None:
    async with asgi_client(backend()) as client:
        message = error_of(await client.post("/v1/completions", json={**TEXT, "temperature": 3.5}), 400)["message"]
        assert message == "temperature: input should be less than or equal to 2; got 3.5"
        response = await client.post("/v1/completions", json={**TEXT, "prompt": [5] * 510, "max_tokens": 3})
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert all(part in error["message"] for part in ("max_tokens is 3", "510 tokens", "at most 512", "at most 2"))
        for prompt in ([5] * 512, "x y " * 600, "a" * 40_000):
            error = error_of(await client.post("/v1/completions", json={**TEXT, "prompt": prompt}), 400)
            assert error["code"] == "context_length_exceeded" and "512" in error["message"]
            assert error["param"] == "prompt"
        for text in ("x y " * 400, "a" * 40_000):
            messages = [{"role": "user", "content": text}]
            error = error_of(await client.post("/v1/chat/completions", json={**CHAT, "messages": messages}), 400)
            assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


async def test_unknown_models_are_404_with_the_names_served() -> None:
    async with asgi_client(backend()) as client:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            error = error_of(await client.post(path, json={**body, "model": "gpt-9"}), 404)
            assert "tiny, tiny-alias" in error["message"] and error["param"] == "model"
            answer = (await client.post(path, json={**body, "model": "tiny-alias"})).json()
            assert answer["model"] == "tiny"
            del (unnamed := {**body})["model"]
            assert (await client.post(path, json=unnamed)).status_code == 200


async def test_fields_nobody_defined_are_ignored_and_reported() -> None:
    async with asgi_client(backend()) as client:
        extra = {"zzz": 1, "ünï\r\ncode": 2, "store": False, "tools": None, "user": "me", "metadata": {"a": "b"}}
        response = await client.post("/v1/chat/completions", json={**CHAT, **extra, "prompt_cache_key": "k"})
        assert response.status_code == 200
        assert sorted(response.headers["x-everwarm-ignored-fields"].split(",")) == ["?n???code", "zzz"]
        assert "x-everwarm-ignored-fields" not in (await client.post("/v1/chat/completions", json=CHAT)).headers


async def test_fields_nobody_defined_are_reported_in_nested_objects_too() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "anything": 1}, "colour": "red"}
    body = {
        **CHAT,
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hi", "mood": "good"}, {"type": "text", "text": "!"}],
            },
            {"role": "assistant", "content": "yes", "audio": None, "annotations": [], "wit": 3},
            {"role": "user", "content": "go on"},
        ],
        "stream_options": None,
        "tools": [{"type": "function", "function": tool, "tool_choice": "none"}],
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x-y": 1}, "wild": True}},
        "metadata": {"own": "keys"},
    }
    async with asgi_client(backend()) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        named = response.headers["x-everwarm-ignored-fields"].split(",")
        assert {*named} == {
            "messages.content.mood", "messages.wit", "response_format.json_schema.wild", "tools.function.colour",
            "tools.tool_choice",
        }  # fmt: skip
        body = {**TEXT, "prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True, "pace": 2}}
        response = await client.post("/v1/completions", json=body)
        assert response.headers["x-everwarm-ignored-fields"] == "stream_options.pace"


async def test_an_answer_sent_back_as_input_has_no_ignored_fields() -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 4}
    async with asgi_client(backend()) as client:
        output = (await client.post("/v1/responses", json={"input": "hi", **asked})).json()["output"]
        assert output[0]["id"] and output[0]["status"] and output[0]["content"][0]["logprobs"]
        turns = [{"role": "user", "content": "hi"}, *output, {"role": "user", "content": "go on"}]
        response = await client.post("/v1/responses", json={"input": turns})
        assert response.status_code == 200, response.text
        assert "x-everwarm-ignored-fields" not in response.headers
        turns[1] = {**turns[1], "wit": 3, "id": "mine"}
        response = await client.post("/v1/responses", json={"input": turns, "input.id": 1})
        assert response.headers["x-everwarm-ignored-fields"] == "input.id,input.wit", "the first is no nested field"


async def test_many_ignored_fields_fit_into_the_header() -> None:
    body = {**TEXT, **{f"{number:06d}": number for number in reversed(range(5000))}}
    async with asgi_client(backend()) as client:
        named = (await client.post("/v1/completions", json=body)).headers["x-everwarm-ignored-fields"]
        assert len(named) == 1000 and named.startswith("000000,000001,") and named.split(",")[141] == "000141"


async def test_request_ids_go_in_and_out() -> None:
    async with asgi_client(fake := backend()) as client:
        response = await client.post(
            "/v1/completions", json={**TEXT, "request_id": "b"}, headers={"x-request-id": "a-1"}
        )
        assert response.headers["x-request-id"] == "a-1" and response.json()["id"] == "cmpl-a-1"
        response = await client.post("/v1/completions", json={**TEXT, "request_id": "b-2"})
        assert response.headers["x-request-id"] == "b-2" and response.json()["id"] == "cmpl-b-2"
        ids = {
            (await client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"] for bad in ("a b", "")
        }
        assert len(ids) == 2 and all(len(i) == 32 for i in ids)
        assert len({job.request_id for job in fake.jobs}) == 2


async def test_under_serve_an_answer_has_one_request_id_and_a_bodys_own_counts() -> None:
    serve = pytest.importorskip("ray.serve._private.http_util")
    app = create_app(backend(), make_card())
    app.behind_serve = True
    transport = httpx.ASGITransport(app=serve.RequestIdMiddleware(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://everwarm") as client:

        async def ids(body: dict[str, str], headers: dict[str, str]) -> tuple[list[str], str]:
            response = await client.post("/v1/completions", json={**TEXT, **body}, headers=headers)
            return response.headers.get_list("x-request-id"), response.json()["id"].removeprefix("cmpl-")

        for headers in ({}, {"x-request-id": "a-1"}):
            sent, named = await ids({}, headers)
            assert sent == [named] and headers.get("x-request-id", named) == named
        assert (await ids({"request_id": "b"}, {"x-request-id": "a-1"})) == (["a-1"], "a-1")
        sent, named = await ids({"request_id": "b-2"}, {})
        assert sent[0] == named == "b-2"
        sent, named = await ids({}, {"x-request-id": "a b"})  # Serve repeats it all the same
        assert sent == [named, "a b"] and len(named) == 32


async def test_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# comment\n\nfrom-file\n")
    monkeypatch.setenv("EVERWARM_API_KEYS", "from-env, second\n# comment\nthird\n")
    async with asgi_client(fake := backend(), api_keys=("listed",), api_key_file=tmp_path / "keys") as client:
        assert (await client.get("/health")).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer nope"},
            {"authorization": "Basic listed"},
            {"x-api-key": "listedx"},
        ):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
                assert error_of(await client.request(method, path, headers=headers), 401)["code"] == "invalid_api_key"
        salts = []
        for key in ("listed", "from-file", "from-env", "second", "third"):
            response = await client.post("/v1/completions", json=TEXT, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
            salts.append(fake.jobs[-1].salt)
        await client.post("/v1/completions", json=TEXT, headers={"x-api-key": "listed"})
        assert fake.jobs[-1].salt == salts[0]
        await client.post("/v1/completions", json={**TEXT, "cache_salt": salts[1]}, headers={"x-api-key": "listed"})
        assert fake.jobs[-1].salt not in salts
        assert len(set(salts)) == 5 and all(salts) and not any("listed" in salt for salt in salts)


def test_a_cache_salt_only_narrows() -> None:
    assert narrowed_salt("p", None) == "p"
    assert len({narrowed_salt(p, s) for p in ("", "p", "ps") for s in (None, "s", "ps")}) == 9


def test_unusable_keys_are_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no key"):
        ApiOptions(api_key_file=tmp_path / "empty").all_keys()
    with pytest.raises(OSError, match="missing"):
        ApiOptions(api_key_file=tmp_path / "missing").all_keys()
    with pytest.raises(ValueError, match="must not be empty"):
        ApiOptions(api_keys=(" ",))


async def test_cors() -> None:
    async with asgi_client(backend(), cors_origins=("https://a.example",)) as client:
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
        response = await client.options("/v1/completions", headers=preflight)
        assert response.status_code == 204 and response.headers["access-control-allow-origin"] == "https://a.example"
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            response = await client.post("/v1/completions", json={}, headers={"origin": origin})
            assert response.headers.get("access-control-allow-origin") == allowed
            exposed = response.headers.get("access-control-expose-headers", "").split(", ")
            assert ({"x-request-id", "retry-after"} <= {*exposed}) == (allowed is not None)
    async with asgi_client(backend()) as client:
        response = await client.get("/health", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_metrics_count_what_happened() -> None:
    async with asgi_client(backend(num_cached=3)) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
        response = await client.get("/metrics")
        text = response.text
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    length = len(saying(TOKENIZER, "Paris.")(None))  # type: ignore[arg-type]
    for line in (
        'everwarm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'everwarm:prompt_tokens_cached_total{model_name="tiny"} 3.0',
        f'everwarm:generation_tokens_total{{model_name="tiny"}} {length}.0',
        'everwarm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'everwarm:http_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0',
        'everwarm:num_requests_running{model_name="tiny",replica="fake-0"} 2.0',
        'everwarm:num_requests_waiting{model_name="tiny",replica="fake-0"} 4.0',
        "everwarm:http_requests_in_flight 0.0",
        'everwarm:kv_cache_usage_perc{model_name="tiny",replica="fake-0"} 0.25',
        'everwarm:num_preemptions_total{model_name="tiny",replica="fake-0"} 3.0',
    ):
        assert line in text, line
    assert 'replica="lost"' not in text


async def test_a_silent_replica_costs_a_scrape_neither_long_nor_the_others_figures() -> None:
    fake = backend()
    asked: list[float] = []

    async def engines(timeout_s: float = 5.0) -> list[dict[str, Any]]:
        asked.append(timeout_s)
        await asyncio.sleep(0.01)
        return [{"replica": "well", "load": {"running": 1}}, {"replica": "silent", "error": "no answer in time"}]

    fake.engines = engines  # type: ignore[method-assign]
    async with asgi_client(fake) as client:
        assert 'num_requests_running{model_name="tiny",replica="well"} 1.0' in (await client.get("/metrics")).text
        assert asked[0] < 5.0


async def test_no_exchange_leaves_a_listener_behind() -> None:
    """Some servers never report the end of an exchange to who still listens."""
    app = create_app(backend(), make_card(TOKENIZER), ApiOptions())
    bodies = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1]},
        "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
        "/v1/completions": {**TEXT, "temperature": 9},
    }
    for path, body in bodies.items():
        sent: list[dict[str, Any]] = []
        waiting = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive(waiting: list[dict[str, Any]] = waiting) -> dict[str, Any]:
            return waiting.pop() if waiting else await asyncio.Future()

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        await asyncio.sleep(0.01)
        assert sent[0]["status"] in (200, 400) and not app.services.watchers, path


async def test_tokenize_and_detokenize() -> None:
    async with asgi_client(backend(), make_card(TOKENIZER)) as client:
        body = (await client.post("/tokenize", json={"prompt": "日本 hi", "return_token_strs": True})).json()
        assert body["tokens"] == TOKENIZER.encode("日本 hi", add_special_tokens=True)
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 512
        assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": "日本 hi"}
        chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        for bad in ({}, {"prompt": "x", "messages": CHAT["messages"]}):
            assert "either prompt or messages" in error_of(await client.post("/tokenize", json=bad), 400)["message"]
        assert error_of(await client.post("/detokenize", json={"tokens": [9999]}), 400)["param"] == "tokens"


async def test_deadline_and_slo_headers_reach_the_job() -> None:
    async with asgi_client(fake := backend(), request_timeout_s=30) as client:
        headers = {"x-ttft-slo-ms": "250", "x-request-timeout": "5", "traceparent": "00-1-2-01"}
        await client.post("/v1/completions", json={**TEXT, "priority": -3}, headers=headers)
        job = fake.jobs[-1]
        assert (job.ttft_slo_s, job.deadline_s, job.priority, job.trace) == (0.25, 5.0, -3, "00-1-2-01")
        await client.post("/v1/completions", json=TEXT, headers={"x-request-timeout": "90"})
        assert fake.jobs[-1].deadline_s == 30
        for name, bad in (("x-ttft-slo-ms", ("0", "1_0")), ("x-request-timeout", ("soon", "nan", "1_0"))):
            for value in bad:
                response = await client.post("/v1/completions", json=TEXT, headers={name: value})
                assert error_of(response, 400)["param"] == name


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
WRONG_ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"input": [{k: v for k, v in CALL.items() if k != "call_id"}]}, "input.0.call_id: field required"),
    ({"input": [{**CALL, "name": "a b"}]}, "input.0.name: string should match pattern"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input.1.output: field required"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content: input should be a valid list"),
    ({"input": [{"content": "x"}]}, "input.0.role: field required"),
    (
        {"input": [{"type": "nope"}]},
        "input.0.type: input should be 'message' or input should be 'function_call' or input should be "
        "'function_call_output' or input should be 'reasoning'; got \"nope\"",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type: input should be 'input_text', 'output_text' or 'text'; got \"input_image\"",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: input should be 'function'; got \"web_search\""),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type: input should be 'function'; got \"mcp\""),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ITEMS)
async def test_what_is_wrong_with_an_item_is_said_in_terms_of_its_own_type(
    change: dict[str, Any], message: str
) -> None:
    async with asgi_client(backend()) as client:
        error = error_of(await client.post("/v1/responses", json={"input": "x", **change}), 400)
        assert error["message"].startswith(message)


MANY = 200_000
WRONG_EVERYWHERE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [{}] * MANY}, "prompt.0"),
    ("/v1/completions", {"prompt": [0.5] * MANY}, "prompt.0"),
    ("/v1/completions", {"prompt": [[1], *[["x"]] * MANY]}, "prompt.1.0"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {f"a{i}": 1 for i in range(MANY)}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": [{"role": "x"}] * MANY}, "messages.0"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content.0.type"),
    ("/v1/responses", {"input": [{"type": "x"}] * MANY}, "input.0.type"),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "x"}] * MANY}, "messages.0"),
    ("/detokenize", {"tokens": ["x"] * MANY}, "tokens.0"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG_EVERYWHERE)
def test_a_list_full_of_wrong_items_is_refused_at_the_first(path: str, body: dict[str, Any], param: str) -> None:
    """An error object for each item of a megabyte would stop every other stream for seconds."""
    with pytest.raises(ValidationError) as caught:
        ROUTES[path][0].model_validate(body)
    assert caught.value.error_count() < 20
    assert from_validation(caught.value, body).param == param


async def test_openapi_is_served_as_json() -> None:
    async with asgi_client(backend()) as client:
        document = json.loads((await client.get("/openapi.json")).content)
        assert document["openapi"].startswith("3.1")


def test_rewritten_and_mixed_lists_name_no_fields_wrongly() -> None:
    class Item(Request):
        known: int = 0

    class Body(Request):
        items: list[Item | str]
        ids: list[int]

    mixed = {"items": ["a", {"known": 1, "odd": 2}], "ids": [1], "own": 3}
    assert ignored_header(mixed, Body.model_validate(mixed), {}) == "items.odd,own"
    rewritten = Body.model_construct(items=[Item()], ids=[])
    assert ignored_header({"items": [{"odd": 1}, {"odd": 2}], "ids": [1]}, rewritten, {}) is None
    assert ignored_header({"items": [{"odd": 1}]}, Body.model_construct(items=[]), {}) is None
