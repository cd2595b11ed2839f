"""Routes that generate nothing: models, health, metrics, the cluster's state, tokenization."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import parse_qs

from router.api.call import Call
from router.api.conversation import render
from router.api.errors import ApiError, bad_request
from router.api.generation import check_model, parse
from router.api.metrics import CONTENT_TYPE
from router.api.sampling import check_ids
from router.api.schemas.chat import ChatRequest
from router.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from router.api.tooling import plan_tools

_MAX_TOP = 1000
_ENGINES_TIMEOUT_S = 2.0
"""Of a scrape: a replica in trouble must not cost it the figures of the others."""


def package_version() -> str:
    try:
        return version("everwarm")
    except PackageNotFoundError:
        return "unknown"


async def health(call: Call) -> None:
    """This router process answers."""
    await call.send_json(200, {"status": "ok"})


async def ready(call: Call) -> None:
    """At least one replica is admitted and this router isn't draining."""
    call.services.check_ready()
    await call.send_json(200, {"status": "ready"})


async def get_version(call: Call) -> None:
    await call.send_json(200, {"version": package_version()})


async def metrics(call: Call) -> None:
    try:
        engines = await call.services.backend.engines(_ENGINES_TIMEOUT_S)
    except Exception:
        # A scrape during a replica's trouble must still show this router's own figures.
        engines = []
    await call.send_body(200, call.services.metrics.render(engines), CONTENT_TYPE)


def _model(call: Call, name: str) -> dict[str, Any]:
    card = call.services.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.name,
        "parent": None,
        "max_model_len": call.services.context,
    }


async def models(call: Call) -> None:
    names = call.services.card.names
    await call.send_json(200, {"object": "list", "data": [_model(call, name) for name in names]})


async def model(call: Call) -> None:
    name = call.path.removeprefix("/v1/models/")
    check_model(call, name)
    await call.send_json(200, _model(call, name))


async def directory(call: Call) -> None:
    """Which replica holds which prefix. ``?top=N`` limits the hottest prefixes shown."""
    raw = parse_qs(call.query.decode("latin-1"), keep_blank_values=True).get("top", ["20"])[-1]
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 4 and 1 <= int(raw) <= _MAX_TOP):
        raise bad_request(f"top must be an integer from 1 to {_MAX_TOP}; got {raw[:80]!r}", param="top")
    await call.send_json(200, call.services.backend.directory(int(raw)))


async def engine(call: Call) -> None:
    """Per replica: configuration and kernels in force, page counts, step times."""
    await call.send_json(200, {"object": "list", "data": await call.services.backend.engines()})


async def tokenize(call: Call) -> None:
    request = parse(call, await call.read_object(), TokenizeRequest, {})
    services = call.services
    if request.messages is not None:
        fields = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "tool_choice"}
        given = {name: getattr(request, name) for name in fields}
        chat = ChatRequest.model_construct(messages=request.messages, **given)
        text, special = render(services, chat, plan_tools(services, chat)), bool(request.add_special_tokens)
    else:
        text, special = request.prompt or "", request.add_special_tokens is not False
    ids = await services.encode(text, add_special_tokens=special, param="prompt", bounded=False)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": services.context, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = [services.card.tokenizer.backend.id_to_token(i) or "" for i in ids]
    await call.send_json(200, body)


async def detokenize(call: Call) -> None:
    request = parse(call, await call.read_object(), DetokenizeRequest, {})
    check_ids("tokens", request.tokens, call.services.card.vocab_size)
    tokenizer = call.services.card.tokenizer
    await call.send_json(
        200, {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))}
    )


async def not_served(call: Call, reason: str) -> None:
    raise ApiError(404, f"{call.path} is not served: {reason}", code="route_not_served")
