"""The anthropic SDK's first page: create, stream, count tokens, tools."""

import sys

from anthropic import Anthropic

url, model = sys.argv[1:]
client = Anthropic(base_url=url, api_key="none")
greedy = {"temperature": 0}
messages = [{"role": "user", "content": "What is the capital of France?"}]
message = client.messages.create(model=model, max_tokens=20, messages=messages, extra_body=greedy)
assert message.content[0].type == "text" and "Paris" in message.content[0].text, message
with client.messages.stream(model=model, max_tokens=20, messages=messages, extra_body=greedy) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == message.content[0].text and final.usage.output_tokens == message.usage.output_tokens
counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens

tools = [
    {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    }
]
asked = client.messages.create(
    model=model, max_tokens=100, messages=messages, tools=tools, tool_choice={"type": "any"}, extra_body=greedy
)
assert asked.stop_reason in ("tool_use", "max_tokens"), asked
call = asked.content[0]
assert call.type == "tool_use" and call.name == "get_weather" and call.input["city"] in ("Paris", "Rome"), asked
result = {"type": "tool_result", "tool_use_id": call.id, "content": "15 degrees"}
history = [*messages, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model=model, max_tokens=8, messages=history, tools=tools).content
