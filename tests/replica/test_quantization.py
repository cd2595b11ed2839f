"""W8A8 through the whole engine: the three equalities hold, faults stay with their row, and it is refused elsewhere."""

from __future__ import annotations

import pytest
from runner_driver import make_config, make_runner, prompts

from replica.config import DeviceFacts, EngineConfig, ModelFacts, resolve
from replica.llm import LLM
from router.wire import Sampling

LENGTHS = (5, 17, 33, 48, 64, 90, 33)


def generate(*, together: bool = True, **options: object) -> list[list[int]]:
    options = {"quantization": "w8a8", **options}
    asked = prompts(LENGTHS)
    asked[-1] = asked[2]
    sampling = [Sampling(temperature=float(i % 2), seed=i, max_tokens=20) for i in range(len(asked))]
    with LLM(make_config(**options), make_runner(**options)) as llm:
        groups = (
            [list(zip(asked, sampling, strict=True))] if together else [[p] for p in zip(asked, sampling, strict=True)]
        )
        found = [out for g in groups for out in llm.generate([p for p, _ in g], [s for _, s in g])]
        llm.engine.check_invariants()
    assert all(out.error is None for out in found)
    return [out.ids for out in found]


def test_alone_in_a_crowd_cached_or_not_and_preempted() -> None:
    reference = generate(together=False, prefix_caching=False)
    assert generate() == reference
    assert generate(prefix_caching=False, chunk_size=16, max_batch_size=8) == reference
    assert generate(max_num_pages=12, max_model_len=128, watermark=0.0) == reference
    assert generate(quantization="none") != reference, "it changes the arithmetic, so this must show"


def test_what_it_reports() -> None:
    plain, ours = (make_runner(quantization=value) for value in ("none", "w8a8"))
    described, before = ours.describe(), plain.describe()
    plain.close()
    ours.close()
    assert described["quantization"] == "w8a8" and described["kernels"]["norm_mlp"].startswith("w8a8")
    assert described["weight_bytes"] < 0.7 * before["weight_bytes"]


@pytest.mark.parametrize(
    ("options", "device"),
    [({"dtype": "bfloat16"}, DeviceFacts("cpu")), ({}, DeviceFacts("cuda", memory_bytes=80 << 30))],
)
def test_it_is_refused_where_it_is_not_written_for(options: dict[str, str], device: DeviceFacts) -> None:
    with pytest.raises(ValueError, match="quantization: w8a8 runs on a CPU in float32"):
        resolve(EngineConfig(quantization="w8a8", **options), ModelFacts(4096, 2, 2, 16), device)  # type: ignore[arg-type]
