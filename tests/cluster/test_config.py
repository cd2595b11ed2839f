"""AppConfig: what an operator types is honoured or refused."""

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from cluster.build import open_router
from cluster.config import AppConfig
from cluster.launch import Unusable, parse_options
from replica.config import EngineConfig
from router.api import ApiOptions
from router.dispatch import DispatchOptions


def test_every_engine_option_is_an_app_option_with_the_same_default() -> None:
    config = AppConfig()
    assert config.engine() == EngineConfig()
    assert set(EngineConfig.model_fields) < set(AppConfig.model_fields)


def test_text_from_the_command_line_becomes_typed_values() -> None:
    pairs = "replicas=3 page_size=64 prefix_caching=false max_num_pages=128 threads=auto fused_qkv=true model=none"
    config = parse_options(pairs.split())
    assert (config.replicas, config.page_size, config.prefix_caching) == (3, 64, False)
    assert (config.max_num_pages, config.threads, config.fused_qkv, config.model) == (128, "auto", "true", None)


@pytest.mark.parametrize("text", ["a-1,b", " a-1 , b ,", '["a-1", "b"]', ' ["a-1","b"]'])
def test_lists_are_comma_separated_text_or_json(text: str) -> None:
    assert parse_options([f"api_keys={text}"]).api_keys == ("a-1", "b")


@pytest.mark.parametrize("text", ['["a",', "[a]", '["a", 1]'])
def test_what_begins_like_a_json_list_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(Unusable, match="api_keys") as caught:
        parse_options([f"api_keys={text}"])
    assert '"a"' not in str(caught.value), "keys stay out of logs"


def test_yaml_booleans_reach_switches() -> None:
    assert AppConfig.model_validate({"fused_silu": False}).fused_silu == "false"


@pytest.mark.parametrize(("typo", "meant"), [("modle", "model"), ("replica", "replicas"), ("pagesize", "page_size")])
def test_unknown_option_names_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(Unusable, match=rf"unknown option '{typo}'; did you mean '{meant}'\?"):
        parse_options([f"{typo}=1"])


def test_an_option_like_nothing_lists_what_exists() -> None:
    with pytest.raises(Unusable, match=r"valid options: .*replicas"):
        parse_options(["qqqqqqq=1"])


@pytest.mark.parametrize(
    "pair",
    [
        "replicas=0",
        "replicas=x",
        "page_size=17",
        "gpu_memory_utilization=2",
        "scheduler=fifo",
        "replica_cpus=-1",
        "ageing_s=inf",
        "cpu_kv_gb=1e400",
        "replica_gpus=nan",
        "request_timeout_s=inf",
    ],
)
def test_bad_values_name_their_option(pair: str) -> None:
    with pytest.raises(Unusable, match=pair.partition("=")[0]):
        parse_options([pair])


def test_a_bare_word_is_refused() -> None:
    with pytest.raises(Unusable, match="key=value"):
        parse_options(["replicas"])


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError):
        AppConfig().replicas = 4  # type: ignore[misc]


@pytest.mark.parametrize("module", ["cluster", "cluster.cli", "cluster.config", "cluster.build"])
def test_importing_the_outside_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_metric_prefix_names_every_metric() -> None:
    options = ApiOptions(metric_prefix="vllm")
    _, api = open_router("stub:1ms", None, options, DispatchOptions(), "0" * 32, "router")
    names = {family.name for family in text_string_to_metric_families(api.services.metrics.render([]).decode())}
    assert len(names) > 30 and all(name.startswith("vllm:") for name in names), names


LOGS = """
import io, logging
from cluster.build import build_app
from cluster.config import AppConfig
names = ("everwarm.access", "router.link", "replica.loop")
for level in ("debug", "info", "error"):
    stream = io.StringIO()
    serves = logging.StreamHandler(stream)
    serves.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    router = build_app(AppConfig(model="stub:1ms", replicas=1, log_level=level))._bound_deployment
    logging.getLogger("ray.serve").handlers = [serves]
    replicas, make_router, *_ = router.init_args
    make_router("r")
    replicas._bound_deployment.init_args[0]("e")
    for name in names:
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(severity, "said")
    said = stream.getvalue()
    print(level, said.count(" said"), "INFO replica.config max_model_len = " in said)
"""


def test_log_level_decides_what_routers_and_replicas_say_in_serves_log() -> None:
    result = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["debug 9 True", "info 6 True", "error 0 False"], "True: how autos came out"
