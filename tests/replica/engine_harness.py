"""An engine on a stub runner, stepped by the test itself, with everything it says collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replica.batch import Batch
from replica.config import EngineConfig, ModelFacts, ResolvedConfig, resolve
from replica.llm import Output
from replica.loop import Engine
from replica.request import Request
from replica.stub import StubRunner
from router.pages import Digest, RootFields, chain, pack_tokens, unpack_keys
from router.wire import EventBatch, Sampling, Submit, TokenDelta

VOCAB = 499
FACTS = ModelFacts(max_position=4096, num_layers=2, num_kv_heads=2, head_dim=16)


def make_config(*, busy_chunk_size: int | None = None, **options: Any) -> ResolvedConfig:
    """``busy_chunk_size``: of steps where many decode, as a GPU's default has it."""
    options.setdefault("max_num_pages", 400)
    config = resolve(EngineConfig(**options), FACTS)
    return config if busy_chunk_size is None else replace(config, busy_chunk_size=busy_chunk_size)


def host_gb(pages: int, page_size: int = 16) -> float:
    """host_cache_gb that holds so many pages of FACTS in float32."""
    return pages * FACTS.kv_bytes_per_token("float32") * page_size / 2**30


@dataclass
class Mirror:
    """What a router would believe after the batches seen so far."""

    keys: set[int] = field(default_factory=set)
    """On the device."""
    host: set[int] = field(default_factory=set)
    reservations: dict[str, bytes] = field(default_factory=dict)
    batches: list[EventBatch] = field(default_factory=list)

    def apply(self, batch: EventBatch) -> None:
        assert batch.seq == (self.batches[-1].seq + 1 if self.batches else 0)
        assert not self.batches or batch.epoch == self.batches[-1].epoch
        self.batches.append(batch)
        tiers = (self.keys, self.host)
        for parent, tier, packed in batch.stored:
            for key in unpack_keys(packed):
                assert parent == 0 or parent in self.keys | self.host, "a page is stored before its parent"
                assert key not in tiers[tier], "a page is stored twice"
                tiers[tier].add(key)
                parent = key
        for tier, packed in batch.removed:
            for key in unpack_keys(packed):
                tiers[tier].remove(key)
        self.reservations.update(batch.accepted)
        for reservation in batch.ended:
            del self.reservations[reservation]
        assert batch.digests == [_digest(keys) for keys in tiers]


def _digest(keys: set[int]) -> tuple[int, int]:
    digest = Digest()
    for key in keys:
        digest.add(key)
    return digest.as_pair()


class Harness:
    """``step`` runs one iteration of the loop in the test's thread; ``audit`` is done after each."""

    def __init__(
        self,
        *,
        before_step: Callable[[Batch], dict[int, str] | None] | None = None,
        step_ms: float = 0.0,
        masks: Any = None,
        **options: Any,
    ) -> None:
        self.config = make_config(**options)
        self.batches: list[Batch] = []
        self.runner = StubRunner(
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            vocab_size=VOCAB,
            max_model_len=self.config.max_model_len,
            max_batch_size=self.config.max_batch_size,
            before_step=before_step,
            step_ms=step_ms,
        )
        launch = self.runner.launch
        self.runner.launch = lambda batch: self.batches.append(batch) or launch(batch)  # type: ignore
        self.mirror = Mirror()
        self.outputs: dict[str, Output] = {}
        self.root = RootFields("m", "t", "float32", self.config.page_size)
        self.engine = Engine(
            self.config,
            self.runner,
            root=self.root,
            on_deltas=self._on_deltas,
            on_events=self.mirror.apply,
            masks=masks,
        )
        self._count = 0

    def _on_deltas(self, deltas: list[tuple[Any, TokenDelta]]) -> None:
        for owner, delta in deltas:
            assert owner is self
            output = self.outputs[delta.request_id]
            assert output.finish is None, "a delta after the end"
            output.add(delta)

    def frame(
        self, prompt: Sequence[int], *, emitted: Sequence[int] = (), salt: str = "", priority: int = 0,
        deadline_ms: int | None = None, request_id: str | None = None, **sampling: Any,
    ) -> Submit:  # fmt: skip
        self._count += 1
        root = self.root.root(salt=salt)
        tokens = pack_tokens([*prompt, *emitted])
        hashes = b"".join(chain(root, tokens, self.config.page_size))
        options = Sampling(**sampling)
        name = request_id or f"r{self._count}"
        return Submit(name, tokens, len(prompt), root, hashes, options, deadline_ms, priority)

    def submit(self, prompt: Sequence[int], **fields: Any) -> str:
        frame = self.frame(prompt, **fields)
        self.engine.submit(self, frame)
        self.outputs[frame.request_id] = Output()
        return frame.request_id

    def request(self, request_id: str) -> Request:
        return self.engine._live[(id(self), request_id)]

    def step(self, count: int = 1, *, audit: bool = True) -> None:
        for _ in range(count):
            self.engine._inbox.wake()  # an iteration with nothing to do must not sleep
            self.engine.iterate()
            if audit:
                self.audit()

    def audit(self) -> None:
        self.engine.check_invariants()
        counts = self.engine.pool.counts()
        assert counts["free"] + counts["cached"] + counts["held"] == counts["all"]
        if not self.engine.events.has_changes:
            assert [self.mirror.keys, self.mirror.host] == [set(keys) for keys in self.engine.pool.residency()]
            assert self.mirror.reservations == self.engine.events.reservations

    def finish(self, *, audit: bool = True, limit: int = 20000) -> None:
        """Steps until nothing is left; everything must then be free or cached."""
        for _ in range(limit):
            if self.engine.idle() and not self.engine._flights:
                break
            self.step(audit=audit)
        assert self.engine.idle(), "the engine did not come to rest"
        self.step(2)
        counts = self.engine.pool.counts()
        assert counts["held"] == 0 and counts["free"] + counts["cached"] == counts["all"]
        assert not self.engine.events.reservations and not self.engine.scheduler._computing

    def starts(self) -> dict[int, list[tuple[int, int, int]]]:
        """slot -> (step, start, count) of all launched rows."""
        out: dict[int, list[tuple[int, int, int]]] = {}
        for batch in self.batches:
            for row in batch.rows:
                out.setdefault(row.slot, []).append((batch.step, row.start, len(row.token_ids)))
        return out
