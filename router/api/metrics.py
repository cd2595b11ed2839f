"""Prometheus metrics of one router, under vLLM's names with our prefix, in a registry of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

ENGINE_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("load.running", "Requests in the engine's batch."),
    "num_requests_waiting": ("waiting", "Requests that are not in the batch: not admitted yet, or preempted."),
    "queued_uncached_tokens": ("load.queued_uncached_tokens", "Tokens still to be prefilled."),
    "kv_cache_free_pages": ("pages.free", "Pages that hold nothing."),
    "kv_cache_evictable_pages": ("pages.cached", "Cached pages that no request uses."),
    "host_cache_pages": ("pages.host.used", "Pages kept in host memory."),
    "host_cache_capacity_pages": ("pages.host.all", "Pages that host memory has room for."),
    "engine_step_p50_ms": ("steps.p50_ms", "Median of recent step times, milliseconds."),
    "engine_step_p99_ms": ("steps.p99_ms", "99th percentile of recent step times, milliseconds."),
}
ENGINE_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_preemptions": ("counters.preemptions", "Requests preempted."),
    "engine_prompt_tokens": ("counters.prompt_tokens", "Tokens prefilled: prompt tokens that were not cached."),
    "engine_generation_tokens": ("counters.generated_tokens", "Tokens sampled for requests."),
    "engine_wasted_tokens": ("counters.wasted_tokens", "Tokens sampled past a request's end."),
    "engine_failed_steps": ("counters.failed_steps", "Steps that raised."),
    "engine_prefix_cache_queries": ("counters.prefix_queries", "Prompt tokens looked up in the page cache."),
    "engine_prefix_cache_hits": ("counters.prefix_hits", "Prompt tokens found in the page cache."),
    "host_cache_saved_pages": ("pages.host.saved", "Pages that went from the device to host memory."),
    "host_cache_restored_pages": ("pages.host.restored", "Pages that came back instead of being recomputed."),
    "host_cache_evicted_pages": ("pages.host.evicted", "Pages that left host memory for want of room."),
    "spec_decode_num_drafts": ("counters.verifications", "Rows that verified drafts."),
    "spec_decode_num_draft_tokens": ("counters.drafted_tokens", "Drafted tokens verified."),
    "spec_decode_num_accepted_tokens": ("counters.accepted_tokens", "Drafted tokens that became output."),
}
"""Metric name -> (path in an element of ``Backend.engines()``, help). A replica that lacks the value has no sample."""
ENGINE_POSITIONS: Mapping[str, tuple[str, str]] = {
    "spec_decode_num_draft_tokens_per_pos": ("speculation.drafted", "Drafted tokens verified, by place in the draft."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "speculation.accepted",
        "Drafted tokens that became output, by place in the draft.",
    ),
}
"""The same where the value is a list: one sample per position."""


class Metrics:
    """What this router saw, plus each replica's gauges at the last scrape."""

    def __init__(self, model: str, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self.router: str | None = None
        """Name in the label ``router`` of what this router counts; None: no such label."""
        labels, registry = ["model_name"], self.registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}:{name}", text, labels, buckets=buckets, registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, labels, registry=registry).labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "Admission to first token.", _TTFT)
        self._e2e = histogram("e2e_request_latency_seconds", "Admission to last token.", _E2E)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_size = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._prompt = counter("prompt_tokens", "Prompt tokens processed.")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens found in the page cache.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the page cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the page cache.")
        self._tokens = _TokenTimes(prefix, model)
        registry.register(self._tokens)
        self._success = Counter(
            f"{prefix}:request_success",
            "Answers by finish reason.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._failures = Counter(
            f"{prefix}:request_errors", "Requests that ended in an error.", ["code"], registry=registry
        )
        self._http = Counter(
            f"{prefix}:http_requests", "HTTP requests.", ["route", "method", "status"], registry=registry
        )
        self.in_flight = Gauge(f"{prefix}:http_requests_in_flight", "Requests being answered.", registry=registry)
        self._disconnects = Counter(
            f"{prefix}:client_disconnects", "Clients gone before their answer ended.", registry=registry
        )
        self._model = model

    def first_tokens(self, count: int, seconds: float, num_prompt: int, num_cached: int) -> None:
        """``count`` tokens that came together, the first of their answer."""
        self._ttft.observe(seconds)
        self._prompt_size.observe(num_prompt)
        self._prompt.inc(num_prompt)
        self._queries.inc(num_prompt)
        self._cached.inc(num_cached)
        self._hits.inc(num_cached)
        self._tokens.generated += count

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` tokens that came together, ``seconds`` after the one before them."""
        times, interval = self._tokens, seconds / count
        times.generated += count
        times.seconds += interval
        times.counts[bisect_left(_ITL, interval)] += 1

    def finished(self, reason: str, seconds: float, num_tokens: int) -> None:
        self._e2e.observe(seconds)
        self._output_size.observe(num_tokens)
        self._success.labels(self._model, reason).inc()

    def failed(self, code: str) -> None:
        self._failures.labels(code).inc()

    def http(self, route: str, method: str, status: int) -> None:
        self._http.labels(route, method, str(status)).inc()

    def disconnected(self) -> None:
        self._disconnects.inc()

    def render(self, engines: Iterable[Mapping[str, Any]]) -> bytes:
        """Prometheus text of this router's own and the replicas' figures."""
        registry = CollectorRegistry()
        registry.register(_Engines(self._prefix, self._model, list(engines)))
        own = self.registry if self.router is None else CollectorRegistry()
        if self.router is not None:
            own.register(_OfRouter(self.registry, self.router))
        return generate_latest(own) + generate_latest(registry)


class _OfRouter(Collector):
    """A registry's samples with the label ``router``: behind one address each scrape meets another router, and without
    it their counters would take turns in one series."""

    def __init__(self, registry: CollectorRegistry, router: str) -> None:
        self._registry, self._router = registry, router

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s._replace(labels={**s.labels, "router": self._router}) for s in metric.samples]
            yield metric


class _TokenTimes(Collector):
    """What is counted per token: plain numbers, since prometheus_client's lock and search its buckets each time."""

    def __init__(self, prefix: str, model: str) -> None:
        self._prefix, self._labels = prefix, [model]
        self.generated = 0
        self.seconds = 0.0
        self.counts = [0] * (len(_ITL) + 1)
        """Intervals by bucket; the last is beyond all of them."""

    def collect(self) -> Iterable[Metric]:
        times = HistogramMetricFamily(
            f"{self._prefix}:inter_token_latency_seconds", "Time between tokens of one stream.", labels=["model_name"]
        )
        limits = [*map(floatToGoString, _ITL), "+Inf"]
        times.add_metric(self._labels, list(zip(limits, accumulate(self.counts), strict=True)), self.seconds)
        yield times
        generated = CounterMetricFamily(f"{self._prefix}:generation_tokens", "Tokens generated.", labels=["model_name"])
        generated.add_metric(self._labels, self.generated)
        yield generated


class _Engines:
    """Replica gauges as one scrape found them."""

    def __init__(self, prefix: str, model: str, engines: list[Mapping[str, Any]]) -> None:
        self._prefix, self._model, self._engines = prefix, model, engines

    def collect(self) -> Iterable[Metric]:
        kinds = ((GaugeMetricFamily, ENGINE_GAUGES), (CounterMetricFamily, ENGINE_COUNTERS))
        for kind, metrics in kinds:
            for name, (path, text) in metrics.items():
                family = kind(f"{self._prefix}:{name}", text, labels=["model_name", "replica"])
                for engine in self._engines:
                    value = _number_at(engine, path)
                    if value is not None:
                        family.add_metric([self._model, str(engine.get("replica", ""))], value)
                yield family
        for name, (path, text) in ENGINE_POSITIONS.items():
            places = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", "replica", "position"])
            for engine in self._engines:
                values = _at(engine, path)
                for position, value in enumerate(values if isinstance(values, list) else []):
                    places.add_metric([self._model, str(engine.get("replica", "")), str(position)], value)
            yield places
        usage = GaugeMetricFamily(
            f"{self._prefix}:kv_cache_usage_perc",
            "Share of the pages that requests hold, 0 to 1.",
            labels=["model_name", "replica"],
        )
        for engine in self._engines:
            held, total = _number_at(engine, "pages.held"), _number_at(engine, "pages.all")
            if held is not None and total:
                usage.add_metric([self._model, str(engine.get("replica", ""))], held / total)
        yield usage


def _number_at(engine: Mapping[str, Any], path: str) -> float | None:
    value = _at(engine, path)
    return float(value) if isinstance(value, int | float) else None


def _at(engine: Mapping[str, Any], path: str) -> Any:
    value: Any = engine
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return value
