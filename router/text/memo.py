"""Tokenization memo at turn boundaries: a follow-up turn costs only its new text.

BPE merges can't reach over a special token, and ``tokenizers`` cuts text at special tokens before anything else. So
the ids of a text are the concatenation of the ids of its segments, when each segment starts with a special token:

    text      <|im_start|>system...   <|im_end|>\\n   <|im_start|>user...   <|im_end|>\\n
    segments  |---------------------||-------------||-------------------||-------------|

Cutting *before* a special token, never after it, keeps rules that look at the very start of a text ("first word gets
a space") from seeing a new start.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from router.text.tokenizer import Tokenizer

Segment = tuple[bool, str]
"""(whether it begins the text, its text)."""

_ENTRY_BYTES = 200
"""What an entry costs beside its text and ids: dict slot, key and array objects."""


class TokenMemo:
    """LRU by bytes of (segment text -> ids). Results equal ``Tokenizer.encode`` of the whole text."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = 64 << 20) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Segment, array[int]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        tokens = [token for token in tokenizer.added.values() if not token.normalized]
        self._safe = {t.content for t in tokens if t.special and not (t.lstrip or t.rstrip or t.single_word)}
        # tokenizers takes the leftmost added token, of those the longest.
        contents = sorted((re.escape(token.content) for token in tokens), key=len, reverse=True)
        self._boundary = re.compile("|".join(contents)) if self._safe else None

    def encode(self, text: str, ready: Mapping[Segment, array[int]] | None = None) -> list[int]:
        """Ids of ``text`` without added special tokens. ``ready``: segments that ``tokenize`` did already."""
        ids: list[int] = []
        for key in self._segments(text):
            ids.extend(self._segment(key, ready))
        return ids

    def missing(self, text: str) -> list[Segment]:
        """The segments that ``encode`` would have to tokenize; tells whether that belongs in a thread."""
        return [key for key in self._segments(text) if key not in self._entries]

    def tokenize(self, segments: Sequence[Segment]) -> dict[Segment, array[int]]:
        """Ids of segments. Touches no entry, so it may run in another thread."""
        encode = self._tokenizer.encode
        return {key: array("I", encode(key[1], add_special_tokens=False)) for key in segments}

    def _segments(self, text: str) -> Iterator[Segment]:
        start = 0
        for match in self._boundary.finditer(text) if self._boundary is not None else ():
            # Tokens that aren't safe to cut before are matched too, so that a safe one inside them isn't found.
            if match.start() > start and match.group() in self._safe:
                yield start == 0, text[start : match.start()]
                start = match.start()
        if start < len(text):
            yield start == 0, text[start:]

    def _segment(self, key: Segment, ready: Mapping[Segment, array[int]] | None) -> array[int]:
        entry = self._entries.get(key)
        if entry is not None:
            self.hits += 1
            self._entries.move_to_end(key)
            return entry
        self.misses += 1
        entry = ready.get(key) if ready else None
        if entry is None:
            entry = array("I", self._tokenizer.encode(key[1], add_special_tokens=False))
        cost = _cost(key[1], entry)
        if cost <= self._max_bytes // 4:
            self._entries[key] = entry
            self.bytes += cost
            while self.bytes > self._max_bytes:
                (_, old), ids = self._entries.popitem(last=False)
                self.bytes -= _cost(old, ids)
        return entry

    def check_invariants(self) -> None:
        assert self.bytes == sum(_cost(text, ids) for (_, text), ids in self._entries.items())
        assert self.bytes <= self._max_bytes


def _cost(text: str, ids: array[int]) -> int:
    return _ENTRY_BYTES + len(text) * (1 if text.isascii() else 4) + 4 * len(ids)
