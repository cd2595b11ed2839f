"""The stub engine behind ``model=stub:10ms``: paced, free of arithmetic, with readable text. For benches only."""

from __future__ import annotations

from cluster.checkpoint import Checkpoint, load_card
from replica.batch import Batch, OwnFault, Row, StepResult
from replica.config import DeviceFacts, EngineConfig, ModelFacts, ResolvedConfig, resolve
from replica.stub import StubRunner

NUM_PAGES = 16384
NO_SCORES = OwnFault("the stub engine has no log-probabilities")


def _wants_scores(row: Row) -> bool:
    return row.sampling.logprobs is not None or row.sampling.prompt_logprobs is not None


class ReadableStub(StubRunner):
    """A StubRunner without fake KV whose output is words of the tokenizer."""

    def __init__(self, ids: list[int], *, vocab_size: int, max_model_len: int, page_size: int, step_ms: float) -> None:
        super().__init__(
            num_pages=NUM_PAGES,
            page_size=page_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            step_ms=step_ms,
            content=False,
        )
        self._ids = ids

    def _execute(self, batch: Batch) -> StepResult:
        """Ids whose text is whole printable ASCII, so one event per token, none held back; a function of seed and
        position, at next to no cost, since what a bench counts is everything around the engine."""
        ids, size = self._ids, len(self._ids)
        return StepResult(
            [
                [ids[(row.sampling.seed + 7919 * row.position_base) % size]]
                if row.num_samples == 1
                else self._several(row)
                for row in batch.rows
            ],
            faults={index: NO_SCORES for index, row in enumerate(batch.rows) if row.new and _wants_scores(row)},
        )

    def _several(self, row: Row) -> list[int]:
        ids, size = self._ids, len(self._ids)
        drawn = [ids[(row.sampling.seed + 7919 * (row.position_base + i)) % size] for i in range(row.num_samples)]
        return drawn[: row.num_kept(drawn)] if drawn else drawn


def open_stub(checkpoint: Checkpoint, config: EngineConfig) -> tuple[ResolvedConfig, ReadableStub]:
    """A runner paced at ``checkpoint.step_ms`` per step, with the default model's vocabulary. Raises ValueError for
    options that need a model."""
    if config.speculative == "draft":
        raise ValueError("speculative: draft needs a model; the stub has none")
    card = load_card(checkpoint, ("stub",))
    facts = ModelFacts(card.max_model_len, num_layers=1, num_kv_heads=1, head_dim=1)
    resolved = resolve(config.model_copy(update={"max_num_pages": NUM_PAGES}), facts, DeviceFacts())
    tokens = enumerate(card.tokenizer.token_bytes)
    ids = [i for i, raw in tokens if raw.removeprefix(b" ").isalpha() and i not in card.tokenizer.special_ids]
    runner = ReadableStub(
        ids,
        vocab_size=card.vocab_size,
        max_model_len=resolved.max_model_len,
        page_size=resolved.page_size,
        step_ms=checkpoint.step_ms,
    )
    return resolved, runner
