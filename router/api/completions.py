"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from router.api.call import Call
from router.api.errors import bad_request
from router.api.generation import ChunkedAnswering, Options, check_choices, make_plan, open_request, serve
from router.api.logprobs import LegacyLogprobs, Speller, prompt_logprobs
from router.api.refused import COMPLETIONS
from router.api.run import Choice, Prompt, Run
from router.api.sampling import Budget, check_ids, truncated
from router.api.schemas.completions import CompletionRequest
from router.api.structured import compile_grammar
from router.text.output import Piece


async def completions(call: Call) -> None:
    request = await open_request(call, CompletionRequest, COMPLETIONS)
    echo_only = request.max_tokens == 0
    if echo_only and not request.echo:
        raise bad_request("max_tokens must be at least 1 (0 is allowed with echo); got 0", param="max_tokens")
    limit = call.services.context
    # With nothing to generate the engine still samples one token after the prompt; it is thrown away.
    budget = Budget(1 if echo_only else request.max_tokens, "max_tokens", limit)
    given = _prompts(request.prompt)
    check_choices(call, request, len(given))
    prompts = [await _prompt(call, request, prompt, budget) for prompt in given]
    grammar = await compile_grammar(call.services, request)
    plan = make_plan(
        call,
        request,
        prompts,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        grammar=grammar,
    )
    options = Options.of(request)
    answering = _Completions(
        call, options, request, echo_only, Speller(call.services.card.tokenizer, options.ids_as_names)
    )
    await serve(call, plan, answering, "cmpl")


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def _prompt(call: Call, request: CompletionRequest, prompt: str | list[int], budget: Budget) -> Prompt:
    services = call.services
    if isinstance(prompt, str):
        text: str | None = prompt
        ids = await services.encode(
            prompt,
            add_special_tokens=request.add_special_tokens is not False,
            param="prompt",
            bounded=request.truncate_prompt_tokens is None,
        )
    else:
        check_ids("prompt", prompt, services.card.vocab_size)
        text, ids = None, prompt
    kept = truncated(ids, request, budget)
    if not kept:
        raise bad_request("prompt: the prompt has no tokens; at least one is needed", param="prompt")
    if len(kept) < len(ids):
        text = None
    return Prompt(kept, budget.for_prompt(len(kept)), text)


@dataclass
class _Answer:
    text: list[str] = field(default_factory=list)
    length: int = 0
    """Characters shown so far, echo included."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LegacyLogprobs | None = None
    last: Piece | None = None
    echoed: bool = False
    shift: int = 0


class _Completions(ChunkedAnswering):
    """Builds text completions out of pieces, whole or as chunks."""

    kind = "text_completion"
    stream_kind = "text_completion"

    def __init__(
        self, call: Call, options: Options, request: CompletionRequest, echo_only: bool, speller: Speller
    ) -> None:
        super().__init__(call, options)
        self._request = request
        self._echo_only = echo_only
        self._speller = Speller(call.services.card.tokenizer, options.ids_as_names)
        self._answers: dict[int, _Answer] = {}
        self._plain = not (
            request.echo or request.logprobs is not None or request.return_token_ids or options.continuous_usage
        )

    def _answer(self, choice: Choice) -> _Answer:
        answer = self._answers.get(choice.index)
        if answer is None:
            answer = self._answers[choice.index] = _Answer()
        return answer

    def _fresh_logprobs(self) -> LegacyLogprobs | None:
        return None if self._request.logprobs is None else LegacyLogprobs(self._speller, self._request.logprobs)

    def _take(self, choice: Choice, piece: Piece, answer: _Answer) -> str:
        """Adds a piece to the answer; returns its text, the echoed prompt before it included."""
        text = "" if self._echo_only else piece.text
        if answer.logprobs is None:
            answer.logprobs = self._fresh_logprobs()
        if self._request.echo and not answer.echoed:
            answer.echoed = True
            prompt = self._prompt_text(choice)
            answer.shift = len(prompt)
            if answer.logprobs is not None:
                answer.logprobs.add_prompt(choice.prompt.ids, choice.prompt_logprobs or (), prompt)
            text = prompt + text
        if not self._echo_only:
            if answer.logprobs is not None:
                answer.logprobs.add_records(piece.tokens, answer.shift)
            answer.token_ids += [record.token_id for record in piece.tokens]
        return text

    def _prompt_text(self, choice: Choice) -> str:
        if choice.prompt.text is not None:
            return choice.prompt.text
        skip = self._request.skip_special_tokens is not False
        return self.call.services.card.tokenizer.decode(choice.prompt.ids, skip_special_tokens=skip)

    def _reason(self, piece: Piece) -> str | None:
        return "length" if self._echo_only and piece.finish_reason else piece.finish_reason

    def chunk(self, choice: Choice, piece: Piece, run: Run) -> bytes:
        chunks = self.chunks
        if self._plain and piece.finish_reason is None:
            return chunks.completion_text(choice.index, piece.text)
        first = choice.index not in self._answers
        answer = self._answer(choice)
        answer.logprobs, answer.token_ids = self._fresh_logprobs(), []
        body = self._choice(choice, piece, self._take(choice, piece, answer), answer)
        if first and self._request.return_token_ids:
            body["prompt_token_ids"] = choice.prompt.ids
        usage = self.usage(run) if self.options.continuous_usage else None
        return chunks.full(body, usage)

    def add(self, choice: Choice, piece: Piece) -> None:
        answer = self._answer(choice)
        answer.text.append(self._take(choice, piece, answer))
        answer.last = piece

    def _choice(self, choice: Choice, piece: Piece, text: str, answer: _Answer) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None if answer.logprobs is None else answer.logprobs.as_dict(),
            "finish_reason": self._reason(piece),
        }
        if piece.finish_reason is not None:
            body["stop_reason"] = piece.stop_reason
        if self._request.return_token_ids:
            body["token_ids"] = answer.token_ids
        return body

    def usage(self, run: Run) -> dict[str, object]:
        usage = super().usage(run)
        if self._echo_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def whole(self, run: Run) -> dict[str, Any]:
        choices = []
        for choice in run.choices:
            answer = self._answer(choice)
            assert answer.last is not None, "every choice ends with a piece"
            body = self._choice(choice, answer.last, "".join(answer.text), answer)
            if (k := self._request.prompt_logprobs) is not None:
                body["prompt_logprobs"] = prompt_logprobs(
                    choice.prompt.ids, choice.prompt_logprobs or (), self._speller, k
                )
            if self._request.return_token_ids:
                body["prompt_token_ids"] = choice.prompt.ids
            choices.append(body)
        return {**self.base(), "choices": choices, "usage": self.usage(run)}
