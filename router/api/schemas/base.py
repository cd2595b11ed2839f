"""What every request body is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _integral(value: Any) -> Any:
    """JSON has one number type: 16.0 is the integer 16 (JSON Schema says the same)."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
MAX_ID = 1 << 31
"""Token ids are less."""
TokenId = Annotated[Int, Field(ge=0, lt=MAX_ID, json_schema_extra={"x-token-id": True})]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Name = Annotated[str, Field(max_length=512)]


class Request(BaseModel):
    """Base of request bodies: no type coercion; fields that nobody defined are ignored and reported."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)
