"""Shapes of answers. The code builds them by hand; tests hold the two together."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    """The field that is at fault."""
    code: str | None


class ErrorBody(Answer):
    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int
    """Prompt tokens whose KV pages were found in the cache."""


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class UsageBody(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class LegacyLogprobsBody(Answer):
    text_offset: list[int]
    """Where each token begins in ``text``, characters."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: LegacyLogprobsBody | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    """The stop string or stop token id that ended the answer; null for the model's own end."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class AnsweredFunction(Answer):
    name: str
    arguments: str


class AnsweredCall(Answer):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelBody(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelBody]


class EngineList(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]


class Status(Answer):
    status: str


class Version(Answer):
    version: str


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(Answer):
    prompt: str


class Directory(BaseModel):
    """Replicas, their sync state, and the hottest prefixes (hash, tokens, holders, hits); never prompt text."""

    model_config = ConfigDict(extra="allow")
