"""Structured-output fields -> a compiled grammar. Raises a 400 that names the field, or a 503 when busy."""

from __future__ import annotations

from typing import Any

from router.api.errors import ApiError, bad_request, retry_after
from router.api.schemas.common import GenerationRequest
from router.api.schemas.structured import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from router.api.services import Services
from router.text.grammar import GrammarBusy, GrammarError, Kind


async def compile_grammar(services: Services, request: GenerationRequest) -> tuple[str, str] | None:
    """What goes into ``Sampling.grammar``; None when the answer is free."""
    wish = asked(request)
    if wish is None:
        return None
    param, kind, value = wish
    if request.min_tokens:
        raise bad_request(f"min_tokens can't be combined with {param.partition('.')[0]}", param="min_tokens")
    try:
        return await services.grammars.compile(kind, value)
    except GrammarError as error:
        raise bad_request(f"{param}: {error}", param=param, code="invalid_grammar") from None
    except GrammarBusy as error:
        raise ApiError(503, str(error), param=param, code="overloaded", headers=retry_after(1)) from None


def asked(request: GenerationRequest) -> tuple[str, Kind, Any] | None:
    """(field, kind, value), or None."""
    found: list[tuple[str, Kind, Any]] = []
    if isinstance(request.response_format, JsonObjectFormat):
        found.append(("response_format", "json_object", None))
    elif isinstance(request.response_format, JsonSchemaFormat):
        found.append(("response_format.json_schema.schema", "json_schema", request.response_format.json_schema.schema_))
    if request.structured_outputs is not None:
        found.append(_structured(request.structured_outputs))
    if len(found) > 1:
        raise bad_request("response_format and structured_outputs can't both be given", param="structured_outputs")
    return found[0] if found else None


def _structured(outputs: StructuredOutputs) -> tuple[str, Kind, Any]:
    if outputs.json_ is not None:
        return "structured_outputs.json", "json_schema", outputs.json_
    if outputs.regex is not None:
        return "structured_outputs.regex", "regex", outputs.regex
    if outputs.choice is not None:
        return "structured_outputs.choice", "choice", outputs.choice
    if outputs.grammar is not None:
        return "structured_outputs.grammar", "ebnf", outputs.grammar
    return "structured_outputs.json_object", "json_object", None
