"""How many replicas: the policy alone, its options, and a cluster that grows under load and shrinks after it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from cluster import autoscale
from cluster.config import AppConfig

GROW = Path(__file__).with_name("grow_and_shrink.py")


def info(*, held: int = 0, requests: int = 0, queued: int = 0, a: float = 0.5) -> dict:
    return {
        "requests": requests,
        "load": {"queued_uncached_tokens": queued, "coefficients": [a, 0.0, 2.0, 0.0, 0.1]},
        "pages": {"held": held, "all": 1000},
        "config": {"max_batch_size": 64},
    }


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (info(), 0.0),
        (info(held=700), 1.0),
        (info(held=350, requests=48), 0.75 / 0.7),
        (info(queued=4000), 2.0 / 0.7),
        (info(queued=4000, a=0.0), 0.0),
    ],
)
def test_load_is_the_scarcest_thing_over_the_target(state: dict, expected: float) -> None:
    assert autoscale.load(state, 0.7) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loads", "current", "expected"),
    [
        ([0.0], 1, 1),
        ([1.0], 1, 1),
        ([1.01], 1, 2),
        ([3.2], 1, 4),
        ([1.5, 0.5], 2, 2),
        ([2.0, 1.5], 2, 4),
        ([0.3, 0.3], 2, 1),
        ([0.45, 0.45], 2, 2),
        ([0.0] * 5, 5, 4),
        ([1.2], 3, 4),
    ],
)
def test_wanted(loads: list[float], current: int, expected: int) -> None:
    assert autoscale.wanted(loads, current) == expected


def test_stays_put_until_somebody_reports() -> None:
    context = SimpleNamespace(aggregated_metrics=None, current_num_replicas=2, target_num_replicas=3)
    assert autoscale.decide(context) == (3, {})
    context.aggregated_metrics = {"load": {"a": 2.0, "b": 1.0}}
    assert autoscale.decide(context) == (3, {})
    context.aggregated_metrics = {"load": {"a": 2.0, "b": 2.0}}
    assert autoscale.decide(context) == (4, {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": 5, "max_replicas": 4}, "replicas = 5 must lie between min_replicas = 5 and max_replicas = 4"),
        ({"replicas": 2, "min_replicas": 3, "max_replicas": 4}, "replicas = 2 must lie between min_replicas = 3"),
        ({"min_replicas": 1}, "min_replicas has no effect without max_replicas"),
        ({"target_usage": 0.5}, "target_usage has no effect without max_replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"max_replicas": 2, "target_usage": 0}, "target_usage"),
    ],
)
def test_impossible_bounds_are_refused_by_name(options: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        AppConfig.model_validate(options)


@pytest.mark.slow
def test_grows_under_load_and_shrinks_after_it() -> None:
    """In a process of its own: Serve reads how often replicas report when it is imported."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOME": home, "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}
        done = subprocess.run([sys.executable, GROW], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "1 -> 3 -> 1" in done.stdout
