"""Structured output: ``response_format`` (OpenAI) and ``structured_outputs`` (vLLM)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from router.api.schemas.base import Name, Request


class TextFormat(Request):
    type: Literal["text"]


class JsonObjectFormat(Request):
    type: Literal["json_object"]
    """Any JSON object."""


class JsonSchema(Request):
    name: Name
    """For the client's own records."""
    description: str | None = None
    """For the client's own records: put it into the messages if the model is to know it."""
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    """Draft 2020-12, or what its ``$schema`` says. A feature that can't be enforced is refused by name."""
    strict: bool | None = None
    """The schema is enforced whether true or not."""


class JsonSchemaFormat(Request):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Request):
    """Exactly one of them."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: str | None = None
    """The whole answer matches it. Rust's syntax; no look-around, no backreferences."""
    choice: list[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """GBNF (``root ::= ...``) or llguidance's Lark (``start: ...``)."""
    structural_tag: None = None
    """Not served."""
    whitespace_pattern: None = None
    """Not served: between JSON tokens stand at most a space, or a line break and an indent."""
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    """Put ``additionalProperties: false`` into the schema."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [name for name in ("json_", "json_object", "regex", "choice", "grammar") if self._has(name)]
        if len(given) != 1:
            names = ", ".join(name.strip("_") for name in given) or "none"
            raise ValueError(f"exactly one of json, json_object, regex, choice, grammar is needed; given: {names}")
        return self

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None
