"""What every request body is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema


def _integral(value: Any) -> Any:
    """JSON has one number type: 16.0 is the integer 16 (JSON Schema says the same)."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
MAX_ID = 1 << 31
"""Token ids are less."""
TokenId = Annotated[Int, Field(ge=0, lt=MAX_ID, json_schema_extra={"x-token-id": True})]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Name = Annotated[str, Field(max_length=512)]


def _end_lists_early(part: Any) -> None:
    """A list ends at its first wrong item: an error for each of a million, of which one is told, takes seconds in which
    no other stream of the router goes on."""
    if isinstance(part, dict):
        if part.get("type") == "list":
            part["fail_fast"] = True
        for key, inner in part.items():
            if key != "metadata":
                _end_lists_early(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            _end_lists_early(inner)


class Request(BaseModel):
    """Base of request bodies: no type coercion; fields that nobody defined are ignored and reported."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler, /) -> CoreSchema:
        schema = handler(source)
        _end_lists_early(schema)
        return schema
