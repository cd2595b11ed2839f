"""POST /v1/responses: OpenAI's Responses API without stored state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from router.api.blocks import Block, Blocks, Change
from router.api.call import Call
from router.api.chat import call_id
from router.api.conversation import Conversation, Interpreter, prepare, reasoning_tokens
from router.api.errors import ApiError, bad_request, spoken_as
from router.api.generation import Answering, Options, chat_request, parse, serve
from router.api.http import dumps
from router.api.logprobs import Speller, chat_logprobs
from router.api.refused import RESPONSES
from router.api.run import Choice, Run
from router.api.schemas.chat import ChatRequest
from router.api.schemas.responses import (
    LOGPROBS,
    FlatSchemaFormat,
    FunctionCallItem,
    FunctionOutputItem,
    InputMessage,
    NamedTool,
    ReasoningItem,
    ResponsesRequest,
)
from router.api.text_tokens import TextTokens
from router.text.output import Piece, TokenRecord

_SAME = ["model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "stream", "priority"]
_SAME += ["cache_salt", "parallel_tool_calls"]
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Chat's names of fields to this route's."""


async def responses(call: Call) -> None:
    request = parse(call, await call.read_object(), ResponsesRequest, RESPONSES)
    if request.request_id is not None:
        call.use_request_id(request.request_id)
    wanted = LOGPROBS in (request.include or ())
    if request.top_logprobs and not wanted:
        raise bad_request(f'top_logprobs needs include to hold "{LOGPROBS}"', param="top_logprobs")
    with spoken_as(_NAMES):
        chat = as_chat(request)
        conversation = await prepare(call, chat, logprobs=(request.top_logprobs or 0) if wanted else None)
    await serve(call, conversation.plan, _Responses(call, request, chat, conversation), "resp")


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The same request in chat's terms."""
    body: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    body["messages"] = _messages(request)
    body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools]
    choice = request.tool_choice
    body["tool_choice"] = (
        {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
    )
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        form = request.text.format
        if isinstance(form, FlatSchemaFormat):
            schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            body["response_format"] = form.model_dump()
    return chat_request(body)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Items to messages: reasoning and calls join the assistant turn that they are part of."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    turn: dict[str, Any] | None = None
    for item in request.input:
        if isinstance(item, InputMessage) and item.role != "assistant":
            turn = None
            messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, FunctionOutputItem):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        else:
            if turn is None or (isinstance(item, InputMessage | ReasoningItem) and turn.get("content")):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, item)
    return messages


def _extend(turn: dict[str, Any], item: InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem) -> None:
    if isinstance(item, InputMessage):
        turn["content"] = _text(item.content)
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"] = "".join(part.text for part in item.content or ())
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}


class _Responses(Answering):
    """Builds a response object out of pieces, whole or as its typed events."""

    def __init__(self, call: Call, request: ResponsesRequest, chat: ChatRequest, conversation: Conversation) -> None:
        super().__init__(call, Options.of(chat))
        self._request = request
        self._conversation = conversation
        self._interpreter: Interpreter = conversation.interpreter()
        self._short_ids = conversation.tools is not None and conversation.tools.format == "mistral"
        self._blocks = Blocks()
        self._tokens = TextTokens() if conversation.plan.sampling.logprobs is not None else None
        self._speller = Speller(call.services.card.tokenizer)
        self._call_ids: dict[int, str] = {}
        self._sequence = 0
        self._reason: str | None = None

    def add(self, choice: Choice, piece: Piece) -> None:
        for change in self._changes(piece):
            self._name(change)

    def _changes(self, piece: Piece) -> Iterable[Change]:
        for part in self._tokens.slices(piece) if self._tokens is not None else (piece,):
            yield from map(self._with_tokens, self._blocks.feed(self._interpreter.feed(part)))
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
            yield from self._blocks.finish()

    def _with_tokens(self, change: Change) -> Change:
        if self._tokens is None or change.what != "delta" or change.block.kind != "text":
            return change
        tokens = self._tokens.shown(change.text)
        change.block.tokens += tokens
        return replace(change, tokens=tokens)

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = chat_logprobs(tokens, self._speller, self._request.top_logprobs or 0)["content"]
        return content

    def _name(self, change: Change) -> None:
        block = change.block
        if change.what == "open":
            block.id = f"{_PREFIX[block.kind]}_{uuid4().hex}"
            if block.kind == "call":
                self._call_ids[block.index] = call_id(self._short_ids)

    def chunk(self, choice: Choice, piece: Piece, run: Run) -> bytes:
        out = [] if self._sequence else [self._event("response.created", response=self._body("in_progress", run))]
        if len(out):
            out.append(self._event("response.in_progress", response=self._body("in_progress", run)))
        for change in self._changes(piece):
            self._name(change)
            out += self._events(change)
        return b"".join(out)

    def _events(self, change: Change) -> list[bytes]:
        block = change.block
        where = {"item_id": block.id, "output_index": block.index}
        if change.what == "delta":
            if block.kind == "call":
                return [self._event("response.function_call_arguments.delta", **where, delta=change.text)]
            kind = "output_text" if block.kind == "text" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": self._logprobs(change.tokens)} if block.kind == "text" else {}
            return [self._event(f"response.{kind}.delta", **where, content_index=0, delta=change.text, **more)]
        done = change.what == "close"
        ended = "incomplete" if self._reason == "length" else "completed"  # the reason comes with the last block's end
        item = self._item(block, ended if done else "in_progress", empty=not done)
        if not done:
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind != "call":
                part = self._part(block, empty=True)
                events.append(self._event("response.content_part.added", **where, content_index=0, part=part))
            return events
        return [
            *self._done(block, where),
            self._event("response.output_item.done", output_index=block.index, item=item),
        ]

    def _done(self, block: Block, where: dict[str, Any]) -> list[bytes]:
        text = block.text
        if block.kind == "call":
            done = "response.function_call_arguments.done"
            return [self._event(done, **where, name=block.name, arguments=text)]
        kind = "output_text" if block.kind == "text" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": self._logprobs(block.tokens)} if block.kind == "text" else {}
        return [
            self._event(f"response.{kind}.done", **where, content_index=0, text=text, **more),
            self._event("response.content_part.done", **where, content_index=0, part=self._part(block)),
        ]

    def _part(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "text":
            logprobs = [] if empty else self._logprobs(block.tokens)
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "reasoning_text", "text": text}

    def _item(self, block: Block, status: str, *, empty: bool = False) -> dict[str, Any]:
        base = {"id": block.id, "status": status}
        if block.kind == "call":
            arguments = "" if empty else block.text
            ids = {"call_id": self._call_ids[block.index], "name": block.name}
            return {**base, "type": "function_call", **ids, "arguments": arguments}
        content = [] if empty else [self._part(block)]
        if block.kind == "reasoning":
            return {**base, "type": "reasoning", "summary": [], "content": content}
        return {**base, "type": "message", "role": "assistant", "content": content}

    def _event(self, event: str, /, **fields: Any) -> bytes:
        body = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + event.encode() + b"\ndata: " + dumps(body) + b"\n\n"

    def closing(self, run: Run) -> bytes:
        body = self.whole(run)
        return self._event(f"response.{body['status']}", response=body)

    def failure(self, error: ApiError) -> bytes:
        detail = {"code": error.code or "server_error", "message": error.message}
        failed = self._body("failed", None) | {"error": detail}
        return self._event("error", **detail, param=error.param) + self._event("response.failed", response=failed)

    def whole(self, run: Run) -> dict[str, Any]:
        body = self._body("incomplete" if self._reason == "length" else "completed", run)
        if self._reason == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        last = len(self._blocks.blocks) - 1
        for block in self._blocks.blocks:
            body["output"].append(self._item(block, body["status"] if block.index == last else "completed"))
        usage = run.usage()
        body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(run, lambda _: self._interpreter) or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return body

    def _body(self, status: str, run: Run | None) -> dict[str, Any]:
        """The response object as far as it is known; what the client gave comes back as it was given."""
        request = self._request
        sampling = self._conversation.plan.sampling
        given = request.model_dump(include={"tools", "tool_choice"}, exclude_none=True)
        form = request.text.format if request.text else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.call.services.card.name,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }
