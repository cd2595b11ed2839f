"""Tools and reasoning through the API: prompts, grammars, answers whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from router.api import ApiOptions, create_app
from router.text.tokenizer import Tokenizer
from tests.router.http_fakes import TEMPLATE, FakeBackend, asgi_client, make_card, make_tokenizer, saying, served
from tests.router.test_api_generation import ask, events

TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> use <tool_call>{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}
OTHER = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather in Zürich?"}], "max_tokens": 200}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def setup(text: str, template: str = TOOLS_TEMPLATE) -> tuple[FakeBackend, Any]:
    tokenizer = make_tokenizer(template)
    return FakeBackend(saying(tokenizer, text)), make_card(tokenizer, max_model_len=4096)


async def answer(text: str, body: dict[str, Any], template: str = TOOLS_TEMPLATE, **options: Any) -> Any:
    """(whole choice, streamed choice put together, job); both must say the same."""
    fake, card = setup(text, template)
    fake.limits = lambda: {"max_model_len": 4096}  # type: ignore[method-assign]
    async with asgi_client(fake, card, **options) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        whole = response.json()["choices"][0]
        chunks = events(await client.post("/v1/chat/completions", json={**body, "stream": True}))
    put = together(chunks[:-1])
    message = whole["message"]
    assert put["content"] == (message["content"] or "")
    assert put["reasoning_content"] == put["reasoning"] == message.get("reasoning_content", "")
    assert [c["function"] for c in put["tool_calls"]] == [c["function"] for c in message.get("tool_calls", [])]
    assert put["finish_reason"] == whole["finish_reason"]
    return whole, put, fake.jobs[0], card.tokenizer


def together(chunks: Sequence[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    out["finish_reason"] = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            out[name] += delta.get(name, "")
        for part in delta.get("tool_calls", []):
            if part["index"] == len(out["tool_calls"]):
                out["tool_calls"].append({**part, "function": {**part["function"]}})
            else:
                assert "id" not in part
                out["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        out["finish_reason"] = choice["finish_reason"] or out["finish_reason"]
    return out


def prompt_of(job: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(job.prompt, skip_special_tokens=False)


async def test_auto_calls_are_found_and_streamed() -> None:
    whole, put, job, tokenizer = await answer(f"Let me look.\n{CALL}\n{CALL}", {**ASK, "tools": [TOOL]})
    message = whole["message"]
    assert message["content"] == "Let me look." and whole["finish_reason"] == "tool_calls"
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"city": "Zürich"}] * 2
    assert len({c["id"] for c in message["tool_calls"]}) == 2 and all(
        c["type"] == "function" for c in put["tool_calls"]
    )
    assert job.sampling.grammar is None
    assert '<tools>{"type": "function", "function": {"name": "get_weather"' in prompt_of(job, tokenizer)


async def test_no_call_is_plain_content() -> None:
    whole, *_ = await answer("It is sunny. <tool", {**ASK, "tools": [TOOL]})
    assert whole["message"] == {"role": "assistant", "content": "It is sunny. <tool", "refusal": None}
    assert whole["finish_reason"] == "stop"


async def test_tool_choice_none_hides_the_tools() -> None:
    whole, _, job, tokenizer = await answer(CALL, {**ASK, "tools": [TOOL], "tool_choice": "none"})
    assert whole["message"]["content"] == CALL and "tool_calls" not in whole["message"]
    assert "get_weather" not in prompt_of(job, tokenizer)


async def test_parallel_tool_calls_false_keeps_the_first() -> None:
    whole, *_ = await answer(f"{CALL}\n{CALL} more", {**ASK, "tools": [TOOL], "parallel_tool_calls": False})
    assert len(whole["message"]["tool_calls"]) == 1 and whole["message"]["content"] is None


async def test_a_call_cut_by_length_keeps_its_reason() -> None:
    whole, *_ = await answer(CALL, {**ASK, "tools": [TOOL], "max_tokens": 40})
    assert whole["finish_reason"] == "length"


def accepts(job: Any, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the job's grammar takes ``text`` as a whole answer."""
    ll = pytest.importorskip("llguidance")

    class Vocabulary:
        eos_token_id = tokenizer.eos_token_ids[0]
        bos_token_id = None
        special_token_ids = sorted(tokenizer.special_ids)
        tokens = tokenizer.token_bytes

        def __call__(self, _: Any) -> list[int]:
            return []

    wrapped = ll.LLTokenizer(ll.TokenizerWrapper(Vocabulary()), n_vocab=len(tokenizer.token_bytes))
    kind, source = job.sampling.grammar
    assert kind == "llguidance"
    matcher = ll.LLMatcher(wrapped, source)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


GOOD = {
    "hermes": [CALL, f"{CALL}\n{CALL}", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city": "x"}}',
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    ],
    "mistral": ['[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "x", "days": 2}}]'],
}
BAD = ["hello", "", '<tool_call>\n{"name": "get_weather", "arguments": {"days": 1}}\n</tool_call>', "{}"]


@pytest.mark.parametrize("form", list(GOOD))
async def test_required_calls_are_bound_to_their_schemas(form: str) -> None:
    pytest.importorskip("llguidance")
    text = GOOD[form][0]
    body = {**ASK, "tools": [TOOL, OTHER], "tool_choice": "required"}
    whole, _, job, tokenizer = await answer(text, body, tool_parser=form)
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert whole["finish_reason"] == "tool_calls"
    assert all(accepts(job, tokenizer, good) for good in GOOD[form])
    assert not any(accepts(job, tokenizer, bad) for bad in BAD)


async def test_a_named_call_is_the_only_one_possible() -> None:
    pytest.importorskip("llguidance")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole, _, job, tokenizer = await answer(CALL, {**ASK, "tools": [TOOL, OTHER], "tool_choice": choice})
    assert whole["finish_reason"] == "stop" and len(whole["message"]["tool_calls"]) == 1
    assert accepts(job, tokenizer, CALL)
    assert not accepts(job, tokenizer, GOOD["hermes"][1]) and not accepts(job, tokenizer, GOOD["hermes"][2])


async def test_strict_tools_bind_only_what_follows_the_marker() -> None:
    pytest.importorskip("llguidance")
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    _, _, job, tokenizer = await answer(f"Well: {CALL}", {**ASK, "tools": [strict]})
    for text in ("just text <tool", f"Well: {CALL}", f"{CALL} and {CALL} end", ""):
        assert accepts(job, tokenizer, text), text
    for text in ("<tool_call>x", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'):
        assert not accepts(job, tokenizer, text), text


async def test_templates_without_tools_are_taught_by_a_system_message() -> None:
    history = [
        {"role": "system", "content": "Be brief."},
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "later"}]},
    ]
    body = {**ASK, "messages": history, "tools": [TOOL]}
    whole, _, job, tokenizer = await answer(CALL, body, template=TEMPLATE)
    assert whole["finish_reason"] == "tool_calls"
    prompt = prompt_of(job, tokenizer)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt
    responses = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nlater\n</tool_response>"
    assert f"<|im_start|>user\n{responses}<|im_end|>" in prompt


async def test_unknown_formats_and_unenforceable_schemas_are_refused() -> None:
    fake, card = setup("x", TOOLS_TEMPLATE.replace("<tool_call>", "<tool_call><function="))
    async with asgi_client(fake, card) as client:
        error = (await client.post("/v1/chat/completions", json={**ASK, "tools": [TOOL]})).json()["error"]
        assert error["param"] == "tools" and "tool_parser" in error["message"]
    pytest.importorskip("llguidance")
    strange = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": strange, "strict": True}
    fake, card = setup(CALL)
    async with asgi_client(fake, card) as client:
        body = {**ASK, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
        assert error["param"] == "tools" and "uniqueItems" in error["message"]
        function["strict"] = False
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


ANSWER_SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["clear", "grey"]}}, "required": ["sky"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": ANSWER_SCHEMA}}


async def test_a_format_binds_the_answer_where_the_model_calls_no_tool() -> None:
    pytest.importorskip("llguidance")
    body = {**ASK, "tools": [TOOL, OTHER], "response_format": FORMAT}
    whole, _, job, tokenizer = await answer('{"sky": "grey"}', body)
    assert whole["message"]["content"] == '{"sky": "grey"}' and whole["finish_reason"] == "stop"
    assert all(accepts(job, tokenizer, good) for good in ('{"sky": "clear"}', *GOOD["hermes"]))
    assert not any(accepts(job, tokenizer, bad) for bad in (*BAD, '{"sky": "blue"}', f'{CALL}{{"sky": "grey"}}'))
    whole, *_ = await answer(CALL, body)
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        whole, _, job, tokenizer = await answer(CALL, {**body, "tool_choice": choice})
        assert whole["message"]["tool_calls"] and not accepts(job, tokenizer, '{"sky": "grey"}')
    whole, _, job, tokenizer = await answer('{"sky": "grey"}', {**body, "tool_choice": "none"})
    assert not accepts(job, tokenizer, CALL) and "get_weather" not in prompt_of(job, tokenizer)


async def test_formats_that_could_pass_for_a_call_are_refused() -> None:
    pytest.importorskip("llguidance")
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"response_format": FORMAT}, "llama3_json", "writes its calls as JSON too"),
        ({"structured_outputs": {"regex": "a"}}, "hermes", "only JSON can"),
    ]
    for fields, form, words in cases:
        fake, card = setup("x")
        async with asgi_client(fake, card, tool_parser=form) as client:
            response = await client.post("/v1/chat/completions", json={**ASK, "tools": [TOOL], **fields})
        error = response.json()["error"]
        assert response.status_code == 400 and words in error["message"], error
        assert error["param"].startswith(next(iter(fields))) and not fake.jobs


async def test_reasoning_is_split_counted_and_can_be_hidden() -> None:
    text = f"<think>\nIt is in Switzerland.\n</think>\n\nSunny.{CALL}"
    body = {**ASK, "tools": [TOOL]}
    whole, *_ = await answer(text, body)
    assert whole["message"]["reasoning_content"] == whole["message"]["reasoning"] == "It is in Switzerland."
    assert whole["message"]["content"] == "Sunny." and len(whole["message"]["tool_calls"]) == 1
    hidden, *_ = await answer(text, {**body, "include_reasoning": False})
    assert (
        not {"reasoning_content", "reasoning"} & hidden["message"].keys() and hidden["message"]["content"] == "Sunny."
    )
    raw, *_ = await answer(text, ASK, reasoning_parser="none")
    assert raw["message"]["content"] == text


async def test_earlier_reasoning_goes_back_under_either_name() -> None:
    prompts = []
    for name in ("reasoning_content", "reasoning"):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "so that"}]
        template = "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}"
        _, _, job, tokenizer = await answer("c", {**ASK, "messages": turns}, template)
        prompts.append(tokenizer.decode(job.prompt, skip_special_tokens=False))
    assert prompts == ["a||;b|so that|;"] * 2


async def test_reasoning_opened_by_the_prompt() -> None:
    template = TOOLS_TEMPLATE.replace("<think>\n\n</think>\n\n{% endif %}", "</think>{% else %}<think>\n{% endif %}")
    whole, *_ = await answer("hm</think>\n\nYes.", ASK, template)
    assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == ("hm", "Yes.")
    off, _, job, tokenizer = await answer("Yes.", {**ASK, "reasoning_effort": "none"}, template)
    assert off["message"]["content"] == "Yes." and prompt_of(job, tokenizer).endswith("</think>")
    pytest.importorskip("llguidance")
    choice = {**ASK, "tools": [TOOL], "tool_choice": "required"}
    whole, _, job, tokenizer = await answer(f"hm, ok</think>\n{CALL}", choice, template)
    assert whole["message"]["reasoning_content"] == "hm, ok" and len(whole["message"]["tool_calls"]) == 1
    assert accepts(job, tokenizer, f"hm, ok</think>\n{CALL}") and not accepts(job, tokenizer, "hm</think>\n\nno")
    # A bound answer has no room for reasoning, so the template is told to leave it out.
    whole, _, job, tokenizer = await answer('{"a": 1}', {**ASK, "response_format": {"type": "json_object"}}, template)
    assert whole["message"]["content"] == '{"a": 1}' and prompt_of(job, tokenizer).endswith("</think>")


async def test_reasoning_tokens_in_usage() -> None:
    from tokenizers import AddedToken

    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    tokenizer.backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer = Tokenizer(tokenizer.backend, special=tokenizer.special, chat_template=TOOLS_TEMPLATE)
    fake = FakeBackend(saying(tokenizer, "<think>ab cd</think>Yes."))
    async with asgi_client(fake, make_card(tokenizer)) as client:
        usage = (await client.post("/v1/chat/completions", json={**ASK, "max_tokens": 50})).json()["usage"]
    inside = tokenizer.encode("<think>ab cd</think>", add_special_tokens=False)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(inside)}


async def test_tokenize_counts_tools() -> None:
    fake, _ = setup("x")
    with_tools = await ask(fake, {"messages": ASK["messages"], "tools": [TOOL]}, "/tokenize")
    without = await ask(fake, {"messages": ASK["messages"]}, "/tokenize")
    assert with_tools["count"] > without["count"] + 20


def test_openai_client_calls_tools() -> None:
    fake, card = setup(f"Let me look.\n{CALL}")
    fake.limits = lambda: {"max_model_len": 4096}  # type: ignore[method-assign]
    tools: Any = [TOOL]
    with (
        served(create_app(fake, card, ApiOptions())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        whole = client.chat.completions.create(model="tiny", messages=ASK["messages"], tools=tools)
        calls = whole.choices[0].message.tool_calls
        assert calls and calls[0].type == "function" and calls[0].function.arguments == '{"city": "Zürich"}'
        with client.chat.completions.stream(model="tiny", messages=ASK["messages"], tools=tools) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.tool_calls and final.tool_calls[0].function.arguments == '{"city": "Zürich"}'
        history = [*ASK["messages"], whole.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "sun"}]
        assert client.chat.completions.create(model="tiny", messages=history, tools=tools).choices
