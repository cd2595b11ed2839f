"""What the chart derives from the application stays in step with it."""

from __future__ import annotations

import json

import pytest
from chart import CHART, EXAMPLES, example, serve_config, tool
from ray.serve.schema import ServeDeploySchema

from cluster.config import AppConfig

NAMES = [path.name.removesuffix("-values.yaml") for path in EXAMPLES]


def test_schema_lists_exactly_the_applications_options() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    block = schema["properties"]["app"]
    assert set(block["properties"]) == set(AppConfig.model_fields)
    assert tool("sync_schema").main(["--check"]) == 0, "run: python helm/tools/sync_schema.py"


def test_readme_is_current() -> None:
    assert tool("readme").main(["--check"]) == 0, "run: python helm/tools/readme.py"


@pytest.mark.parametrize("name", NAMES)
def test_serve_config_parses(name: str) -> None:
    """With Ray's own schema, and its args with the application's."""
    config = serve_config(example(name))
    parsed = ServeDeploySchema.model_validate(config)
    (application,) = parsed.applications
    assert application.import_path == "cluster:app"
    options = AppConfig.model_validate(application.args)
    values = {key: value for key, value in application.args.items() if key in ("replicas", "routers", "device")}
    assert {key: getattr(options, key) for key in values} == values


def test_embedded_model_is_not_named() -> None:
    assert AppConfig.model_validate(serve_config(example("cpu-demo"))["applications"][0]["args"]).model is None
