"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from router.api.schemas.chat import Message
from router.api.schemas.common import Name, Request, TokenId
from router.api.schemas.tools import Tool, ToolChoice


class TokenizeRequest(Request):
    """Either ``prompt`` or ``messages``."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Default true for ``prompt``, false for ``messages``."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Request):
    model: Name | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
    """Default false: the text of every token."""
