"""The OpenAPI 3.1 document, generated from the pydantic models and the routing table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.http import dumps
from router.api.info import package_version
from router.api.schemas import answers
from router.api.schemas.chat import ChatRequest
from router.api.schemas.completions import CompletionRequest
from router.api.schemas.messages import CountTokensRequest, MessagesRequest
from router.api.schemas.responses import ResponsesRequest
from router.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from router.text.card import ModelCard

_REF = "#/components/schemas/{model}"
_MEANINGS = {
    400: "The request is at fault; param names the field.",
    401: "No API key, or an unknown one.",
    404: "No such model.",
    405: "The path takes other methods.",
    408: "The request's deadline passed.",
    413: "The body is too long.",
    429: "No room now; Retry-After says when to try again.",
    500: "The engine or the server failed.",
    502: "The engine's stream broke off.",
    503: "No replica is ready, or the router is draining; Retry-After says when to try again.",
}
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_EVENT = {
    "type": "object",
    "description": "One server-sent event; data is JSON, or [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_GENERATION_ERRORS = (400, 401, 404, 408, 413, 429, 500, 502, 503)


@dataclass(frozen=True)
class Operation:
    id: str
    summary: str
    answer: type[BaseModel] | None
    """None: plain text."""
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    streams: bool = False
    parameters: tuple[Mapping[str, Any], ...] = ()


def _parameter(where: str, name: str, schema: Mapping[str, Any], required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": schema}


_TOP = _parameter("query", "top", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20})

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        "chatCompletions", "Answer a conversation.", answers.ChatCompletion, ChatRequest, _GENERATION_ERRORS, True
    ),
    ("post", "/v1/completions"): Operation(
        "completions", "Continue prompts.", answers.Completion, CompletionRequest, _GENERATION_ERRORS, True
    ),
    ("post", "/v1/responses"): Operation(
        "responses", "Answer in typed items.", answers.ResponseBody, ResponsesRequest, _GENERATION_ERRORS, True
    ),
    ("post", "/v1/messages"): Operation(
        "messages", "Anthropic's messages.", answers.MessageBody, MessagesRequest, _GENERATION_ERRORS, True
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        "countTokens", "Tokens of a prompt.", answers.InputTokens, CountTokensRequest, (400, 401, 404, 413)
    ),
    ("get", "/v1/models"): Operation("listModels", "Served models.", answers.ModelList, errors=(401,)),
    ("get", "/v1/models/{model}"): Operation("getModel", "One served model.", answers.ModelBody, errors=(401, 404)),
    ("get", "/v1/directory"): Operation(
        "directory", "Which replica holds which prefix.", answers.Directory, errors=(400, 401), parameters=(_TOP,)
    ),
    ("get", "/v1/engine"): Operation(
        "engines", "Each replica's configuration and state.", answers.EngineList, errors=(401,)
    ),
    ("post", "/tokenize"): Operation(
        "tokenize", "Text or messages to token ids.", answers.Tokens, TokenizeRequest, (400, 401, 404, 413)
    ),
    ("post", "/detokenize"): Operation(
        "detokenize", "Token ids to text.", answers.DetokenizedText, DetokenizeRequest, (400, 401, 404, 413)
    ),
    ("get", "/health"): Operation("health", "This router answers.", answers.Status),
    ("get", "/ready"): Operation("ready", "A replica is admitted.", answers.Status, errors=(503,)),
    ("get", "/version"): Operation("version", "Version of the server.", answers.Version),
    ("get", "/metrics"): Operation("metrics", "Prometheus metrics.", None),
}


def document(card: ModelCard) -> bytes:
    """The document for one served model, JSON."""
    bodies = [(op.body, "validation") for op in OPERATIONS.values() if op.body]
    replies = [(op.answer, "serialization") for op in OPERATIONS.values() if op.answer]
    failures = [(model, "serialization") for model in (answers.ErrorBody, answers.MessagesErrorBody)]
    inputs = [*dict.fromkeys(bodies), *dict.fromkeys(replies), *failures]
    references, shared = models_json_schema(inputs, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(path, operation, references, card)
    schemas = shared["$defs"]
    _fit_to_model(schemas, card)
    return dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "everwarm", "version": package_version(), "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(path: str, operation: Operation, references: Mapping[Any, Any], card: ModelCard) -> dict[str, Any]:
    parameters = list(operation.parameters)
    if "{model}" in path:
        schema = {"type": "string", "enum": list(card.names)}
        parameters.append(_parameter("path", "model", schema, required=True))
    out: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary, "responses": {}}
    if parameters:
        out["parameters"] = parameters
    if 401 in operation.errors:
        out["security"] = [{}, {"key": []}]
    if operation.body is not None:
        content = {"application/json": {"schema": references[(operation.body, "validation")]}}
        out["requestBody"] = {"required": True, "content": content}
    good: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        good = {"application/json": {"schema": references[(operation.answer, "serialization")]}}
    if operation.streams:
        good["text/event-stream"] = {"schema": _EVENT}
    out["responses"]["200"] = {"description": "OK", "content": good}
    body = answers.MessagesErrorBody if path.startswith("/v1/messages") else answers.ErrorBody
    error = {"application/json": {"schema": references[(body, "serialization")]}}
    for status in sorted({*operation.errors, 405}):
        out["responses"][str(status)] = {"description": _MEANINGS[status], "content": error}
    return out


def _fit_to_model(schemas: dict[str, Any], card: ModelCard) -> None:
    """Narrows what depends on the served model: its names, and the ids it has."""
    for schema in schemas.values():
        model = schema.get("properties", {}).get("model")
        if model is not None and "anyOf" in model:
            model["anyOf"] = [{"type": "string", "enum": list(card.names)}, {"type": "null"}]
        _standard_limits(schema, card.vocab_size)


def _standard_limits(node: Any, vocab_size: int) -> None:
    """pydantic writes limits behind a validator under its own names (ge, lt); JSON Schema has others."""
    if isinstance(node, dict):
        if node.get("type") == "integer":
            for ours, theirs in (
                ("ge", "minimum"),
                ("gt", "exclusiveMinimum"),
                ("le", "maximum"),
                ("lt", "exclusiveMaximum"),
            ):
                if ours in node:
                    node[theirs] = node.pop(ours)
            if node.pop("x-token-id", False):
                node["exclusiveMaximum"] = vocab_size
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            _standard_limits(item, vocab_size)
