"""In-process use of an engine: token ids in, token ids out, no router and no Serve.

with LLM(config, runner) as llm:
    outputs = llm.generate([[1, 2, 3]], Sampling(max_tokens=8, temperature=0))
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from replica.batch import Runner
from replica.config import ResolvedConfig
from replica.loop import Engine
from replica.masking import MaskFactory
from router.pages import RootFields, chain, pack_tokens
from router.wire import EventBatch, Logprob, Sampling, Submit, TokenDelta


@dataclass
class Output:
    """What became of one prompt. ``finish`` is a wire.Finish value; ``error`` explains "error"."""

    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    num_cached: int = 0
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    error: str | None = None

    def add(self, delta: TokenDelta) -> None:
        self.ids += delta.ids
        self.finish = delta.finish or self.finish
        self.error = delta.error or self.error
        if delta.num_cached is not None:
            self.num_cached = delta.num_cached
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


class EngineStopped(Exception):
    """The engine ended while requests were being waited for."""


class LLM:
    """Owns an Engine over ``runner``. Several threads may generate at once. ``close`` also closes the runner."""

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        *,
        root: RootFields | None = None,
        masks: MaskFactory | None = None,
        on_events: Any = None,
    ) -> None:
        self._runner = runner
        self._roots: dict[str, bytes] = {}
        self._ids = itertools.count()
        self.root = root or RootFields("local", "local", config.kv_cache_dtype, config.page_size)
        self.engine = Engine(
            config,
            runner,
            root=self.root,
            on_deltas=_route,
            on_events=on_events or _ignore,
            masks=masks,
        )
        self.engine.start()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.stop()
        self._runner.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], *, salt: str = ""
    ) -> list[Output]:
        """All outputs, in the order of ``prompts``. Raises Refusal for the first prompt that is refused."""
        outputs = [Output() for _ in prompts]
        for index, delta in self.stream(prompts, sampling, salt=salt):
            outputs[index].add(delta)
        return outputs

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], *, salt: str = ""
    ) -> Iterator[tuple[int, TokenDelta]]:
        """(index of the prompt, delta) as they come. Closing the iterator cancels what still runs."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"sampling: {len(each)} given for {len(prompts)} prompts")
        inbox: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        open_ids: dict[str, int] = {}
        try:
            for index, (prompt, options) in enumerate(zip(prompts, each, strict=True)):
                request = self.request(prompt, options, salt=salt)
                open_ids[request.request_id] = index
                try:
                    self.engine.submit(inbox, request)
                except Exception:
                    del open_ids[request.request_id]
                    raise
            while open_ids:
                delta = self._next(inbox)
                index = open_ids.pop(delta.request_id) if delta.finish else open_ids[delta.request_id]
                yield index, delta
        finally:
            for request_id in open_ids:
                self.engine.cancel(inbox, request_id)

    def request(
        self, prompt: Sequence[int], sampling: Sampling, *, salt: str = "", emitted: Sequence[int] = (), **fields: Any
    ) -> Submit:
        """A Submit frame as a router would make it; ``emitted`` resumes a stream that ended elsewhere."""
        root = self._roots.get(salt) or self._roots.setdefault(salt, self.root.root(salt=salt))
        tokens = pack_tokens([*prompt, *emitted])
        hashes = b"".join(chain(root, tokens, self.root.page_size))
        return Submit(f"local-{next(self._ids)}", tokens, len(prompt), root, hashes, sampling, **fields)

    def _next(self, inbox: queue.SimpleQueue[TokenDelta]) -> TokenDelta:
        while True:
            try:
                return inbox.get(timeout=0.5)
            except queue.Empty:
                if (reason := self.engine.ended) and inbox.empty():
                    raise EngineStopped(reason) from None


def _route(deltas: list[tuple[Any, TokenDelta]]) -> None:
    for owner, delta in deltas:
        owner.put(delta)


def _ignore(_: EventBatch) -> None:
    return None
