"""Errors in OpenAI's shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from router.backend import BackendError, Overloaded, Refused, Unavailable

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_log = logging.getLogger("everwarm.api")
_SHOWN = 80
"""Characters of an offending value that a message repeats."""


class ApiError(Exception):
    """Ends a request with an HTTP error, or its stream with an error event."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, default)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()


def messages_body(error: ApiError) -> bytes:
    """The error in Anthropic's shape."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = {"type": "overloaded_error" if error.status == 503 else kind, "message": error.message}
    return json.dumps({"type": "error", "error": detail}, ensure_ascii=False).encode()


@contextmanager
def spoken_as(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused inside is refused under the client's ``names`` of fields, given by the names used here."""
    try:
        yield
    except ApiError as error:
        for ours, theirs in names.items():
            if error.param is not None and (error.param == ours or error.param.startswith(f"{ours}.")):
                message = re.sub(rf"(?<![\w.]){re.escape(ours)}(?=[:. ])", theirs, error.message)
                param = theirs + error.param.removeprefix(ours)
                raise ApiError(error.status, message, param=param, code=error.code, headers=error.headers) from None
        raise


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """A client's value as an error message repeats it: JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def from_backend(error: BackendError) -> ApiError:
    """HTTP status and headers of what the cluster raised."""
    if isinstance(error, Refused):
        return ApiError(400, error.message, param=error.param, code="request_refused")
    if isinstance(error, Overloaded | Unavailable):
        code, param = ("overloaded", error.param) if isinstance(error, Overloaded) else ("unavailable", None)
        return ApiError(error.status, error.message, param=param, code=code, headers=retry_after(error.retry_after_s))
    if error.status == 408:
        return deadline_passed(error.message)
    return ApiError(error.status, error.message, code="engine_error")


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Whatever ended a request, as the client may see it. What nobody foresaw is logged, and told without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BackendError):
        return from_backend(error)
    _log.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500, f"internal error; the server's log has more under request id {request_id}", code="internal_error"
    )


def retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def deadline_passed(message: str) -> ApiError:
    # Clients of OpenAI's family retry a 408 by themselves; the second try would meet the same deadline.
    return ApiError(408, message, code="deadline_exceeded", headers={"x-should-retry": "false"})


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """Names the first bad field, its value and what is allowed; alternatives of a union are joined by "or"."""
    details = error.errors(include_url=False, include_context=False)
    # A union reports every branch; the one that got deepest into the data is what the client meant, and of equally deep
    # ones that whose type the data has.
    others = {detail["loc"][:-1] for detail in details if _is_other_type(detail)}

    def rank(detail: ErrorDetails) -> tuple[int, int, bool]:
        where, is_other = detail["loc"], _is_other_type(detail)
        inside = sum(where[:length] in others for length in range(len(where))) - is_other
        return len(_located(body, detail)[0]), -inside, not is_other

    best = max(map(rank, details))
    meant = [detail for detail in details if rank(detail) == best]
    path, value = _located(body, meant[0])
    reasons = dict.fromkeys(
        detail["msg"].removeprefix("Value error, ") for detail in meant if _located(body, detail)[0] == path
    )
    param = ".".join(map(str, path)) or None
    reason = " or ".join(text[0].lower() + text[1:] for text in reasons)
    missing = reason == "field required"
    got = "" if missing else f"; got {shown(value)}"
    name = param or "request body"
    return bad_request(
        f"{name}: {reason}{got}", param=param, code="missing_required_parameter" if missing else "invalid_value"
    )


def _is_other_type(detail: ErrorDetails) -> bool:
    return detail["type"] in ("literal_error", "missing") and detail["loc"][-1] == "type"


def _located(body: Any, detail: ErrorDetails) -> tuple[tuple[int | str, ...], Any]:
    """The part of a pydantic location that exists in the body (union labels don't), and the value there.

    A missing field's own name, the last of its location, is kept.
    """
    path: list[int | str] = []
    value = body
    for index, step in enumerate(detail["loc"]):
        if _has(value, step):
            value = value[step]
        elif detail["type"] == "missing" and index == len(detail["loc"]) - 1:
            value = None
        else:
            continue
        path.append(step)
    return tuple(path), value


def _has(value: Any, step: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and 0 <= step < len(value)
    return isinstance(value, dict) and step in value
