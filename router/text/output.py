"""One choice's way from sampled ids to text: detokenize, match stops, keep token records in step with the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.text.detokenizer import Detokenizer
from router.text.stops import StopMatcher, StopStrings
from router.text.tokenizer import Tokenizer
from router.wire import Finish, Logprob


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a request's tokens become text; shared by its choices."""

    stops: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings that end within the first so many tokens don't count."""
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    shown_special: frozenset[int] = frozenset()
    """Special tokens shown all the same: markers that a parser must see."""
    watch_id: int | None = None
    """Token whose first position is noted (the end of reasoning)."""
    keep_tokens: bool = False
    """Whether pieces carry token records (logprobs or ids were asked for)."""


@dataclass(slots=True)
class TokenRecord:
    token_id: int
    logprob: Logprob | None
    offset: int
    """Characters of output text before the one this token begins in."""
    cut: bool = False
    """It begins at or after the stop string that ended the text: part of token_ids, not of logprobs."""


@dataclass(slots=True)
class Piece:
    """What became certain with one delta."""

    text: str = ""
    tokens: Sequence[TokenRecord] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason)


class OutputStream:
    """Feed it deltas; it returns pieces whose texts concatenate to the answer.

    A stop token's text is never shown unless ``include_stop``. A token record is released in the piece that shows
    its first character, or at the end.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens, shown=options.shown_special
        )
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(options.stops) if options.stops else None
        self._plain = self._matcher is None and not options.keep_tokens
        """Nothing is held back or recorded, so a token that isn't marked is its text and no more."""
        self._marked = options.stop_token_ids.union(() if options.watch_id is None else (options.watch_id,))
        self._records: deque[TokenRecord] = deque()
        self._decoded = 0
        self._shown = 0
        self.num_tokens = 0
        self.watched_at: int | None = None
        """Tokens up to and with the first ``watch_id``."""
        self.finished = False

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprob] | None, finish: str | None) -> Piece:
        """After a piece with a finish_reason, further ids are ignored (the engine learns of the stop later)."""
        if self.finished:
            return Piece()
        if finish is None and self._plain and self._marked.isdisjoint(ids):
            feed = self._detokenizer.feed
            text = feed(ids[0]) if len(ids) == 1 else "".join(map(feed, ids))
            self.num_tokens += len(ids)
            self._decoded += len(text)
            self._shown += len(text)
            return Piece(text)
        options, matcher = self._options, self._matcher
        shown: list[str] = []
        reason, stop_reason, stop_text = finish, None, ""
        for position, token_id in enumerate(ids):
            self._record(token_id, logprobs[position] if logprobs else None)
            if token_id in options.stop_token_ids:
                reason = "stop"
                stop_reason = None if token_id in options.eos_token_ids else token_id
                stop_text = self._stop_token_text(token_id)
                break
            text = self._detokenizer.feed(token_id)
            self._decoded += len(text)
            shown.append(self._visible(text))
            if matcher is not None and matcher.matched is not None:
                return self._piece(shown, "stop", matcher.matched)
        if reason is not None:
            shown += [self._held_text(), stop_text]
        return self._piece(shown, reason, stop_reason)

    def _visible(self, text: str) -> str:
        matcher = self._matcher
        if matcher is None or self.num_tokens <= self._options.min_tokens:
            return text
        text = matcher.feed(text)
        if matcher.matched is not None and self._options.include_stop:
            text += matcher.matched
        return text

    def _held_text(self) -> str:
        tail = self._detokenizer.finish()
        self._decoded += len(tail)
        return tail if self._matcher is None else self._matcher.feed(tail) + self._matcher.finish()

    def _stop_token_text(self, token_id: int) -> str:
        options = self._options
        if not options.include_stop or (options.skip_special_tokens and token_id in self._tokenizer.special_ids):
            return ""
        return self._tokenizer.bytes_of(token_id).decode("utf-8", "replace")

    def _piece(self, shown: list[str], reason: str | None, stop_reason: str | int | None) -> Piece:
        self.finished = reason is not None
        text = "".join(shown)
        self._shown += len(text)
        matched = self._matcher is not None and self._matcher.matched is not None
        return Piece(text, self._release(matched), reason, stop_reason)

    def _record(self, token_id: int, logprob: Logprob | None) -> None:
        self.num_tokens += 1
        if token_id == self._options.watch_id and self.watched_at is None:
            self.watched_at = self.num_tokens
        if self._options.keep_tokens:
            self._records.append(TokenRecord(token_id, logprob, self._decoded))

    def _release(self, matched: bool) -> list[TokenRecord]:
        records = self._records
        released: list[TokenRecord] = []
        while records and (self.finished or records[0].offset < self._shown):
            record = records.popleft()
            record.cut = matched and record.offset >= self._shown
            released.append(record)
        return released

    def check_invariants(self) -> None:
        self._detokenizer.check_invariants()
        if self._matcher is not None and not self.finished:
            self._matcher.check_invariants()
        assert self._shown <= self._decoded or self.finished
        assert all(record.offset >= self._shown for record in self._records)


FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}
"""Of an engine's finish, those that are an answer's end; the others are errors."""
