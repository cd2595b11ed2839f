"""``speculative_model``: a checkpoint of the same tokenizer drafts for the served one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny_llama

from cluster.bench.stub import open_stub
from cluster.build import open_runner
from cluster.checkpoint import UnknownModel, default_gguf, locate
from replica.config import EngineConfig
from replica.llm import LLM
from router.wire import Sampling

PROMPTS = [[65 + i, *range(66, 100)] for i in range(3)]
ASKED = [Sampling(temperature=0, max_tokens=24), Sampling(temperature=0.7, seed=3, max_tokens=24)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return write_tiny_llama(root / "served", seed=0), write_tiny_llama(root / "twin", seed=0)


def generate(served: Path, **options: object) -> tuple[list[list[int]], dict]:
    config = EngineConfig(threads=1, device="cpu", cpu_kv_gb=0.01, **options)
    resolved, runner = open_runner(locate(str(served), weights=True), config)
    with LLM(resolved, runner) as llm:
        return [out.ids for sampling in ASKED for out in llm.generate(PROMPTS, sampling)], llm.engine.info()


def test_it_drafts_and_takes_its_share_of_the_memory(folders: tuple[Path, Path]) -> None:
    served, twin = folders
    expected, plain = generate(served)
    got, info = generate(served, speculative="draft", speculative_model=str(twin))
    assert got == expected
    assert info["counters"]["accepted_tokens"] == info["counters"]["drafted_tokens"] > 20
    assert info["runner"]["draft"]["kv_bytes"] == info["runner"]["kv_bytes"]
    assert info["config"]["num_pages"] == plain["config"]["num_pages"] // 2


def test_another_tokenizer_is_refused(folders: tuple[Path, Path]) -> None:
    try:
        other = default_gguf()
    except UnknownModel:
        pytest.skip("the embedded model is not installed")
    with pytest.raises(ValueError, match=r"speculative_model: .* has another tokenizer: id 0 is"):
        generate(folders[0], speculative="draft", speculative_model=str(other))


def test_what_is_not_there_is_named(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UnknownModel, match="no-such-model"):
        generate(folders[0], speculative="draft", speculative_model="/no-such-model")
    with pytest.raises(ValueError, match="the stub has none"):
        open_stub(locate("stub:1ms", weights=True), EngineConfig(speculative="draft", speculative_layers=1))


def test_the_stub_refuses_what_it_can_not_give() -> None:
    """Log-probabilities of a prompt it never read, which the router would wait for; and serves the rest."""
    with LLM(*open_stub(locate("stub:1ms", weights=True), EngineConfig())) as llm:
        asked = [Sampling(max_tokens=3, logprobs=1), Sampling(max_tokens=3, prompt_logprobs=0), Sampling(max_tokens=3)]
        refused, also, served = llm.generate([[5, 6, 7]] * 3, asked)
    assert refused.finish == also.finish == "refused" and "no log-probabilities" in (refused.error or "")
    assert served.finish == "length" and len(served.ids) == 3
