"""Tools and reasoning controls of a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from router.api.schemas.base import Request

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionSpec(Request):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; left out: any object."""
    strict: bool | None = None
    """Enforce ``parameters`` whenever the model calls the function. Forced calls try to in any case."""

    @field_validator("parameters")
    @classmethod
    def _plain_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and "x-guidance" in value:
            raise ValueError("x-guidance is not a JSON Schema keyword")
        return value


class Tool(Request):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Request):
    name: FunctionName


class NamedToolChoice(Request):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
