"""One request inside the engine.

    ids        [0 ......... num_prompt ......... num_tokens)  known on the host: prompt, then emitted
                                                 [num_tokens .. num_total)  sampled in launched steps, not read back
    KV         [0 .. num_written)  confirmed by a read-back step
               [0 .............. num_computed)   written or being written by launched steps, drafts included

A request is only ``num_computed`` catching up with ``num_total``: a prefill chunk, a prefix hit, a decode step and
the recomputation after a preemption are the same thing with different distances.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from replica.batch import NULL_PAGE
from replica.config import ResolvedConfig
from replica.masking import MaskFactory, Masking
from replica.pace import Pace
from router.pages import HASH_BYTES, extend
from router.wire import Code, Finish, Logprob, Refusal, Sampling, Submit


@dataclass(slots=True, eq=False)
class Request:
    owner: Any
    request_id: str
    sampling: Sampling
    num_prompt: int
    root: bytes
    ids: np.ndarray
    """int32, at least num_tokens long; grows by doubling and is never rewritten: launched rows view it."""
    num_tokens: int
    hashes: list[bytes]
    """Of the full pages known so far."""
    max_total: int
    """num_total at which the request is full: max_tokens or the context."""
    arrival: float
    priority: int = 0
    deadline: float = float("inf")
    """Seconds on the engine's clock, as is ``arrival``."""
    stop_ids: frozenset[int] = frozenset()
    masking: Masking | None = None

    key: tuple[float, int] = (0.0, 0)
    """Place in every queue; kept for life, so a victim of preemption keeps its place."""
    finish: Finish | None = None
    slot: int = -1
    """Device row while admitted, else -1."""
    fresh: bool = False
    """No row launched since admission."""
    num_pending: int = 0
    num_computed: int = 0
    num_written: int = 0
    num_cached: int | None = None
    """Prompt tokens found in the page cache at the first admission."""
    num_hits: int = 0
    """Pages taken from the index at the last admission."""
    admitted_total: int = 0
    """num_total at the last admission: beyond it, the request has progressed."""
    awaits: bytes = b""
    """Hash of a page that another request computes and this one waits for."""
    uncached_estimate: int = 0
    """Tokens to prefill, while waiting."""
    lacked_room: bool = False
    """There was none when it was to be admitted last."""

    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 block table, [0, num_pages) in use; replaced, not rewritten, at admission."""
    num_pages: int = 0
    view: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """table[: num_pages]"""
    pins: list[tuple[int, int]] = field(default_factory=list)
    """(index in the table, page): equal pages that were indexed before ours; held so that residency stays closed."""
    num_published: int = 0
    tail: int = NULL_PAGE
    """The indexed page of index num_published - 1."""
    publish_at: int | float = inf
    """num_written at which the next full page can be indexed; inf: never."""

    announced: bool = False
    """The first delta is out."""
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    num_preemptions: int = 0
    pace: Pace | None = None
    """How far its next tokens can be guessed; None: speculation is off, or nothing was sampled yet."""

    @property
    def num_emitted(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_total(self) -> int:
        return self.num_tokens + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """Has sampled since it was admitted."""
        return self.num_tokens + self.num_pending > self.admitted_total

    def take(self, ids: list[int], vocab_size: int) -> tuple[Finish | None, str | None]:
        """Appends sampled ids up to the one that ends the request; those after it leave ``ids``. Returns why it ends
        and what is wrong with an id, None where neither."""
        for count, token_id in enumerate(ids, 1):
            suspect = not 0 <= token_id < vocab_size or self.masking is not None
            if suspect and (problem := self._problem_with(token_id, vocab_size)):
                return None, problem
            self.append(token_id)
            finish = None
            if token_id in self.stop_ids and self.num_emitted > self.sampling.min_tokens:
                finish = Finish.STOP
            elif self.num_tokens >= self.max_total:
                finish = Finish.LENGTH
            if finish is not None:
                del ids[count:]
                return finish, None
        return None, None

    def _problem_with(self, token_id: int, vocab_size: int) -> str | None:
        """Why the sampled id can't be emitted; its grammar is told of it."""
        if not 0 <= token_id < vocab_size:
            return f"sampled id {token_id} is outside the vocabulary of {vocab_size}"
        try:
            if self.masking is not None:
                self.masking.accept(self.num_emitted, token_id)
        except Exception as error:
            return f"grammar: {error}"
        return None

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self.ids):
            grown = np.empty(2 * len(self.ids), np.int32)
            grown[: self.num_tokens] = self.ids
            self.ids = grown
        self.ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def add_pages(self, pages: list[int]) -> None:
        needed = self.num_pages + len(pages)
        if needed > len(self.table):
            grown = np.empty(max(needed, 2 * len(self.table)), np.int32)
            grown[: self.num_pages] = self.table[: self.num_pages]
            self.table = grown
        self.table[self.num_pages : needed] = pages
        self.num_pages = needed
        self.view = self.table[:needed]

    def hash_of(self, index: int, page_size: int) -> bytes:
        """Hash of full page ``index``, all of whose tokens are known; extends the chain as far as needed."""
        hashes = self.hashes
        while len(hashes) <= index:
            start = len(hashes) * page_size
            tokens = self.ids[start : start + page_size].astype("<u4").tobytes()
            hashes.append(extend(hashes[-1] if hashes else self.root, tokens))
        return hashes[index]

    def held_pages(self) -> list[int]:
        """All referenced pages, children before parents."""
        pages = self.table[: self.num_pages].tolist()
        for index, page in reversed(self.pins):
            pages.insert(index, page)
        pages.reverse()
        return pages


def build_request(
    submit: Submit, owner: Any, config: ResolvedConfig, vocab_size: int, now: float, masks: MaskFactory | None
) -> Request:
    """The door: checks everything that could hurt the engine later. Raises Refusal naming field, value and limit."""
    sampling = submit.sampling
    _check_sampling(sampling, vocab_size)
    if len(submit.tokens) % 4 or not 0 < submit.num_prompt <= submit.num_tokens:
        raise _invalid("prompt", f"{submit.num_prompt} of {len(submit.tokens) / 4:g} tokens; at least 1 is needed")
    if submit.num_prompt >= config.max_model_len:
        raise _invalid(
            "prompt", f"{submit.num_prompt} tokens; the context of {config.max_model_len} must hold one more token"
        )
    ids = np.frombuffer(submit.tokens, dtype="<u4")
    if (largest := int(ids.max())) >= vocab_size:
        raise _invalid("prompt", f"token id {largest}; the vocabulary has {vocab_size}")
    if submit.deadline_ms is not None and submit.deadline_ms <= 0:
        raise _invalid("deadline_ms", f"{submit.deadline_ms}; it must be positive")
    masking = None
    if sampling.grammar is not None:
        if masks is None:
            raise _invalid("grammar", f"{sampling.grammar[0]}; this engine was started without grammars")
        try:
            masking = Masking(masks(sampling.grammar), ids[submit.num_prompt :].tolist())
        except Exception as error:
            raise _invalid("grammar", f"{sampling.grammar[0]}: {error}") from error
    room = np.empty(submit.num_tokens + min(sampling.max_tokens, 64), np.int32)
    room[: submit.num_tokens] = ids
    return Request(
        owner=owner,
        request_id=submit.request_id,
        sampling=sampling,
        num_prompt=submit.num_prompt,
        root=submit.root,
        ids=room,
        num_tokens=submit.num_tokens,
        hashes=_split_hashes(submit, config.page_size),
        max_total=min(submit.num_prompt + sampling.max_tokens, config.max_model_len),
        arrival=now,
        priority=submit.priority,
        deadline=float("inf") if submit.deadline_ms is None else now + submit.deadline_ms / 1e3,
        stop_ids=frozenset(sampling.stop_token_ids),
        masking=masking,
    )


def _invalid(field_name: str, problem: str) -> Refusal:
    return Refusal(Code.INVALID, f"{field_name}: {problem}", field_name)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Router code checks this too; a replica must not trust that it did."""
    ranges = {
        "max_tokens": (1, inf),
        "temperature": (0, 1e6),
        "top_p": (0, 1),
        "top_k": (0, 2**31 - 1),
        "min_p": (0, 1),
        "seed": (0, 2**64 - 1),
        "min_tokens": (0, inf),
        "frequency_penalty": (-1e6, 1e6),
        "presence_penalty": (-1e6, 1e6),
        "repetition_penalty": (1e-6, 1e6),
        "logprobs": (0, vocab_size),
        "prompt_logprobs": (0, vocab_size),
    }
    for name, (low, high) in ranges.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            raise _invalid(name, f"{value}; allowed is {low} to {high}")
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "bad_words": [token_id for word in sampling.bad_words for token_id in word],
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise _invalid(name, f"token id {token_id}; the vocabulary has {vocab_size}")


def _split_hashes(submit: Submit, page_size: int) -> list[bytes]:
    raw, expected = submit.hashes, submit.num_tokens // page_size * HASH_BYTES
    if len(submit.root) != HASH_BYTES:
        raise _invalid("root", f"{len(submit.root)} bytes; a page hash has {HASH_BYTES}")
    if len(raw) != expected:
        raise _invalid(
            "hashes", f"{len(raw)} bytes; {submit.num_tokens} tokens in pages of {page_size} need {expected}"
        )
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
