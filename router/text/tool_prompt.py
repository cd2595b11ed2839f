"""Tools for chat templates that know none: Hermes' format, taught by a system message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You can call functions. Each line between <tools> and </tools> describes one, with a JSON schema of \
its parameters:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object of its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function_name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The result then comes between <tool_response> and </tool_response>."""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages that say in text what the template can't: which tools there are."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        system = {"role": "system", "content": f"{_text(first.get('content'))}\n\n{introduction}"}
        return [system, *map(dict, messages[1:])]
    return [{"role": "system", "content": introduction}, *map(dict, messages)]


def spelled_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which earlier calls and their results are text, for a template that would drop them."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if out and out[-1].get("_responses"):
                out[-1]["content"] += "\n" + response
            else:
                out.append({"role": "user", "content": response, "_responses": True})
        elif message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            text = "\n".join([part for part in (_text(message.get("content")),) if part] + calls)
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            out.append({**rest, "content": text})
        else:
            out.append(dict(message))
    return [{key: value for key, value in message.items() if key != "_responses"} for message in out]


def _call(function: Mapping[str, Any]) -> str:
    # Arguments are JSON text already, and go in as the model wrote them.
    arguments = function["arguments"].strip() or "{}"
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
