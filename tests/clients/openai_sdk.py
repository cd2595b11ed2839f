"""The openai SDK's first page: chat, stream helper, completions, responses, parse, tools."""

import json
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
messages = [{"role": "user", "content": "What is the capital of France?"}]
how = {"model": model, "temperature": 0}


class Capital(BaseModel):
    city: Literal["Paris", "Lyon"]
    on_the_seine: bool


def chat() -> None:
    answer = client.chat.completions.create(messages=messages, max_tokens=20, **how)
    assert "Paris" in answer.choices[0].message.content
    with client.chat.completions.stream(messages=messages, max_tokens=20, **how) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == answer.choices[0].message.content


def completions() -> None:
    answer = client.completions.create(prompt="The capital of France is", max_tokens=8, logprobs=2, **how)
    assert answer.choices[0].text and len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    chunks = client.completions.create(prompt="The capital of France is", max_tokens=8, stream=True, **how)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def responses() -> None:
    answer = client.responses.create(input="What is the capital of France?", max_output_tokens=20, **how)
    assert "Paris" in answer.output_text
    with client.responses.stream(input="What is the capital of France?", max_output_tokens=20, **how) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == answer.output_text
    include = ["message.output_text.logprobs"]
    scored = client.responses.create(input="Hi", max_output_tokens=4, include=include, top_logprobs=2, **how)
    assert all(len(entry.top_logprobs) == 2 for entry in scored.output[0].content[0].logprobs)


def parse() -> None:
    answer = client.chat.completions.parse(messages=messages, response_format=Capital, max_tokens=60, **how)
    assert isinstance(answer.choices[0].message.parsed, Capital)
    parsed = client.responses.parse(input="Capital of France?", text_format=Capital, max_output_tokens=60, **how)
    assert isinstance(parsed.output_parsed, Capital)


def tools() -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Weather of a city", "parameters": parameters}
    offered = {"tools": [{"type": "function", "function": function}]}
    answer = client.chat.completions.create(
        messages=messages, max_tokens=100, tool_choice="required", parallel_tool_calls=False, **offered, **how
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"}
    history = [*messages, answer.choices[0].message, result]
    assert client.chat.completions.create(messages=history, max_tokens=8, **offered, **how).choices[0].message.content


for example in (chat, completions, responses, parse, tools):
    example()
