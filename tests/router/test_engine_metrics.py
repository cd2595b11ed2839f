"""What replicas report, as Prometheus samples."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.api.metrics import Metrics


def test_speculation_by_replica_and_place_in_the_draft() -> None:
    counters = {"verifications": 4, "drafted_tokens": 9, "accepted_tokens": 5}
    engines = [
        {"replica": "a", "counters": counters, "speculation": {"drafted": [4, 3, 2], "accepted": [3, 1, 1]}},
        {"replica": "b", "counters": {}, "speculation": None},
    ]
    found = {}
    for family in text_string_to_metric_families(Metrics("m", "everwarm").render(engines).decode()):
        for sample in family.samples:
            if "spec_decode" in sample.name:
                found[sample.name, sample.labels["replica"], sample.labels.get("position")] = sample.value
    name = "everwarm:spec_decode_num_"
    assert found == {
        (f"{name}drafts_total", "a", None): 4,
        (f"{name}draft_tokens_total", "a", None): 9,
        (f"{name}accepted_tokens_total", "a", None): 5,
        **{(f"{name}draft_tokens_per_pos_total", "a", str(i)): n for i, n in enumerate((4, 3, 2))},
        **{(f"{name}accepted_tokens_per_pos_total", "a", str(i)): n for i, n in enumerate((3, 1, 1))},
    }


def test_tokens_that_come_together_count_each() -> None:
    metrics = Metrics("m", "everwarm")
    metrics.first_tokens(3, 0.1, 10, 0)
    metrics.tokens(2, 0.05)
    assert 'everwarm:generation_tokens_total{model_name="m"} 5.0' in metrics.render([]).decode()
