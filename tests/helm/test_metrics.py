"""Dashboard and alerts speak of metrics that the application exports, with labels that it sets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from chart import CHART, one, template, tool
from prometheus_client.parser import text_string_to_metric_families

from router.api.metrics import ENGINE_COUNTERS, ENGINE_GAUGES, Metrics
from router.dispatch import Dispatcher
from router.plane_metrics import PlaneCollector

SELECTED = {"namespace", "release"}
"""Labels that the PodMonitor adds."""
SCRAPED = {"pod", "le"}
"""Labels of Prometheus' own."""


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel, variable and rule."""
    board = json.loads((CHART / "dashboards" / "everwarm.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]
    rules = one(template("4", "--set", "monitoring.prometheusRule.enabled=true"), "PrometheusRule")
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample name -> its labels, as a router that has served one request writes them."""
    metrics = Metrics("m", "everwarm")
    metrics.router = "router-1"
    metrics.registry.register(PlaneCollector(Dispatcher(b"s" * 32)))
    metrics.first_tokens(1, 0.1, 10, 5)
    metrics.tokens(2, 0.01)
    metrics.finished("stop", 1.0, 3)
    metrics.failed("overloaded")
    metrics.http("/v1/chat/completions", "POST", 200)
    metrics.disconnected()
    engine: dict[str, object] = {"replica": "r"}
    for path, _ in [*ENGINE_GAUGES.values(), *ENGINE_COUNTERS.values()]:
        place = engine
        *above, last = path.split(".")
        for step in above:
            place = place.setdefault(step, {})  # type: ignore[assignment]
        place[last] = 1
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render([engine]).decode()):
        # A family of something not there yet (per replica, say) has no sample; its name is promised all the same.
        found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_what_a_router_counts_names_the_router(exported: dict[str, set[str]]) -> None:
    """Behind one Service each scrape meets another router; a replica's own figures are the same from all of them."""
    assert "router" in exported["everwarm:generation_tokens_total"] & exported["everwarm:directory_pages"]
    assert "router" in exported["everwarm:time_to_first_token_seconds_bucket"]
    assert exported["everwarm:num_requests_running"] == {"model_name", "replica"}


def names(expression: str) -> set[str]:
    return set(re.findall(r"everwarm:[a-zA-Z0-9_:]+", expression))


def labels(expression: str) -> set[str]:
    """Labels that are grouped by or selected on."""
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    selected = re.findall(r"([a-z_]+)(?:=~|!=|!~|=)\"", expression)
    return {label.strip() for group in grouped for label in group.split(",")} | set(selected)


def test_there_is_something_to_check() -> None:
    places = [where for where, _ in expressions()]
    assert len(places) > 25 and "EverwarmNoReplica" in places and "Time to first token" in places


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda value: str(value)[:40])
def test_expression_names_what_is_exported(where: str, expression: str, exported: dict[str, set[str]]) -> None:
    used = names(expression)
    assert used, f"{where} reads no metric of ours"
    assert used <= set(exported), f"{where}: {sorted(used - set(exported))} are not exported"
    known = set().union(*(exported[name] for name in used)) | SELECTED | SCRAPED
    # A family without a sample at rest (per-replica ones) shows its labels only in a running cluster.
    if all(exported[name] for name in used):
        assert labels(expression) <= known, f"{where}: {labels(expression) - known}"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_dashboard_is_current() -> None:
    assert tool("dashboard").main(["--check"]) == 0, "run: python helm/tools/dashboard.py"


def test_selected_labels_are_set_by_the_pod_monitor() -> None:
    monitor = one(template("4", "--set", "monitoring.podMonitor.enabled=true"), "PodMonitor")
    endpoints = {endpoint["port"]: endpoint for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert set(endpoints) == {"serve", "metrics", "as-metrics", "dash-metrics"}
    for endpoint in endpoints.values():
        targets = {relabeling.get("targetLabel") for relabeling in endpoint["relabelings"]}
        assert "release" in targets
    assert endpoints["serve"]["path"] == "/metrics"
