"""Spans of requests: what a collector gets, also of failed and abandoned ones, and nothing when tracing is off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from router.api.options import ApiOptions
from router.backend import EngineFault
from router.tracing import Tracing
from tests.router.http_fakes import FakeBackend, asgi_client, make_card, make_tokenizer, saying

TOKENIZER = make_tokenizer()
CARD = make_card(TOKENIZER)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A loopback OTLP collector: its URL and the spans it got, each with its resource's service name."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for resource in message.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                got.extend((names["service.name"], span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def value(v: Any) -> Any:
        kind = v.WhichOneof("value")
        return [value(x) for x in v.array_value.values] if kind == "array_value" else getattr(v, kind)

    return {a.key: value(a.value) for a in span.attributes}


async def test_a_collector_gets_one_span_per_request_with_its_parts(collector: tuple[str, list[Any]]) -> None:
    url, got = collector
    fake = FakeBackend(saying(TOKENIZER, "Paris."), num_cached=3)
    async with asgi_client(fake, CARD, otlp_endpoint=url) as client:
        for body in (CHAT, {**CHAT, "stream": True}):
            response = await client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
            assert response.status_code == 200
        await client._transport.app.drain(1.0)
    assert {name for name, _ in got} == {"everwarm"}
    requests = [span for _, span in got if span.name == "chat tiny"]
    assert len(requests) == 2
    for span in requests:
        assert span.trace_id.hex() == PARENT[3:35] and span.parent_span_id.hex() == PARENT[36:52]
        facts = attributes(span)
        assert facts["gen_ai.operation.name"] == "chat" and facts["gen_ai.request.temperature"] == 0.5
        assert facts["gen_ai.usage.cache_read.input_tokens"] == 3 and facts["gen_ai.usage.output_tokens"] > 1
        assert facts["gen_ai.response.finish_reasons"] == ["stop"] and facts["everwarm.replica"] == ["fake-0"]
        parts = {part.name: part for _, part in got if part.parent_span_id == span.span_id}
        wait, generate = parts["wait"], parts["generate"]
        assert span.start_time_unix_nano <= wait.start_time_unix_nano + 10**7
        assert wait.start_time_unix_nano <= wait.end_time_unix_nano == generate.start_time_unix_nano
        assert generate.end_time_unix_nano <= span.end_time_unix_nano + 10**7
    ours = {span.span_id.hex() for span in requests}
    assert {job.trace[36:52] for job in fake.jobs} == ours, "replicas get our span as the parent of their work"


@pytest.mark.parametrize("streamed", [False, True])
async def test_failures_are_marked(streamed: bool) -> None:
    exporter = InMemorySpanExporter()
    fake = FakeBackend(saying(TOKENIZER, "Paris."), fail_after=1, failure=EngineFault("non-finite logits"))
    async with asgi_client(fake, CARD) as client:
        tracing = client._transport.app.services.tracing = Tracing("", "tiny", exporter)
        await client.post("/v1/chat/completions", json={**CHAT, "stream": streamed})
        tracing.close()
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "chat tiny"]
    assert not span.status.is_ok and span.attributes["error.type"] in ("engine_error", "EngineFault")


async def test_a_client_that_leaves_ends_its_span() -> None:
    exporter = InMemorySpanExporter()
    fake = FakeBackend(saying(TOKENIZER, "Paris. " * 40), delay_s=0.05)
    async with asgi_client(fake, CARD) as client:
        tracing = client._transport.app.services.tracing = Tracing("", "tiny", exporter)
        task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        tracing.close()
    assert [span.name for span in exporter.get_finished_spans()].count("chat tiny") == 1


@pytest.mark.parametrize("wrong", ["collector:4317", "grpc://collector:4317", "http://", ""])
def test_endpoints_that_are_no_http_url_are_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="otlp_endpoint"):
        ApiOptions(otlp_endpoint=wrong)
