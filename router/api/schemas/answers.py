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
    reasoning: str | None = None
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


class MessagesErrorDetail(Answer):
    type: str
    message: str


class MessagesErrorBody(Answer):
    type: Literal["error"]
    error: MessagesErrorDetail


class InputTokens(Answer):
    input_tokens: int


class MessagesUsage(Answer):
    input_tokens: int
    """Prompt tokens that were not read from the cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of type text, thinking or tool_use."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class ResponsesUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseBody(BaseModel):
    """Beside these, the request's own fields as they were given."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    """Items of type message, reasoning or function_call."""
    usage: ResponsesUsage
