"""Write helm/everwarm/dashboards/everwarm.json, the Grafana dashboard of the chart.

python helm/tools/dashboard.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "everwarm" / "dashboards" / "everwarm.json"
SELECT = 'namespace="$namespace",release="$release"'
RATE = "[$__rate_interval]"
HEIGHT, WIDTH = 8, 12


def quantiles(metric: str) -> list[tuple[str, str]]:
    buckets = f"sum by (le) (rate(everwarm:{metric}_bucket{{{SELECT}}}{RATE}))"
    return [(f"histogram_quantile({q / 100}, {buckets})", f"p{q}") for q in (50, 95, 99)]


def total(metric: str, by: str = "", extra: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(everwarm:{metric}_total{{{SELECT}{extra}}}{RATE}))"


def per_replica(metric: str, how: str = "max") -> str:
    """Every router exports what it knows of each replica; they agree but for the moment of the scrape."""
    return f"{how} by (replica) (everwarm:{metric}{{{SELECT}}})"


ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "What clients see",
        [
            ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
            ("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
            ("Whole answer", "s", quantiles("e2e_request_latency_seconds")),
            ("Requests by status", "reqps", [(total("http_requests", "status"), "{{status}}")]),
            ("Errors by code", "reqps", [(total("request_errors", "code"), "{{code}}")]),
            (
                "Requests in flight",
                "short",
                [
                    (f"sum (everwarm:http_requests_in_flight{{{SELECT}}})", "HTTP"),
                    (f"sum (everwarm:live_streams{{{SELECT}}})", "in the cluster"),
                ],
            ),
        ],
    ),
    (
        "Tokens and the shared prefix cache",
        [
            (
                "Tokens per second",
                "short",
                [
                    (total("generation_tokens"), "generated"),
                    (total("prompt_tokens"), "prompt"),
                    (total("prompt_tokens_cached"), "prompt, from the cache"),
                ],
            ),
            (
                "Prefix cache hit rate",
                "percentunit",
                [(f"{total('prefix_cache_hits')} / {total('prefix_cache_queries')}", "hit rate")],
            ),
            ("Pages in the directory", "short", [(per_replica("replica_pages"), "{{replica}}")]),
            ("Directory in sync (1 = proven)", "short", [(per_replica("directory_in_sync", "min"), "{{replica}}")]),
        ],
    ),
    (
        "Replicas",
        [
            ("Running requests", "short", [(per_replica("num_requests_running"), "{{replica}}")]),
            ("Waiting requests", "short", [(per_replica("num_requests_waiting"), "{{replica}}")]),
            ("Predicted queue", "s", [(per_replica("replica_queue_seconds"), "{{replica}}")]),
            ("KV pages in use", "percentunit", [(per_replica("kv_cache_usage_perc"), "{{replica}}")]),
            ("Uncached tokens queued", "short", [(per_replica("queued_uncached_tokens"), "{{replica}}")]),
            (
                "Preemptions per minute",
                "short",
                [(f"60 * max by (replica) (rate(everwarm:num_preemptions_total{{{SELECT}}}{RATE}))", "{{replica}}")],
            ),
            (
                "Admitted replicas",
                "short",
                [(f"max (sum by (pod) (everwarm:replica_admitted{{{SELECT}}}))", "admitted")],
            ),
            ("Connections lost", "short", [(total("connections_lost", "replica"), "{{replica}}")]),
        ],
    ),
]


def panel(number: int, title: str, unit: str, targets: list[tuple[str, str]], x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(targets)
        ],
    }


def variable(name: str, label: str) -> dict[str, Any]:
    select = '{namespace="$namespace"}' if name == "release" else ""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": f"label_values(everwarm:live_streams{select}, {name})",
        "refresh": 2,
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}}
        )
        y += 1
        for index, (name, unit, targets) in enumerate(charts):
            place = (index % 2 * WIDTH, y + index // 2 * HEIGHT)
            panels.append(panel(len(panels) + 1, name, unit, targets, *place))
        y += (len(charts) + 1) // 2 * HEIGHT
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "everwarm",
        "title": "everwarm",
        "tags": ["llm", "ray"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, variable("namespace", "Namespace"), variable("release", "Release")]},
        "panels": panels,
    }


def main(argv: list[str]) -> int:
    new = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in argv:
        stale = not TARGET.exists() or TARGET.read_text() != new
        if stale:
            print(f"{TARGET.name} is out of date: run python helm/tools/dashboard.py", file=sys.stderr)
        return int(stale)
    TARGET.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
