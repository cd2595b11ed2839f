"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from router.api.blocks import Block, Blocks, Change
from router.api.call import Call
from router.api.conversation import Conversation, Interpreter, prepare, render
from router.api.errors import ApiError, messages_body, spoken_as
from router.api.generation import Answering, Options, chat_request, parse, serve
from router.api.http import dumps
from router.api.refused import MESSAGES
from router.api.run import Choice, Run
from router.api.schemas.chat import ChatRequest
from router.api.schemas.messages import (
    AssistantTurn,
    CountTokensRequest,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingOn,
    ToolChoiceByName,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from router.api.tooling import plan_tools
from router.text.output import Piece

_NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens", "reasoning_effort": "thinking"}
"""Chat's names of fields to this route's."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(call: Call) -> None:
    request = parse(call, await call.read_object(), MessagesRequest, MESSAGES)
    with spoken_as(_NAMES):
        chat = as_chat(request)
        conversation = await prepare(call, chat, logprobs=None)
    await serve(call, conversation.plan, _Messages(call, chat, conversation), "msg")


async def count_tokens(call: Call) -> None:
    request = parse(call, await call.read_object(), CountTokensRequest, MESSAGES)
    services = call.services
    with spoken_as(_NAMES):
        chat = as_chat(request)
        text = render(services, chat, plan_tools(services, chat))
    await call.send_json(200, {"input_tokens": len(await services.encode_prompt(text, bounded=False))})


def as_chat(request: CountTokensRequest) -> ChatRequest:
    """The same request in chat's terms."""
    body: dict[str, Any] = {"messages": _messages(request), "model": request.model}
    if isinstance(request.messages[-1], AssistantTurn):  # the answer goes on from its text
        body["continue_final_message"] = True
    if isinstance(request, MessagesRequest):
        body |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "stream")}
        body["stop"] = request.stop_sequences or None
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in request.tools
        ]
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceByName):
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        body["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if getattr(choice, "disable_parallel_tool_use", None):
        body["parallel_tool_calls"] = False
    if isinstance(request.thinking, ThinkingOn):
        body["thinking_token_budget"] = request.thinking.budget_tokens
    elif request.thinking is not None and request.thinking.type == "disabled":
        body["reasoning_effort"] = "none"
    return chat_request(body)


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if request.system:
        out.append({"role": "system", "content": _text(request.system)})
    for turn in request.messages:
        out += _user(turn) if isinstance(turn, UserTurn) else [_assistant(turn)]
    return out


def _user(turn: UserTurn) -> list[dict[str, Any]]:
    """Tool results become tool turns of their own, before or between the user's text as they stand."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    out: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            text = _text(block.content or "")
            content = f"Error: {text}" if block.is_error else text
            out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif out and out[-1]["role"] == "user":
            out[-1]["content"] += "\n" + block.text
        else:
            out.append({"role": "user", "content": block.text})
    return out


def _assistant(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    # Redacted thinking is another server's secret; there is nothing in it to show a model.
    assert all(isinstance(b, TextBlock | ThinkingBlock | ToolUseBlock | RedactedThinkingBlock) for b in turn.content)
    return {**message, "tool_calls": calls} if calls else message


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _Messages(Answering):
    """Builds a message out of pieces, whole or as its typed events."""

    sign_of_life = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, call: Call, chat: ChatRequest, conversation: Conversation) -> None:
        super().__init__(call, Options.of(chat))
        self._interpreter: Interpreter = conversation.interpreter()
        self._blocks = Blocks()
        self._started = False
        self._last: Piece | None = None

    def add(self, choice: Choice, piece: Piece) -> None:
        for change in self._changes(piece):
            self._name(change)

    def _changes(self, piece: Piece) -> Iterable[Change]:
        yield from self._blocks.feed(self._interpreter.feed(piece))
        if piece.finish_reason is not None:
            self._last = piece
            yield from self._blocks.finish()

    @staticmethod
    def _name(change: Change) -> None:
        if change.what == "open":
            change.block.id = f"toolu_{uuid4().hex[:24]}"

    def chunk(self, choice: Choice, piece: Piece, run: Run) -> bytes:
        out = [] if self._started else [_event("message_start", message=self._message(run))]
        self._started = True
        for change in self._changes(piece):
            self._name(change)
            out += _events(change)
        return b"".join(out)

    def closing(self, run: Run) -> bytes:
        delta = _event("message_delta", delta=self._stop(), usage=_usage(run))
        return delta + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + messages_body(error) + b"\n\n"

    def _stop(self) -> dict[str, Any]:
        piece = self._last
        assert piece is not None, "every answer ends with a piece"
        if piece.finish_reason == "stop" and isinstance(piece.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        calls = piece.finish_reason == "stop" and self._interpreter.num_calls
        reason = "tool_calls" if calls else piece.finish_reason or ""
        return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}

    def _message(self, run: Run) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.call.services.card.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(run),
        }

    def whole(self, run: Run) -> dict[str, Any]:
        content = [_whole_block(block) for block in self._blocks.blocks]
        return {**self._message(run), "content": content, **self._stop()}


def _usage(run: Run) -> dict[str, int]:
    """Anthropic's ``input_tokens`` are those that were not read from the cache."""
    usage = run.usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    return (
        {"type": "text", "text": ""} if block.kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}
    )


def _whole_block(block: Block) -> dict[str, Any]:
    if block.kind != "call":
        return {**_empty_block(block), ("text" if block.kind == "text" else "thinking"): block.text}
    try:
        arguments = json.loads(block.text)
    except ValueError:
        # Only a call cut short by max_tokens is no JSON; stop_reason says so.
        arguments = {}
    return {**_empty_block(block), "input": arguments if isinstance(arguments, dict) else {}}


def _events(change: Change) -> list[bytes]:
    index = change.block.index
    if change.what == "open":
        return [_event("content_block_start", index=index, content_block=_empty_block(change.block))]
    if change.what == "close":
        return [_event("content_block_stop", index=index)]
    kind, field = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[change.block.kind]
    return [_event("content_block_delta", index=index, delta={"type": kind, field: change.text})]


def _event(event: str, /, **fields: Any) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + dumps({"type": event, **fields}) + b"\n\n"
