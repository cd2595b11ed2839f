"""The ASGI application: routing, keys, CORS, request ids, draining, and the last line of error handling."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from uuid import uuid4

from router.api import routes
from router.api.call import Call
from router.api.errors import ApiError, as_api_error
from router.api.http import ClientGone, Headers, Receive, Scope, Send, request_headers
from router.api.openapi import document
from router.api.options import ApiOptions, KeyRing
from router.api.services import Services
from router.backend import Backend
from router.text.card import ModelCard

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_EXPOSED = b"x-request-id, retry-after, x-should-retry, x-everwarm-ignored-fields"
"""Headers of answers that scripts of other origins may read; browsers hide what isn't listed."""
_access = logging.getLogger("everwarm.access")


class Api:
    """ASGI callable. ``drain`` makes it refuse new work while what runs goes on."""

    behind_serve = False
    """Ray Serve runs this app: it gives every request an ``x-request-id``, and adds it to the answer itself."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._keys = KeyRing(services.options.all_keys())
        self._openapi: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.services.grammars.close)
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new generation with 503 from now on; True once nothing runs, False if that takes too long."""
        services = self.services
        services.draining = True
        deadline = time.monotonic() + timeout_s
        while services.in_flight and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if services.tracing is not None:
            await asyncio.to_thread(services.tracing.close)
        return services.in_flight == 0

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = request_headers(scope)
        path = scope["path"]
        root = scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :] or "/"
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        query = scope.get("query_string", b"")
        call = Call(self.services, scope["method"], path, query, headers, receive, send, request_id)
        call.own_request_id = request_id != given
        if self.behind_serve:
            call.echoed_id, made_by_serve = _id_of_serve(scope["headers"])
            call.own_request_id |= made_by_serve
        call.extra_headers = self._cors(headers)
        started = time.monotonic()
        pattern = "other"
        try:
            pattern = await self._answer(call)
        except ClientGone:
            self.services.metrics.disconnected()
        except asyncio.CancelledError:
            if not call.gone:
                raise
            self.services.metrics.disconnected()
        except Exception as error:
            await self._fail(call, as_api_error(error, call.request_id))
        finally:
            call.stop_watching()
            found = routes.find(path)
            pattern = found[0] if found else pattern
            method = call.method if call.method in _METHODS else "other"
            self.services.metrics.http(pattern, method, call.status or 499)
            if self.services.options.log_requests:
                millis = 1e3 * (time.monotonic() - started)
                _access.info("%s %s %s %d %.1f ms", call.request_id, method, pattern, call.status or 499, millis)

    async def _fail(self, call: Call, error: ApiError) -> None:
        if call.status is not None:
            # Half an answer is out; closing the connection is the only honest end left.
            raise error
        self.services.metrics.failed(error.code or "error")
        await call.error(error)

    async def _answer(self, call: Call) -> str:
        if call.method == "OPTIONS" and "access-control-request-method" in call.headers:
            await self._preflight(call)
            return "preflight"
        if call.path == "/openapi.json" and call.method in ("GET", "HEAD"):
            if self._openapi is None:
                self._openapi = document(self.services.card)
            await call.send_body(200, self._openapi)
            return "/openapi.json"
        found = routes.find(call.path)
        if found is None:
            reason = routes.reason_not_served(call.path)
            if reason is not None:
                raise ApiError(404, f"{call.path[:200]} is not served: {reason}", code="route_not_served")
            raise ApiError(404, f"there is no {call.path[:200]}; /openapi.json lists what is served", code="not_found")
        pattern, methods = found
        route = methods.get("GET" if call.method == "HEAD" else call.method)
        if route is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            raise ApiError(
                405,
                f"{pattern} takes {allowed}; got {call.method[:20]}",
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        if not route.open:
            self._authenticate(call)
        if route.generates:
            await self._generate(call, route)
        else:
            await route.handler(call)
        return pattern

    async def _generate(self, call: Call, route: routes.Route) -> None:
        services = self.services
        services.check_open()
        services.in_flight += 1
        services.metrics.in_flight.inc()
        try:
            await route.handler(call)
        finally:
            services.in_flight -= 1
            services.metrics.in_flight.dec()

    def _authenticate(self, call: Call) -> None:
        if not self._keys:
            return
        scheme, _, token = call.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else call.headers.get("x-api-key", "")
        salt = self._keys.salt(key) if key else None
        if salt is None:
            what = "the API key is not known" if key else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        call.salt = salt

    def _cors(self, headers: Mapping[str, str]) -> Headers:
        origins, origin = self.services.options.cors_origins, headers.get("origin")
        if not origins or origin is None:
            return []
        exposed = (b"access-control-expose-headers", _EXPOSED)
        if "*" in origins:
            return [(b"access-control-allow-origin", b"*"), exposed]
        allowed = [(b"vary", b"origin")]
        if origin in origins:
            allowed += [(b"access-control-allow-origin", origin.encode("latin-1")), exposed]
        return allowed

    async def _preflight(self, call: Call) -> None:
        asked = call.headers.get("access-control-request-headers", "authorization, content-type")
        headers = {
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": asked,
            "access-control-max-age": "600",
        }
        await call.send_body(204 if self.services.options.cors_origins else 403, b"", headers=headers)


def _id_of_serve(headers: Headers) -> tuple[str | None, bool]:
    """The ``x-request-id`` that Serve adds to the answer, and whether it made it because the client sent none: then it
    is a UUID behind all other headers."""
    ids = [value for name, value in headers if name == b"x-request-id"]
    if not ids:
        return None, False
    made = len(ids) == 1 and headers[-1][0] == b"x-request-id" and _UUID.fullmatch(ids[0]) is not None
    return ids[0].decode("latin-1"), made


def create_app(backend: Backend, model: ModelCard, options: ApiOptions | None = None) -> Api:
    """The HTTP surface over ``backend``. Raises OSError or ValueError for an unusable key file, TemplateRefusal for
    an unusable chat template."""
    return Api(Services.build(backend, model, options or ApiOptions()))
