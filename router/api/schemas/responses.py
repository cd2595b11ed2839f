"""POST /v1/responses, without stored state."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from router.api.schemas.base import Int, Name, Request, Text
from router.api.schemas.common import MAX_LOGPROBS
from router.api.schemas.structured import JsonObjectFormat, TextFormat
from router.api.schemas.tools import Effort, FunctionName, FunctionSpec

LOGPROBS = "message.output_text.logprobs"
"""In ``include``: what asks for log-probabilities."""


class InputText(Request):
    type: Literal["input_text", "output_text", "text"]
    text: str


ItemContent = str | Annotated[list[InputText], Field(min_length=1)]


class InputMessage(Request):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(Request):
    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: str
    """JSON text."""


class FunctionOutputItem(Request):
    type: Literal["function_call_output"]
    call_id: Name
    output: ItemContent


class ReasoningText(Request):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Request):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    """Goes back to models whose template shows earlier reasoning."""


InputItem = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(FunctionSpec):
    type: Literal["function"]
    """Only functions; hosted tools are refused."""


class NamedTool(Request):
    type: Literal["function"]
    name: FunctionName


class FlatSchemaFormat(Request):
    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


class TextOptions(Request):
    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None
    """The model has no such control."""


class ReasoningOptions(Request):
    effort: Effort | None = None
    summary: None = None
    """Reasoning is returned as it is, not summarised."""


class ResponseStreamOptions(Request):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Request):
    """Everything the answer depends on is in the request; nothing is stored."""

    model: Name | None = None
    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    """Text, or messages, calls and their outputs in order."""
    instructions: str | None = None
    """Becomes the first system message."""
    max_output_tokens: Annotated[Int, Field(ge=1, lt=1 << 31)] | None = None
    """Reasoning counts too. Left out: the rest of the context."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Log-probabilities of the text's tokens. Reasoning comes in the clear: there is nothing encrypted to add."""
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """So many of the likeliest at each position; needs ``message.output_text.logprobs`` in ``include``."""
    priority: Annotated[Int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")] | None = None
    user: Name | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self
