"""Fields that several routes share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from router.api.schemas.base import MAX_ID, Int, Name, Request, Text, TokenId
from router.api.schemas.structured import ResponseFormat, StructuredOutputs

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_N = 128
MAX_LIST = 1024


__all__ = [
    "MAX_ID",
    "MAX_LIST",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_STOPS",
    "GenerationRequest",
    "Int",
    "Name",
    "Request",
    "StreamOptions",
    "Text",
    "TokenId",
]


def _not_too_many(value: Any) -> Any:
    """First, since an object's wrong entries are all looked at, and each takes microseconds to report."""
    if isinstance(value, dict) and len(value) > MAX_LIST:
        raise ValueError(f"object should have at most {MAX_LIST} entries, not {len(value)}")
    return value


class StreamOptions(Request):
    include_usage: bool | None = None
    """Send one more chunk with the whole request's usage before ``[DONE]``."""
    continuous_usage_stats: bool | None = None
    """Put the usage so far into every chunk."""
    include_obfuscation: Literal[False] | None = None
    """Chunks are not padded."""


class GenerationRequest(Request):
    """What chat and text completions share. ``null`` means "not given" everywhere."""

    model: Name | None = None
    """One of the served names; left out: the served model."""
    n: Annotated[Int, Field(ge=1, le=MAX_N)] | None = None
    """Answers per prompt. With a ``seed``, answer i draws from its own stream of that seed."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Only with ``stream``."""
    max_tokens: Annotated[Int, Field(ge=0, lt=1 << 31)] | None = None
    """Longest answer, tokens. Left out: the rest of the context. 0 only in text completions with ``echo``."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=1 << 31)] | None = None
    """0 or -1: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    """Same seed, prompt and options: same answer. Left out: a random one."""
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    """Strings that end the answer; the first to be completed wins. Not part of the answer."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LIST)] | None = None
    include_stop_str_in_output: bool | None = None
    """Keep the stop string, or the stop token's text, at the end of the answer."""
    ignore_eos: bool | None = None
    """Go on after the model's end-of-turn token."""
    min_tokens: Annotated[Int, Field(ge=0, lt=1 << 31)] | None = None
    """No stop before so many tokens."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Over prompt and answer, as transformers defines it. 1: none."""
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LIST),
            BeforeValidator(_not_too_many),
        ]
        | None
    ) = None
    """Token id (as a string) to what is added to its logit."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 18)] | None = None
    """Only these tokens may be sampled."""
    bad_words: Annotated[list[Text], Field(max_length=MAX_LIST)] | None = None
    """Texts that must not be generated, as token sequences."""
    response_format: ResponseFormat | None = None
    """What the answer has to be: text, any JSON object, or JSON that satisfies a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The same by schema, regular expression, choice or grammar. Not beside a ``response_format`` other than text."""
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens, with so many of the likeliest. Not with ``stream``."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true."""
    return_token_ids: bool | None = None
    """Add ``prompt_token_ids`` and each choice's ``token_ids``."""
    return_tokens_as_token_ids: bool | None = None
    """In logprobs, name tokens ``token_id:N``."""
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1, lt=1 << 31)] | None = None
    """Keep only the prompt's last so many tokens; -1: as many as the context holds."""
    priority: Annotated[Int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    """Smaller runs earlier. Default 0."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Keep this request's prefix cache apart from others' of the same API key."""
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")] | None = None
    """Becomes ``x-request-id`` when that header is absent."""
    user: Name | None = None
    """For the client's own records; has no effect."""
    metadata: dict[str, Any] | None = None
    """For the client's own records; has no effect."""
