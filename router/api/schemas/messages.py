"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.schemas.base import Int, Name, Request, Text
from router.api.schemas.tools import FunctionName


class TextBlock(Request):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    """Without effect: every prefix is cached."""


class ToolUseBlock(Request):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Request):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(Request):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Request):
    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class UserTurn(Request):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]
    """Text and tool results; images and documents are refused."""


class AssistantTurn(Request):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class MessagesTool(Request):
    type: Literal["custom"] | None = None
    """Only the client's own tools; hosted ones are refused."""
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class AutoChoice(Request):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NoChoice(Request):
    type: Literal["none"]


class ToolChoiceByName(Request):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class ThinkingOn(Request):
    type: Literal["enabled"]
    budget_tokens: Annotated[Int, Field(ge=1, lt=1 << 31)] | None = None
    """Longest reasoning, tokens; then the answer begins."""


class ThinkingOther(Request):
    type: Literal["disabled", "adaptive"]


class CountTokensRequest(Request):
    """What counts towards the prompt."""

    model: Name | None = None
    messages: Annotated[list[Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=512)] | None = None
    tool_choice: Annotated[AutoChoice | NoChoice | ToolChoiceByName, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingOther, Field(discriminator="type")] | None = None


class MessagesMetadata(Request):
    user_id: Name | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[Int, Field(ge=1, lt=1 << 31)]
    stop_sequences: Annotated[list[Text], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=0, lt=1 << 31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: MessagesMetadata | None = None
