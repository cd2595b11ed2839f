"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from router.api.call import Call
from router.api.conversation import Conversation, Interpreter, prepare, reasoning_tokens
from router.api.errors import bad_request
from router.api.generation import ChunkedAnswering, Options, open_request, serve
from router.api.logprobs import Speller, chat_logprobs, prompt_logprobs
from router.api.refused import CHAT
from router.api.run import Choice, Run, Usage
from router.api.schemas.chat import ChatRequest
from router.text.events import CallArguments, CallStart, Content, Event, Reasoning
from router.text.output import Piece, TokenRecord


async def chat_completions(call: Call) -> None:
    request = await open_request(call, ChatRequest, CHAT)
    if request.max_tokens == 0:
        raise bad_request("max_tokens must be at least 1; got 0", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", param="top_logprobs")
    conversation = await prepare(call, request, logprobs=(request.top_logprobs or 0) if request.logprobs else None)
    await serve(call, conversation.plan, _Chat(call, request, conversation), "chatcmpl")


_REASONING = ("reasoning_content", "reasoning")
"""Where clients look for it: under DeepSeek's name, which most know, or vLLM's newer one."""


def call_id(short: bool = False) -> str:
    """``short``: Mistral's templates want nine letters or digits."""
    return uuid4().hex[:9] if short else f"call_{uuid4().hex[:24]}"


@dataclass
class _Answer:
    interpreter: Interpreter | None
    opened: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    last: Piece | None = None

    def take(self, events: Iterable[Event], short_ids: bool) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, Reasoning):
                self.reasoning.append(event.text)
            elif isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                self.calls.append({"id": call_id(short_ids), "type": "function", "function": function})
            else:
                self.calls[event.index]["function"]["arguments"] += event.text

    def message(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message |= dict.fromkeys(_REASONING, "".join(self.reasoning))
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        return message


def delta_of(events: Iterable[Event], short_ids: bool) -> dict[str, Any]:
    """One chunk's delta out of one piece's events."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            delta |= dict.fromkeys(_REASONING, delta.get(_REASONING[0], "") + event.text)
        elif isinstance(event, CallStart):
            calls[event.index] = {
                "index": event.index,
                "id": call_id(short_ids),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        else:
            assert isinstance(event, CallArguments)
            entry = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += event.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


class _Chat(ChunkedAnswering):
    """Builds chat completions out of pieces, whole or as chunks."""

    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def __init__(self, call: Call, request: ChatRequest, conversation: Conversation) -> None:
        super().__init__(call, Options.of(request))
        self._request = request
        self._conversation = conversation
        self._short_ids = conversation.tools is not None and conversation.tools.format == "mistral"
        self._speller = Speller(call.services.card.tokenizer, self.options.ids_as_names)
        self._answers: dict[int, _Answer] = {}
        keeps_tokens = bool(request.logprobs or request.return_token_ids)
        self._plain = not (keeps_tokens or self.options.continuous_usage or conversation.parsed)

    def _answer(self, choice: Choice) -> _Answer:
        answer = self._answers.get(choice.index)
        if answer is None:
            interpreter = self._conversation.interpreter() if self._conversation.parsed else None
            answer = self._answers[choice.index] = _Answer(interpreter)
        return answer

    def _events(self, answer: _Answer, piece: Piece) -> list[Event]:
        if answer.interpreter is not None:
            return answer.interpreter.feed(piece)
        return [Content(piece.text)] if piece.text else []

    def chunk(self, choice: Choice, piece: Piece, run: Run) -> bytes:
        chunks, index = self.chunks, choice.index
        answer = self._answers.get(index)
        if self._plain and answer is not None and answer.opened and piece.finish_reason is None:
            return chunks.chat_text(index, piece.text) if piece.text else b""
        answer = self._answer(choice)
        opening = b"" if answer.opened else self._open(choice, run)
        answer.opened = True
        if self._plain and piece.finish_reason is None:
            return opening + chunks.chat_text(index, piece.text) if piece.text else opening
        delta = delta_of(self._events(answer, piece), self._short_ids)
        if not (delta or piece.finish_reason or piece.tokens):
            return opening
        body = self._extras({"index": index, "delta": delta}, piece.tokens, piece, answer)
        return opening + chunks.full(body, self._usage_so_far(run))

    def _open(self, choice: Choice, run: Run) -> bytes:
        body = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = {"prompt_token_ids": choice.prompt.ids} if self._request.return_token_ids else None
        return self.chunks.full(body, self._usage_so_far(run), extra)

    def _usage_so_far(self, run: Run) -> dict[str, object] | None:
        return self.usage(run) if self.options.continuous_usage else None

    def usage_of(self, run: Run) -> Usage:
        if not self._conversation.reasons:
            return run.usage()
        spent = reasoning_tokens(run, lambda index: a.interpreter if (a := self._answers.get(index)) else None)
        return replace(run.usage(), reasoning_tokens=spent)

    def _extras(
        self, body: dict[str, Any], records: Sequence[TokenRecord], piece: Piece, answer: _Answer
    ) -> dict[str, Any]:
        request = self._request
        wanted = request.logprobs and records
        body["logprobs"] = chat_logprobs(records, self._speller, request.top_logprobs or 0) if wanted else None
        interpreter = answer.interpreter
        body["finish_reason"] = piece.finish_reason if interpreter is None else interpreter.finish_reason(piece)
        if piece.finish_reason is not None:
            body["stop_reason"] = piece.stop_reason
        if request.return_token_ids:
            body["token_ids"] = [record.token_id for record in records]
        return body

    def add(self, choice: Choice, piece: Piece) -> None:
        answer = self._answer(choice)
        answer.take(self._events(answer, piece), self._short_ids)
        answer.records += piece.tokens
        answer.last = piece

    def whole(self, run: Run) -> dict[str, Any]:
        choices = []
        for choice in run.choices:
            answer = self._answers[choice.index]
            assert answer.last is not None, "every choice ends with a piece"
            body = {"index": choice.index, "message": answer.message()}
            choices.append(self._extras(body, answer.records, answer.last, answer))
        body = {**self.base(), "choices": choices, "usage": self.usage(run)}
        first = run.choices[0]
        if (k := self._request.prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(first.prompt.ids, first.prompt_logprobs or (), self._speller, k)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = first.prompt.ids
        return body
