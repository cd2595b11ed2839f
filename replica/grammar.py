"""Grammar masks: which ids may come next. Made from a source that a router compiled and the bytes of each id.

A mask that can't be had is an exception, never an all-ones mask: the engine ends that request with an error.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from replica.batch import RequestFault
from router.wire import GRAMMAR_LIMITS

_MASK_S = 0.005
"""CPU time that a request's masks may take on average; 20 us is usual. All requests of a step wait for all masks."""
_GRACE_S = 0.25


class GrammarFault(Exception):
    """This request's grammar is bad, over its limits, or was given an id that it does not allow."""


class UnservableGrammar(GrammarFault, RequestFault):
    """It costs the other requests too much, or leaves nothing of this model's vocabulary."""


class Grammars:
    """Makes one :class:`GrammarMask` per request (the engine's MaskFactory). Thread-safe.

    ``tokens``: bytes of each id; ``vocab_size``: the model's, which bounds the masks. Ids beyond ``tokens``, and
    ``special_ids`` other than the eos ids, are never allowed. Building takes about 10 s per million ids and holds the
    GIL, so build it before the engine starts. Raises ValueError without an eos id, ImportError without llguidance.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        special_ids: Sequence[int] = (),
        max_cached: int = 32,
    ) -> None:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

        self.eos_ids = tuple(i for i in dict.fromkeys(eos_token_ids) if 0 <= i < vocab_size)
        if not self.eos_ids:
            raise ValueError(f"eos_token_ids: {list(eos_token_ids)}; at least one below {vocab_size} is needed")
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        table = _Table([*tokens, *[b""] * (vocab_size - len(tokens))][:vocab_size], self.eos_ids, special_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(table), n_vocab=vocab_size, eos_token=list(self.eos_ids))
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = LLMatcher
        self._max_cached = max_cached
        self._cached: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.eos_mask = np.zeros(self.num_words, np.int32)
        for token_id in self.eos_ids:
            self.eos_mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def __call__(self, grammar: tuple[str, str]) -> GrammarMask:
        """Raises GrammarFault for an unknown kind or a source that does not compile (about 1 ms when new)."""
        kind, source = grammar
        if kind != "llguidance":
            raise GrammarFault(f"kind {kind!r} is unknown; this replica runs 'llguidance'")
        with self._lock:
            if source in self._cached:
                self._cached.move_to_end(source)
                return GrammarMask(self._cached[source].deep_copy(), self)
        matcher = self._matcher(self._tokenizer, source, limits=self._limits, log_level=0)
        if matcher.is_error():
            raise GrammarFault(_first_line(matcher.get_error()))
        with self._lock:
            self._cached[source] = matcher
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
            return GrammarMask(matcher.deep_copy(), self)


class _Table:
    """What llguidance wants to know of a tokenizer. It never has to split text: our sources set ``no_forcing``."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_ids: Sequence[int], special_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted({i for i in (*special_ids, *eos_ids) if 0 <= i < len(tokens)})

    def __call__(self, _: Any) -> list[int]:
        return []


class GrammarMask:
    """Where one request stands in its grammar. Used by one thread at a time.

    An eos id is kept out of the matcher: after the first one only eos ids are allowed (a request that ignores eos goes
    on so until its length ends it).
    """

    def __init__(self, matcher: Any, grammars: Grammars) -> None:
        self._matcher = matcher
        self._grammars = grammars
        self.num_accepted = 0
        self._num_eos = 0
        self._num_made = 0
        self._spent_s = 0.0

    @property
    def finished(self) -> bool:
        """Only eos ids are allowed from here on."""
        return self._num_eos > 0 or self._matcher.is_stopped()

    def mask(self, num: int, draft: Sequence[int] = ()) -> np.ndarray:
        """int32 [num, ceil(vocab / 32)], a fresh array: bit ``id % 32`` of word ``id // 32`` is set when allowed.

        Row 0 is for the next id, row i for the one after ``draft[:i]``; so ``draft`` has num - 1 ids. Rows after a
        draft id that the grammar does not allow are of no use to anybody and allow only eos. Raises GrammarFault.
        """
        if len(draft) != num - 1:
            raise GrammarFault(f"{num} masks need {num - 1} draft ids, not {len(draft)}")
        out = np.empty((num, self._grammars.num_words), np.int32)
        done = 0
        for index in range(num):
            self._fill(out[index])
            if index == num - 1:
                break
            if not _allows(out[index], draft[index]):
                out[index + 1 :] = self._grammars.eos_mask
                break
            self.accept(draft[index])
            done += 1
        self.rollback(done)
        return out

    def accept(self, token_id: int) -> None:
        """``token_id`` was emitted. Raises GrammarFault when the grammar does not allow it."""
        if token_id in self._grammars.eos_ids:
            if not self._num_eos and not self._matcher.is_accepting():
                raise GrammarFault(f"id {token_id} ends the text before the grammar does")
            self._num_eos += 1
        elif (
            self._num_eos
            or not 0 <= token_id < self._grammars.vocab_size
            or not self._matcher.try_consume_tokens([token_id])
        ):
            self._check()
            raise GrammarFault(f"id {token_id} is not allowed at position {self.num_accepted} of the output")
        self.num_accepted += 1

    def rollback(self, num: int) -> None:
        """Takes back the last ``num`` accepted ids. Raises GrammarFault when there are fewer."""
        if not 0 <= num <= self.num_accepted:
            raise GrammarFault(f"can't take back {num} of {self.num_accepted} ids")
        from_matcher = max(0, num - self._num_eos)
        self._num_eos -= num - from_matcher
        self.num_accepted -= num
        if from_matcher and not self._matcher.rollback(from_matcher):
            self._check()
            raise GrammarFault(f"{from_matcher} ids could not be taken back")

    def num_allowed(self, draft: Sequence[int]) -> int:
        """How many of the first ids of ``draft`` the grammar allows in a row: the part worth verifying."""
        done = 0
        try:
            for token_id in draft:
                self.accept(token_id)
                done += 1
        except GrammarFault:
            self._check()
        self.rollback(done)
        return done

    def check_invariants(self) -> None:
        assert 0 <= self._num_eos <= self.num_accepted
        assert not self._matcher.is_error()

    def _fill(self, row: np.ndarray) -> None:
        if self.finished:
            self._check()
            row[:] = self._grammars.eos_mask
            return
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._spent_s += time.thread_time() - started
        self._num_made += 1
        if self._spent_s > _GRACE_S + self._num_made * _MASK_S:
            raise UnservableGrammar(
                f"its masks take {self._spent_s / self._num_made * 1e3:.0f} ms each and hold up every other request; "
                "write what repeats as one regular expression, and leave less to ambiguity"
            )
        # After an error the library hands out a mask that ends the text: it would pass for a finished answer.
        self._check()
        if not row.any():
            raise UnservableGrammar(f"no id is allowed after {self.num_accepted}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFault(_first_line(self._matcher.get_error()))


def _allows(row: np.ndarray, token_id: int) -> bool:
    return bool(row.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _first_line(error: str) -> str:
    return error.strip().splitlines()[0][:300] if error.strip() else "unknown error"


def available() -> bool:
    """llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None
