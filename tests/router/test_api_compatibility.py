"""The generated pages are current, and every row of docs/compatibility.md is what a server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from router.api.reference import NO_EFFECT, PAGES, ROUTES
from tests.router.http_fakes import FakeBackend, asgi_client, make_card, saying
from tests.router.test_api_conversations import thinking_setup
from tests.router.test_api_tools import TOOL, TOOLS_TEMPLATE

DOCS = Path(__file__).parents[2] / "docs"
MESSAGES = [{"role": "user", "content": "hi"}]
REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
SAMPLES: dict[str, Any] = {
    "model": "tiny", "n": 2, "stream": True, "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
    "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [7], "include_stop_str_in_output": True,
    "ignore_eos": True, "min_tokens": 1, "frequency_penalty": 1, "presence_penalty": 1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1},
    "allowed_token_ids": [5], "bad_words": ["x"], "prompt_logprobs": 1, "skip_special_tokens": False,
    "return_token_ids": True, "return_tokens_as_token_ids": True, "truncate_prompt_tokens": 5, "priority": 1,
    "cache_salt": "s", "request_id": "r", "user": "u", "metadata": {}, "messages": MESSAGES, "max_completion_tokens": 5,
    "add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {"a": 1},
    "add_special_tokens": True, "tools": [TOOL], "parallel_tool_calls": False, "reasoning_effort": "none",
    "thinking_token_budget": 5, "include_reasoning": False, "prompt": "hi", "echo": True, "input": "hi",
    "instructions": "x", "max_output_tokens": 5, "text": {"format": {"type": "text"}}, "include": [],
    "reasoning": {"effort": "none"}, "system": "x", "thinking": {"type": "disabled"}, "stop_sequences": ["x"],
    "return_token_strs": True, "tokens": [5], "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]}, "tool_choice": "none",
}  # fmt: skip
PER_ROUTE: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True, "top_logprobs": 2},
    ("/v1/completions", "logprobs"): {"logprobs": 2},
    ("/v1/responses", "top_logprobs"): {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ("/v1/responses", "tools"): {"tools": [{"type": "function", "name": "f"}]},
    ("/v1/responses", "stream_options"): {"stream": True, "stream_options": {"include_obfuscation": False}},
    ("/v1/messages", "tools"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("/v1/messages", "tool_choice"): {"tool_choice": {"type": "none"}},
    ("/v1/messages", "metadata"): {"metadata": {"user_id": "u"}},
    ("/v1/messages/count_tokens", "tools"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("/v1/messages/count_tokens", "tool_choice"): {"tool_choice": {"type": "none"}},
}
SERVED = [(route, name) for route, (model, _) in ROUTES.items() for name in model.model_fields]
TABLES = [(route, name, rule) for route, (_, table) in ROUTES.items() for name, rule in table.items()]


def make() -> tuple[FakeBackend, Any]:
    _, card = thinking_setup("ok then")
    return FakeBackend(saying(card.tokenizer, "ok then")), make_card(card.tokenizer)


@pytest.mark.parametrize("file", PAGES)
def test_pages_are_current(file: str) -> None:
    assert (DOCS / file).read_text(encoding="utf-8") == PAGES[file](), "run: python -m router.api.reference docs"


@pytest.mark.parametrize(
    ("route", "theirs"),
    [
        ("/v1/chat/completions", chat.CompletionCreateParamsBase),
        ("/v1/completions", completions.CompletionCreateParamsBase),
        ("/v1/responses", responses.ResponseCreateParamsBase),
    ],
)
def test_no_field_of_the_openai_client_is_without_a_rule(route: str, theirs: Any) -> None:
    model, table = ROUTES[route]
    assert set(theirs.__annotations__) <= set(model.model_fields) | set(table)


async def test_every_served_field_is_taken() -> None:
    for route, name in SERVED:
        fake, card = make()
        given = PER_ROUTE.get((route, name))
        if given is None and name == "stream_options":
            given = {"stream": True, "stream_options": {"include_usage": True}}
        if given is None:
            given = {name: SAMPLES[name]}
        body = {**REQUIRED[route], **given}
        if route == "/tokenize" and name == "messages":
            del body["prompt"]
        async with asgi_client(fake, card) as client:
            response = await client.post(route, json=body)
        assert response.status_code == 200, (route, name, response.text)
        assert "x-everwarm-ignored-fields" not in response.headers


async def test_refused_fields_are_refused_by_name_and_their_harmless_values_are_not() -> None:
    fake, card = make()
    async with asgi_client(fake, card) as client:
        for route, name, rule in TABLES:
            body = REQUIRED[route]
            response = await client.post(route, json={**body, name: {"probe": 1}})
            if rule.ignored:
                assert response.status_code == 200, (route, name)
                continue
            assert response.status_code == 400, (route, name)
            error = response.json()["error"]
            assert f"{name} is not supported: {rule.reason}" in error["message"]
            for harmless in (None, *rule.harmless):
                response = await client.post(route, json={**body, name: harmless})
                assert response.status_code == 200, (route, name, harmless)


async def test_fields_without_effect_change_nothing() -> None:
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        fake, card = make()
        async with asgi_client(fake, card) as client:
            extras = {name: SAMPLES[name] for name in NO_EFFECT}
            extras |= {name: "x" for name, rule in ROUTES[route][1].items() if rule.ignored}
            for body in (REQUIRED[route], {**REQUIRED[route], **extras}):
                assert (await client.post(route, json={**body, "seed": 1})).status_code == 200
        first, second = fake.jobs
        assert (first.prompt, first.sampling, first.salt) == (second.prompt, second.sampling, second.salt)


def test_the_template_of_these_tests_knows_everything() -> None:
    assert "tools" in TOOLS_TEMPLATE and "enable_thinking" in TOOLS_TEMPLATE
