"""The routing table, and routes of OpenAI's and vLLM's APIs that aren't served, with the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from router.api import info
from router.api.call import Call
from router.api.chat import chat_completions
from router.api.completions import completions
from router.api.messages import count_tokens, messages
from router.api.responses import responses

Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    handler: Handler
    open: bool = False
    """Needs no API key."""
    generates: bool = False
    """Refused while draining; cancelled when the client leaves."""


ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/health"): Route(info.health, open=True),
    ("GET", "/ready"): Route(info.ready, open=True),
    ("GET", "/version"): Route(info.get_version, open=True),
    ("GET", "/metrics"): Route(info.metrics, open=True),
    ("GET", "/v1/models"): Route(info.models),
    ("GET", "/v1/models/{model}"): Route(info.model),
    ("GET", "/v1/directory"): Route(info.directory),
    ("GET", "/v1/engine"): Route(info.engine),
    ("POST", "/tokenize"): Route(info.tokenize),
    ("POST", "/detokenize"): Route(info.detokenize),
    ("POST", "/v1/chat/completions"): Route(chat_completions, generates=True),
    ("POST", "/v1/completions"): Route(completions, generates=True),
    ("POST", "/v1/responses"): Route(responses, generates=True),
    ("POST", "/v1/messages"): Route(messages, generates=True),
    ("POST", "/v1/messages/count_tokens"): Route(count_tokens),
}

_ONE_MODEL = "this server runs one text-generation model"
NOT_SERVED: dict[str, str] = {
    "/v1/embeddings": f"{_ONE_MODEL}; it has no embedding head",
    "/v1/audio": _ONE_MODEL,
    "/v1/images": _ONE_MODEL,
    "/v1/videos": _ONE_MODEL,
    "/v1/moderations": f"{_ONE_MODEL}; it has no classifier",
    "/v1/rerank": _ONE_MODEL,
    "/v1/score": _ONE_MODEL,
    "/rerank": _ONE_MODEL,
    "/score": _ONE_MODEL,
    "/pooling": _ONE_MODEL,
    "/classify": _ONE_MODEL,
    "/v1/files": "nothing is stored",
    "/v1/uploads": "nothing is stored",
    "/v1/batches": "nothing is stored; send requests concurrently",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/assistants": "nothing is stored",
    "/v1/threads": "nothing is stored",
    "/v1/vector_stores": "nothing is stored",
    "/v1/conversations": "nothing is stored",
    "/v1/realtime": _ONE_MODEL,
    "/v1/responses/input_tokens": "POST /tokenize counts a chat's tokens",
    "/v1/responses/compact": "conversations are not compacted",
    "/v1/responses": "answers are not stored",
    "/v1/messages": "only creation and count_tokens are",
}

_PATHS: dict[str, dict[str, Route]] = {}
for (_method, _path), _route in ROUTES.items():
    _PATHS.setdefault(_path, {})[_method] = _route


def find(path: str) -> tuple[str, dict[str, Route]] | None:
    """(pattern, routes by method) of a path; None when nothing is served there."""
    if path in _PATHS:
        return path, _PATHS[path]
    if path.startswith("/v1/models/") and len(path) > len("/v1/models/"):
        return "/v1/models/{model}", _PATHS["/v1/models/{model}"]
    return None


def reason_not_served(path: str) -> str | None:
    for prefix, reason in NOT_SERVED.items():
        if path == prefix or path.startswith(prefix + "/"):
            return reason
    return None
