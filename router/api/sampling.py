"""Request fields -> wire.Sampling, TextOptions and limits, checked against the model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.api.errors import bad_request
from router.api.schemas.common import GenerationRequest
from router.pages import ids_below
from router.text.card import ModelCard
from router.text.output import TextOptions
from router.text.stops import StopStrings
from router.text.tokenizer import Tokenizer
from router.wire import Sampling

_MASK64 = (1 << 64) - 1
_MAX_BAD_WORD_TOKENS = 64


@dataclass(frozen=True)
class Budget:
    """How long this request's answers may be."""

    max_tokens: int | None
    """None: the rest of the context."""
    name: str
    """The field that said so, for messages."""
    limit: int
    """Prompt + answer, tokens."""
    prompt: str = "prompt"
    """The field that the prompt comes from, for messages."""

    def for_prompt(self, num_prompt: int) -> int:
        """Tokens this prompt's answer may have. Raises a 400 when prompt and answer can't fit."""
        if num_prompt >= self.limit:
            raise bad_request(
                f"the prompt has {num_prompt} tokens; with at least one to generate, this model's context of "
                f"{self.limit} tokens allows at most {self.limit - 1}",
                param=self.prompt,
                code="context_length_exceeded",
            )
        rest = self.limit - num_prompt
        if self.max_tokens is None:
            return rest
        if self.max_tokens > rest:
            raise bad_request(
                f"{self.name} is {self.max_tokens} and the prompt has {num_prompt} tokens; together they may have at "
                f"most {self.limit}, so {self.name} at most {rest}",
                param=self.name,
                code="context_length_exceeded",
            )
        return self.max_tokens


def truncated(ids: list[int], request: GenerationRequest, budget: Budget) -> list[int]:
    """The prompt's last ``truncate_prompt_tokens`` tokens."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == 0:
        raise bad_request("truncate_prompt_tokens must be -1 or at least 1; got 0", param="truncate_prompt_tokens")
    if keep < 0:
        keep = budget.limit - (1 if budget.max_tokens is None else budget.max_tokens)
    return ids[-keep:] if keep > 0 else ids


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises a 400 naming the first id that the model doesn't have."""
    if ids_below(ids, vocab_size):
        return
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_request(f"{name}: token id {token_id} is not in [0, {vocab_size})", param=name)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, as it is and after a space (both spellings occur inside a sentence)."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids or len(ids) > _MAX_BAD_WORD_TOKENS:
                raise bad_request(
                    f"bad_words: {word[:40]!r} has {len(ids)} tokens; 1 to {_MAX_BAD_WORD_TOKENS} are allowed",
                    param="bad_words",
                )
            sequences[ids] = None
    return tuple(sequences)


def build_sampling(
    request: GenerationRequest, card: ModelCard, *, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """Everything but ``max_tokens``, which depends on the prompt. Raises a 400 for ids outside the vocabulary."""
    defaults, vocab = card.default_sampling, card.vocab_size

    def chosen(name: str, fallback: float) -> float:
        value = getattr(request, name)
        return defaults.get(name, fallback) if value is None else value

    stop_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    check_ids("stop_token_ids", stop_ids, vocab)
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    check_ids("allowed_token_ids", allowed, vocab)
    bias = tuple(sorted((int(key), float(value)) for key, value in (request.logit_bias or {}).items()))
    check_ids("logit_bias", [token_id for token_id, _ in bias], vocab)
    eos = () if request.ignore_eos else card.eos_token_ids
    seed = random.getrandbits(64) if request.seed is None else request.seed & _MASK64
    return Sampling(
        temperature=float(chosen("temperature", 1.0)),
        top_p=float(chosen("top_p", 1.0)),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=float(chosen("min_p", 0.0)),
        seed=seed,
        stop_token_ids=tuple(dict.fromkeys((*eos, *stop_ids))),
        min_tokens=request.min_tokens or 0,
        frequency_penalty=float(request.frequency_penalty or 0.0),
        presence_penalty=float(request.presence_penalty or 0.0),
        repetition_penalty=float(chosen("repetition_penalty", 1.0)),
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_words=bad_word_ids(request.bad_words or (), card.tokenizer),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def for_choice(sampling: Sampling, index: int, max_tokens: int) -> Sampling:
    """Choice ``index`` of n: its own noise stream, so that n answers differ; choice 0 equals the n = 1 answer."""
    # An odd multiplier is a bijection of u64: distinct choices of one seed never share a stream.
    seed = (sampling.seed + index * 0x9E3779B97F4A7C15) & _MASK64
    return replace(sampling, seed=seed, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def text_options(request: GenerationRequest, card: ModelCard, sampling: Sampling) -> TextOptions:
    stop = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    return TextOptions(
        stops=StopStrings(list(dict.fromkeys(stop))) if stop else None,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        eos_token_ids=frozenset(card.eos_token_ids),
        keep_tokens=sampling.logprobs is not None or bool(request.return_token_ids),
    )


def check_common(request: GenerationRequest) -> None:
    """Rules between fields. Raises a 400."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
    max_tokens = _budget_field(request)[1]
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise bad_request(
            f"min_tokens is {request.min_tokens}; at most max_tokens = {max_tokens} is allowed", param="min_tokens"
        )


def _budget_field(request: GenerationRequest) -> tuple[str, int | None]:
    newer = getattr(request, "max_completion_tokens", None)
    if newer is None:
        return "max_tokens", request.max_tokens
    if request.max_tokens not in (None, newer):
        raise bad_request(
            f"max_tokens is {request.max_tokens} and max_completion_tokens is {newer}; give one, or the same twice",
            param="max_completion_tokens",
        )
    return "max_completion_tokens", newer


def budget(request: GenerationRequest, context: int) -> Budget:
    """A conversation's limit on its answers, under the name the client used."""
    name, max_tokens = _budget_field(request)
    return Budget(max_tokens, name, context, "messages")
