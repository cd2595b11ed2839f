"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from router.api import sse
from router.api.call import Call
from router.api.errors import ApiError, bad_request
from router.api.generation import Answering, Options, make_plan, open_request, serve
from router.api.logprobs import Speller, chat_logprobs, prompt_logprobs
from router.api.refused import CHAT
from router.api.run import Choice, Prompt, Run
from router.api.sampling import budget, truncated
from router.api.schemas.chat import ChatRequest
from router.api.structured import compile_grammar
from router.text.chat import TemplateRefusal
from router.text.output import Piece, TokenRecord


async def chat_completions(call: Call) -> None:
    request = await open_request(call, ChatRequest, CHAT)
    if request.max_tokens == 0:
        raise bad_request("max_tokens must be at least 1; got 0", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", param="top_logprobs")
    prompt = await chat_prompt(call, request)
    grammar = await compile_grammar(call.services, request)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    plan = make_plan(call, request, [prompt], logprobs=logprobs, grammar=grammar)
    await serve(call, plan, _Chat(call, Options.of(request), request), "chatcmpl")


async def chat_prompt(call: Call, request: ChatRequest) -> Prompt:
    """Renders and tokenizes the conversation. Raises a 400 when the template refuses it or it doesn't fit."""
    services = call.services
    limits = budget(request, services.context)
    text = render(call, request)
    bounded = request.truncate_prompt_tokens is None
    if request.add_special_tokens:
        ids = await services.encode(text, add_special_tokens=True, param="messages", bounded=bounded)
    else:
        ids = await services.encode_prompt(text, bounded=bounded)
    ids = truncated(ids, request, limits)
    if not ids:
        raise bad_request("messages: the chat template renders them to an empty prompt", param="messages")
    return Prompt(ids, limits.for_prompt(len(ids)), text)


def render(call: Call, request: ChatRequest) -> str:
    template = call.services.template
    if template is None:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or start the server with one",
            code="no_chat_template",
        )
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
        )
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    try:
        return template.render(
            [message.model_dump(exclude_none=True) for message in request.messages],
            add_generation_prompt=opens,
            continue_final_message=continues,
            variables=request.chat_template_kwargs,
        )
    except TemplateRefusal as error:
        raise bad_request(str(error), param="messages", code="template_error") from None


@dataclass
class _Answer:
    text: list[str] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    last: Piece | None = None


class _Chat(Answering):
    """Builds chat completions out of pieces, whole or as chunks."""

    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def __init__(self, call: Call, options: Options, request: ChatRequest) -> None:
        super().__init__(call, options)
        self._request = request
        self._speller = Speller(call.services.card.tokenizer, options.ids_as_names)
        self._opened: set[int] = set()
        self._answers: dict[int, _Answer] = {}
        self._plain = not (request.logprobs or request.return_token_ids or options.continuous_usage)

    def chunk(self, chunks: sse.Chunks, choice: Choice, piece: Piece, run: Run) -> bytes:
        index = choice.index
        opening = b"" if index in self._opened else self._open(chunks, choice, run)
        if self._plain and piece.finish_reason is None:
            return opening + chunks.chat_text(index, piece.text) if piece.text else opening
        delta = {"content": piece.text} if piece.text else {}
        body = self._extras({"index": index, "delta": delta}, piece.tokens, piece)
        return opening + chunks.full(body, self._usage_so_far(run))

    def _open(self, chunks: sse.Chunks, choice: Choice, run: Run) -> bytes:
        self._opened.add(choice.index)
        body = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = {"prompt_token_ids": choice.prompt.ids} if self._request.return_token_ids else None
        return chunks.full(body, self._usage_so_far(run), extra)

    def _usage_so_far(self, run: Run) -> dict[str, object] | None:
        return self.usage(run) if self.options.continuous_usage else None

    def _extras(self, body: dict[str, Any], records: list[TokenRecord], piece: Piece) -> dict[str, Any]:
        request = self._request
        wanted = request.logprobs and records
        body["logprobs"] = chat_logprobs(records, self._speller, request.top_logprobs or 0) if wanted else None
        body["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            body["stop_reason"] = piece.stop_reason
        if request.return_token_ids:
            body["token_ids"] = [record.token_id for record in records]
        return body

    def add(self, choice: Choice, piece: Piece) -> None:
        answer = self._answers.setdefault(choice.index, _Answer())
        answer.text.append(piece.text)
        answer.records += piece.tokens
        answer.last = piece

    def whole(self, base: dict[str, Any], run: Run) -> dict[str, Any]:
        choices = []
        for choice in run.choices:
            answer = self._answers[choice.index]
            assert answer.last is not None, "every choice ends with a piece"
            message = {"role": "assistant", "content": "".join(answer.text), "refusal": None}
            choices.append(self._extras({"index": choice.index, "message": message}, answer.records, answer.last))
        body = {**base, "choices": choices, "usage": self.usage(run)}
        first = run.choices[0]
        if (k := self._request.prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(first.prompt.ids, first.prompt_logprobs or (), self._speller, k)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = first.prompt.ids
        return body
