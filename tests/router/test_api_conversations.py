"""/v1/responses, /v1/messages and the reasoning budget."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tokenizers import AddedToken

from router.api import ApiOptions, create_app
from router.api.text_tokens import TextTokens
from router.text.output import Piece, TokenRecord
from router.text.tokenizer import Tokenizer
from router.wire import TokenDelta
from tests.router.http_fakes import FakeBackend, FakeTicket, asgi_client, make_card, make_tokenizer, saying, served
from tests.router.test_api_tools import CALL, TOOLS_TEMPLATE, WEATHER, setup

ROOMY = {"max_model_len": 4096}
MIXED = f"<think>\nhm\n</think>\n\nSunny, 日本.\n{CALL}"
FLAT_TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER}
CLAUDE_TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": WEATHER}


def ready(text: str) -> tuple[FakeBackend, Any]:
    fake, card = setup(text)
    fake.limits = lambda: ROOMY  # type: ignore[method-assign]
    return fake, card


async def post(fake: FakeBackend, card: Any, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with asgi_client(fake, card) as client:
        response = await client.post(path, json=body)
        assert response.status_code == status, response.text
        if not body.get("stream") or status != 200:
            return response.json()
        parts = [part.split("\n", 1) for part in response.text.removesuffix("\n\n").split("\n\n")]
        events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
        assert [name.removeprefix("event: ") for name, _ in parts] == [event["type"] for event in events]
        return events


def prompt_of(fake: FakeBackend, card: Any, index: int = 0) -> str:
    return card.tokenizer.decode(fake.jobs[index].prompt, skip_special_tokens=False)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "item_id", "created_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def test_responses_whole_and_streamed_agree() -> None:
    fake, card = ready(MIXED)
    body = {"model": "tiny", "input": "Weather?", "tools": [FLAT_TOOL], "instructions": "Be brief.", "temperature": 0}
    whole = await post(fake, card, "/v1/responses", body)
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Sunny, 日本." and message["role"] == "assistant"
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Zürich"}
    assert whole["status"] == "completed" and whole["store"] is False and whole["temperature"] == 0
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt_of(fake, card)
    events = await post(fake, card, "/v1/responses", {**body, "stream": True})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    arguments = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    assert (text, arguments) == ("Sunny, 日本.", call["arguments"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


async def test_responses_take_a_conversation_of_items() -> None:
    fake, card = ready("ok")
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    await post(fake, card, "/v1/responses", {"input": items})
    turns = prompt_of(fake, card).split("<|im_start|>")
    assert [turn.split("\n")[0] for turn in turns[1:]] == ["system", "user", "assistant", "tool", "assistant"]
    assert 'b<tool_call>{"name": "f", "arguments": {}}</tool_call>' in turns[3]


@pytest.mark.parametrize("text", [MIXED, "just 日本 👩‍👩‍👧 text"])
async def test_responses_logprobs_are_those_of_the_shown_text(text: str) -> None:
    fake, card = ready(text)
    body = {"input": "Weather?", "tools": [FLAT_TOOL], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await post(fake, card, "/v1/responses", body)
    assert fake.jobs[-1].sampling.logprobs == 2 and whole["top_logprobs"] == 2
    part = next(item for item in whole["output"] if item["type"] == "message")["content"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert raw.decode().strip() == part["text"].strip() and part["text"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in part["logprobs"])
    events = await post(fake, card, "/v1/responses", {**body, "stream": True})
    deltas = [e for event in events if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert deltas == done["logprobs"] == part["logprobs"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    await post(fake, card, "/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]})
    assert fake.jobs[-1].sampling.logprobs == 0
    await post(fake, card, "/v1/responses", {"input": "x"})
    assert fake.jobs[-1].sampling.logprobs is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_responses_logprobs_with_a_text_that_ends_within_a_token(streamed: bool) -> None:
    """Of a stop string's beginning, or of what might have been a call, the end of a token is shown without another."""

    async def tokens_of(text: str, **more: Any) -> list[str]:
        fake, card = setup(text)
        body = {"input": "x", "include": ["message.output_text.logprobs"], **more}
        answer = await post(fake, card, "/v1/responses", {**body, "stream": streamed})
        part = (answer[-1]["response"] if streamed else answer)["output"][0]["content"][0]
        assert part["text"] == text, "nothing is held back for ever"
        return [entry["token"] for entry in part["logprobs"]]

    tokenizer = make_tokenizer()
    stop = [tokenizer.bytes_of(i).decode() for i in tokenizer.encode("sttuff", add_special_tokens=False)]
    assert stop[:2] == ["st", "t"]
    assert await tokens_of("sttuff", stop="tx") == stop
    text = "st<tool_call>\n👩\u200d."
    whole = await tokens_of(text, tools=[FLAT_TOOL])
    assert whole[:2] == ["st", "<"] and "".join(whole) == text and "👩\u200d" in whole


def test_tokens_that_end_in_held_spaces_belong_to_the_text_before() -> None:
    records = [TokenRecord(number, None, offset) for number, offset in enumerate((0, 2, 4, 4, 5, 6, 8))]
    tokens = TextTokens()
    texts = [piece.text for piece in tokens.slices(Piece("ab.\nc>\nde", records))]
    assert texts == ["ab", ".\n", "", "c", ">", "\nd", "e"]
    assert [record.token_id for record in tokens.shown("ab.")] == [0, 1]
    assert [record.token_id for record in tokens.shown("\nc")] == [2, 3], "the line break was the token before's"
    assert [record.token_id for record in tokens.shown("de")] == [5, 6], "the rest of a token that began in a tag"
    assert tokens.shown("") == []


async def test_responses_that_are_cut_or_fail() -> None:
    fake, card = ready("one two three four five")
    whole = await post(fake, card, "/v1/responses", {"input": "x", "max_output_tokens": 3})
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    fake.fail_after = 2
    events = await post(fake, card, "/v1/responses", {"input": "x", "stream": True})
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["error"]["message"] == "the replica broke"


async def test_a_cut_item_is_incomplete_in_the_stream_too() -> None:
    fake, card = ready(MIXED)
    body = {"input": "x", "tools": [FLAT_TOOL], "stream": True}
    for cut, status in ((12, "incomplete"), (999, "completed")):
        events = await post(fake, card, "/v1/responses", {**body, "max_output_tokens": cut})
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert items == events[-1]["response"]["output"] and items[-1]["status"] == status
        assert all(item["status"] == "completed" for item in items[:-1])


TOO_MANY = 99_999
RENAMED = [
    ("/v1/responses", {"input": "x", "max_output_tokens": TOO_MANY}, "max_output_tokens"),
    ("/v1/responses", {"input": "x " * TOO_MANY}, "input"),
    ("/v1/responses", {"input": "x" * 12_000, "max_output_tokens": 1}, "input"),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "odd"}}}},
        "text.format.schema",
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 9,
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
        "thinking.budget_tokens",
    ),
]


@pytest.mark.parametrize(("path", "body", "name"), RENAMED, ids=range(len(RENAMED)))
async def test_what_chat_refuses_is_refused_under_the_routes_own_names(path: str, body: Any, name: str) -> None:
    fake, card = ready("x")
    error = (await post(fake, card, path, body, 400))["error"]
    assert error.get("param", name) == name, error
    assert name in error["message"] or name == "input", error
    for foreign in ("max_completion_tokens", "response_format", "thinking_token_budget"):
        assert foreign not in error["message"]


async def test_messages_go_on_from_a_last_assistant_turn() -> None:
    fake, card = ready("hello")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, I"}]
    await post(fake, card, "/v1/messages", {"messages": turns, "max_tokens": 5})
    assert prompt_of(fake, card).endswith("<|im_start|>assistant\nSure, I")
    count = await post(fake, card, "/v1/messages/count_tokens", {"messages": turns})
    assert count == {"input_tokens": len(fake.jobs[0].prompt)}
    turns[-1] = {"role": "assistant", "content": []}
    await post(fake, card, "/v1/messages", {"messages": turns, "max_tokens": 5}, 400)


REFUSED_RESPONSES = [
    ("previous_response_id", "resp_1"),
    ("store", True),
    ("background", True),
    ("conversation", "c"),
    ("truncation", "auto"),
    ("include", ["message.input_image.image_url"]),
    ("tools", [{"type": "web_search"}]),
    ("input", []),
    ("input", [{"type": "item_reference", "id": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ("tool_choice", "required"),
    ("max_output_tokens", 0),
    ("top_logprobs", 2),
    ("text", {"format": {"type": "grammar"}}),
]


@pytest.mark.parametrize(
    ("field", "value"), REFUSED_RESPONSES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(REFUSED_RESPONSES)]
)
async def test_responses_refuse_by_name(field: str, value: Any) -> None:
    fake, card = ready("x")
    error = (await post(fake, card, "/v1/responses", {"input": "x", field: value}, 400))["error"]
    assert error["param"].startswith(field), error


async def test_messages_whole_and_streamed_agree() -> None:
    fake, card = ready(MIXED)
    fake.num_cached = 16
    body = {
        "model": "tiny",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [CLAUDE_TOOL],
    }
    whole = await post(fake, card, "/v1/messages", body)
    thinking, text, call = whole["content"]
    assert (thinking["thinking"], text["text"], call["input"]) == ("hm", "Sunny, 日本.", {"city": "Zürich"})
    assert (whole["stop_reason"], whole["stop_sequence"], whole["role"]) == ("tool_use", None, "assistant")
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] + 16 == len(fake.jobs[0].prompt)
    counted = {name: body[name] for name in ("system", "messages", "tools")}
    assert await post(fake, card, "/v1/messages/count_tokens", counted) == {"input_tokens": len(fake.jobs[0].prompt)}
    events = await post(fake, card, "/v1/messages", {**body, "stream": True})
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == usage
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for name in ("text", "thinking"):
                if name in event["delta"]:
                    blocks[-1][name] += event["delta"][name]
            blocks[-1]["json"] += event["delta"].get("partial_json", "")
    blocks[-1]["input"] = json.loads(blocks[-1]["json"])
    assert [without_ids({k: v for k, v in b.items() if k != "json"}) for b in blocks] == without_ids(whole["content"])


async def test_messages_take_tool_results_and_stops() -> None:
    fake, card = ready("The end. More")
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "now", "input": {"a": "ü"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "noon"}]},
                {"type": "tool_result", "tool_use_id": "u", "content": "broke", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    body = {"max_tokens": 50, "messages": history, "stop_sequences": ["end."], "top_k": 5}
    whole = await post(fake, card, "/v1/messages", body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "end.")
    assert whole["content"] == [{"type": "text", "text": "The "}]
    prompt = prompt_of(fake, card)
    assert 'assistant\n<tool_call>{"name": "now", "arguments": {"a": "ü"}}</tool_call>' in prompt
    assert "tool\nnoon<|im_end|>" in prompt and "tool\nError: broke<|im_end|>" in prompt and "user\nso?" in prompt


async def test_messages_errors_have_anthropics_shape() -> None:
    fake, card = ready("x y z")
    turns = [{"role": "user", "content": "x"}]
    image = {"role": "user", "content": [{"type": "image"}]}
    hosted = {"type": "bash_20250124", "name": "b"}
    for body, status, kind, word in (
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "served"),
        ({"container": "c"}, 400, "invalid_request_error", "container"),
        ({"messages": [image]}, 400, "invalid_request_error", "type"),
        ({"tools": [hosted]}, 400, "invalid_request_error", "tools"),
    ):
        body = {"messages": turns, "max_tokens": 5, **body}
        error = await post(fake, card, "/v1/messages", body, status)
        assert error["type"] == "error" and error["error"]["type"] == kind and word in error["error"]["message"]
    fake.fail_after = 1
    events = await post(fake, card, "/v1/messages", {"messages": turns, "max_tokens": 5, "stream": True})
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the replica broke"}}


def test_openai_client_speaks_responses() -> None:
    fake, card = ready('{"city": "Bern", "days": 3}')

    class Trip(BaseModel):
        city: str
        days: int

    with served(create_app(fake, card, ApiOptions())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        answer = client.responses.create(model="tiny", input="Hi")
        assert answer.output_text == '{"city": "Bern", "days": 3}' and answer.usage and answer.usage.input_tokens
        with client.responses.stream(model="tiny", input="Hi") as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert "".join(deltas) == stream.get_final_response().output_text == answer.output_text
        pytest.importorskip("llguidance")
        parsed = client.responses.parse(model="tiny", input="Hi", text_format=Trip).output_parsed
        assert parsed == Trip(city="Bern", days=3)
        with pytest.raises(openai.BadRequestError, match="nothing is stored"):
            client.responses.create(model="tiny", input="Hi", previous_response_id="r")


def thinking_setup(text: str) -> tuple[FakeBackend, Any]:
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    tokenizer.backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer = Tokenizer(tokenizer.backend, special=tokenizer.special, chat_template=TOOLS_TEMPLATE)
    return FakeBackend(saying(tokenizer, text)), make_card(tokenizer)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_reasoning_budget_closes_the_block_and_goes_on(n: int) -> None:
    fake, card = thinking_setup("<think>one two three four five six</think>seven")
    encode = card.tokenizer.encode
    first, rest = fake.script, [*encode("So: 7.", add_special_tokens=False), card.eos_token_ids[0]]
    closing = encode("\n</think>\n\n", add_special_tokens=False)
    fake.script = lambda job: rest if job.prompt[-len(closing) :] == closing else first(job)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 4, "n": n}
    whole = await post(fake, card, "/v1/chat/completions", {**body, "return_token_ids": True})
    for choice in whole["choices"]:
        assert choice["message"]["content"] == "So: 7." and choice["finish_reason"] == "stop"
        spent = encode(f"<think>{choice['message']['reasoning_content']}", add_special_tokens=False)
        assert len(spent) == 5
        assert choice["token_ids"] == [*spent, *closing, *rest]
    assert whole["usage"]["completion_tokens"] == n * (5 + len(closing) + len(rest))
    second = fake.jobs[n]
    assert second.sampling.max_tokens == fake.jobs[0].sampling.max_tokens - 5 - len(closing)
    assert len(fake.cancelled) == n
    roomy = await post(fake, card, "/v1/chat/completions", {**body, "n": 1, "thinking_token_budget": 400})
    assert roomy["choices"][0]["message"]["content"] == "seven"
    cut = await post(fake, card, "/v1/chat/completions", {**body, "n": 1, "max_tokens": 6})
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 6


async def test_a_budget_without_reasoning_is_refused() -> None:
    fake, card = setup("x")
    body = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 4}
    assert (await post(fake, card, "/v1/chat/completions", body, 400))["error"]["param"] == "thinking_token_budget"
    fake, card = thinking_setup("x")
    error = await post(fake, card, "/v1/chat/completions", {**body, "frequency_penalty": 1}, 400)
    assert "can't be combined" in error["error"]["message"]


@pytest.mark.parametrize("max_tokens", [4, 7, 30])
@pytest.mark.parametrize("size", [7, 1000])
async def test_several_ids_in_one_delta_are_cut_exactly(size: int, max_tokens: int) -> None:
    """Also where the last of them ends the answer."""
    fake, card = thinking_setup("<think>one two three four five six</think>seven")
    whole_deltas = FakeTicket.deltas

    async def lumped(self: FakeTicket):
        ids: list[int] = []
        async for delta in whole_deltas(self):
            ids += delta.ids
            if delta.finish is not None:
                yield TokenDelta(delta.request_id, ids, delta.finish)
                return
            if len(ids) == size:
                yield TokenDelta(delta.request_id, ids)
                ids = []

    body = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 3, "return_token_ids": True}
    body["max_tokens"] = max_tokens
    single = await post(fake, card, "/v1/chat/completions", body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTicket, "deltas", lumped)
        whole = await post(fake, card, "/v1/chat/completions", body)
    assert (whole["choices"], whole["usage"]) == (single["choices"], single["usage"])
    ids = whole["choices"][0]["token_ids"]
    closing = card.tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    assert ids[4 : 4 + len(closing)] == closing[: max_tokens - 4]
