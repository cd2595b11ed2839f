"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from router.api.schemas.common import MAX_LOGPROBS, GenerationRequest, Int, Name, Request
from router.api.schemas.tools import Effort, Tool, ToolChoice


class TextPart(Request):
    type: Literal["text"]
    """Only text; images, audio and files are refused."""
    text: str


class CalledFunction(Request):
    name: Name
    arguments: str
    """JSON text."""


class ToolCall(Request):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(Request):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Request):
    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(Request):
    role: Literal["assistant"]
    content: Content | None = None
    """May be left out only beside tool_calls."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of ``reasoning_content``, which counts where both are given."""
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("an assistant message needs content or tool_calls")
        if self.reasoning_content is None:  # the name that chat templates know
            self.reasoning_content = self.reasoning
        self.reasoning = None
        return self


class ToolMessage(Request):
    role: Literal["tool"]
    content: Content
    tool_call_id: Name | None = None
    name: Name | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Int, Field(ge=1, lt=1 << 31)] | None = None
    """Newer name of ``max_tokens``; if both are given they must agree."""
    logprobs: bool | None = None
    """Log-probabilities of the answer's tokens."""
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """So many of the likeliest at each position; needs ``logprobs``."""
    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant turn. Default true, unless the final message is continued."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of starting a new one."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template; not those that come from fields of the request."""
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    """Functions the model may call."""
    tool_choice: ToolChoice | None = None
    """auto (the default with tools), none, required, or one function by name."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    reasoning_effort: Effort | None = None
    """For models whose template knows it; "none" turns reasoning off where the template can."""
    thinking_token_budget: Annotated[Int, Field(ge=1, lt=1 << 31)] | None = None
    """Longest reasoning, tokens; then the answer begins. For models that reason."""
    include_reasoning: bool | None = None
    """false: leave the reasoning out of the answer. It is generated and counted all the same."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own to the rendered template. Default false: templates bring theirs."""
