"""What chat and text completions share: opening a request, planning it, streaming or collecting its answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from router.api import sse
from router.api.call import Call
from router.api.errors import ApiError, as_api_error, bad_request, from_validation
from router.api.keep_alive import kept_alive
from router.api.options import narrowed_salt
from router.api.refused import Unserved, check_unserved, ignored_header
from router.api.run import Choice, Plan, Prompt, Run, Usage
from router.api.sampling import build_sampling, check_common, text_options
from router.api.schemas.chat import ChatRequest
from router.api.schemas.common import GenerationRequest, Request
from router.text.output import Piece
from router.tracing import RequestTrace, traced

R = TypeVar("R", bound=Request)
G = TypeVar("G", bound=GenerationRequest)
_MAX_TIMEOUT_S = 86_400.0


def parse(call: Call, body: Mapping[str, Any], model: type[R], table: Mapping[str, Unserved]) -> R:
    """Validates a body. Order: shape, then the model's name, then fields that aren't served."""
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from None
    check_model(call, getattr(request, "model", None))
    check_unserved(body, table)
    ignored = ignored_header(body, request, table)
    if ignored is not None:
        call.extra_headers.append((b"x-everwarm-ignored-fields", ignored.encode()))
    return request


def check_model(call: Call, name: str | None) -> None:
    names = call.services.card.names
    if name is not None and name not in names:
        served = ", ".join(names)
        raise ApiError(
            404, f"the model {name[:200]!r} does not exist; served: {served}", param="model", code="model_not_found"
        )


async def open_request(call: Call, model: type[G], table: Mapping[str, Unserved]) -> G:
    request = parse(call, await call.read_object(), model, table)
    check_common(request)
    if request.request_id is not None:
        call.use_request_id(request.request_id)
    return request


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Another route's request in chat's terms; what chat refuses is the client's fault under chat's names."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from None


@dataclass(frozen=True)
class Options:
    """How the answer is sent."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    ids_as_names: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> Options:
        stream = request.stream_options
        return cls(
            bool(request.stream),
            bool(stream and stream.include_usage),
            bool(stream and stream.continuous_usage_stats),
            bool(request.return_tokens_as_token_ids),
        )


def check_choices(call: Call, request: GenerationRequest, num_prompts: int) -> None:
    """Raises a 400 for more answers than one request may have. Before a million prompts are tokenized."""
    n, limit = request.n or 1, call.services.options.max_choices
    if n * num_prompts > limit:
        raise bad_request(
            f"{num_prompts} prompts times n = {n} are {n * num_prompts} answers; at most {limit} are allowed", param="n"
        )


def make_plan(
    call: Call,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: tuple[str, str] | None = None,
) -> Plan:
    """``prompt_logprobs``: what the route itself needs (echo), beside what the client asked for.
    ``grammar``: compiled."""
    services = call.services
    check_choices(call, request, len(prompts))
    asked = [value for value in (request.prompt_logprobs, prompt_logprobs) if value is not None]
    sampling = build_sampling(request, services.card, logprobs=logprobs, prompt_logprobs=max(asked) if asked else None)
    return Plan(
        prompts,
        request.n or 1,
        replace(sampling, grammar=grammar),
        text_options(request, services.card, sampling),
        narrowed_salt(call.salt, request.cache_salt),
        request.priority or 0,
        _deadline(call),
        _seconds(call, "x-ttft-slo-ms", 1000.0),
        call.headers.get("traceparent"),
    )


def _deadline(call: Call) -> float | None:
    own = _seconds(call, "x-request-timeout", 1.0)
    limits = [value for value in (own, call.services.options.request_timeout_s) if value is not None]
    return min(limits) if limits else None


def _seconds(call: Call, header: str, per_second: float) -> float | None:
    raw = call.headers.get(header)
    if raw is None:
        return None
    try:
        value = 0.0 if "_" in raw else float(raw) / per_second  # Python would read 1_0 as 10
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX_TIMEOUT_S:
        unit = "milliseconds" if per_second != 1 else "seconds"
        most = int(_MAX_TIMEOUT_S * per_second)
        raise bad_request(f"{header} must be {unit} above 0 and at most {most}; got {raw[:80]!r}", param=header)
    return value


class Answering(ABC):
    """One route's way of putting pieces into JSON. ``begin`` comes first, once the request is admitted."""

    sign_of_life: bytes = sse.COMMENT
    """What is sent when there is nothing to say for long."""

    def __init__(self, call: Call, options: Options) -> None:
        self.call = call
        self.options = options
        self.response_id = ""
        self.created = 0

    def begin(self, response_id: str, created: int) -> None:
        self.response_id, self.created = response_id, created

    @abstractmethod
    def chunk(self, choice: Choice, piece: Piece, run: Run) -> bytes:
        """A piece as events; b"" when there is nothing to say yet."""

    @abstractmethod
    def closing(self, run: Run) -> bytes:
        """The events that end a stream whose answers are complete."""

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream that failed."""
        return sse.error_event(error)

    @abstractmethod
    def add(self, choice: Choice, piece: Piece) -> None: ...

    @abstractmethod
    def whole(self, run: Run) -> dict[str, Any]: ...


class ChunkedAnswering(Answering):
    """OpenAI's chunk format, which chat and text completions share."""

    kind: str
    stream_kind: str
    chunks: sse.Chunks

    def begin(self, response_id: str, created: int) -> None:
        super().begin(response_id, created)
        model, usage = self.call.services.card.name, self.options.include_usage
        self.chunks = sse.Chunks(self.stream_kind, response_id, created, model, usage_field=usage)

    def closing(self, run: Run) -> bytes:
        return (self.chunks.usage(self.usage(run)) if self.options.include_usage else b"") + sse.DONE

    def base(self) -> dict[str, Any]:
        model = self.call.services.card.name
        return {"id": self.response_id, "object": self.kind, "created": self.created, "model": model}

    def usage_of(self, run: Run) -> Usage:
        return run.usage()

    def usage(self, run: Run) -> dict[str, object]:
        return self.usage_of(run).as_dict()


async def serve(call: Call, plan: Plan, answering: Answering, prefix: str) -> None:
    """Admits the plan, then streams or collects. Nothing is sent before admission."""
    services = call.services
    with traced(services.tracing, prefix, plan, call.headers) as trace:
        if trace is not None:
            plan = replace(plan, trace=trace.traceparent)
        run = await Run.admit(services.backend, services.card.tokenizer, plan, services.metrics, prefix)
        if trace is not None:
            trace.admitted(run)
        answering.begin(f"{prefix}-{call.request_id}", int(time.time()))
        try:
            if answering.options.stream:
                await _stream(call, run, answering, trace)
            else:
                async with run.within_deadline():
                    async for choice, piece in run.pieces():
                        answering.add(choice, piece)
                await call.send_json(200, answering.whole(run))
        finally:
            run.close()


async def _stream(call: Call, run: Run, answering: Answering, trace: RequestTrace | None) -> None:
    await call.start_events()
    try:
        async with run.within_deadline():
            with kept_alive(call, answering.sign_of_life, call.services.options.sse_keepalive_s):
                await run.send(answering.chunk, call.event)
        await call.end_events(answering.closing(run))
    except Exception as error:
        failure = as_api_error(error, call.request_id)
        call.services.metrics.failed(failure.code or "error")
        if trace is not None:
            trace.fail(failure.code or "error")
        await call.end_events(answering.failure(failure))
