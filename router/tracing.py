"""OpenTelemetry spans of requests, sent by OTLP over HTTP.

One span per request, a child of the client's ``traceparent`` if it sent one. Inside it, ``wait`` is the time from
placing to the first token and ``generate`` the time from the first to the last. Attributes are those of OpenTelemetry's
semantic conventions for generative AI where these have one. Never prompt or answer text. The SDK's own variables hold:
OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from router.api.run import Plan, Run

OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "resp": "chat", "msg": "chat"}
"""Prefix of a response's id -> gen_ai.operation.name."""


class RequestTrace:
    """One request's span while it runs."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self.run: Run | None = None
        self.failure: str | None = None

    def admitted(self, run: Run) -> None:
        self.run = run

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    @property
    def traceparent(self) -> str:
        """W3C form of this span's context, for whoever works on its behalf."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class Tracing:
    """Makes and sends spans through a provider of its own. ``exporter`` replaces OTLP, for tests."""

    def __init__(self, endpoint: str, model: str, exporter: SpanExporter | None = None) -> None:
        # Imported here: half a second, for those only who trace.
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "everwarm")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("everwarm.router")
        self._model = model

    @contextmanager
    def request(self, prefix: str, plan: Plan, headers: Mapping[str, str]) -> Iterator[RequestTrace]:
        """Spans what happens inside. An exception that leaves marks the span as failed."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS.get(prefix, "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "everwarm",
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": max(prompt.max_tokens for prompt in plan.prompts),
                "gen_ai.request.temperature": plan.sampling.temperature,
                "gen_ai.request.choice.count": plan.n,
            },
        )
        trace = RequestTrace(span)
        clock = time.time() - time.monotonic()
        try:
            yield trace
        except BaseException as error:
            trace.fail(type(error).__name__)
            raise
        finally:
            self._end(span, trace, clock)

    def _end(self, span: Any, trace: RequestTrace, clock: float) -> None:
        """``clock``: seconds that the epoch's clock is ahead of the monotonic one."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        def at(monotonic: float) -> int:
            return int((clock + monotonic) * 1e9)

        if (run := trace.run) is not None:
            usage = run.usage()
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                    "gen_ai.response.finish_reasons": [c.finish_reason or "none" for c in run.choices],
                    "everwarm.replica": sorted({choice.ticket.replica for choice in run.choices}),
                }
            )
            inside = set_span_in_context(span)
            first, last = run.first_token_s, max((c.last_token_s or 0.0 for c in run.choices), default=0.0)
            waited_until = first if first is not None else time.monotonic()
            wait = self._tracer.start_span("wait", inside, start_time=at(run.started_s))
            wait.end(at(waited_until))
            if first is not None:
                self._tracer.start_span("generate", inside, start_time=at(first)).end(at(max(first, last)))
        if trace.failure is not None:
            span.set_status(Status(StatusCode.ERROR, trace.failure))
            span.set_attribute("error.type", trace.failure)
        span.end()

    def close(self) -> None:
        """Sends what is left; blocks for some seconds when nobody takes it."""
        self._provider.shutdown()


@contextmanager
def traced(
    tracing: Tracing | None, prefix: str, plan: Plan, headers: Mapping[str, str]
) -> Iterator[RequestTrace | None]:
    """A span when there is tracing, nothing else."""
    if tracing is None:
        yield None
    else:
        with tracing.request(prefix, plan, headers) as trace:
            yield trace
