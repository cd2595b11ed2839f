"""Token ids to text, one at a time: bytes in, complete characters out."""

from __future__ import annotations

from codecs import utf_8_decode

from router.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental UTF-8 decoding of tokens' bytes, O(1) per token.

    The concatenation of everything returned, ``finish()`` included, equals ``Tokenizer.decode`` of all ids (before
    its leading-space rule, which is for whole texts). A character is returned by the token that completes it, so
    U+FFFD appears only where the whole text has one.
    """

    __slots__ = ("_pending", "_size", "_skip", "_table")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """``shown``: special tokens that are not skipped."""
        self._table = tokenizer.token_bytes
        self._size = tokenizer.vocab_size
        self._skip: frozenset[int] = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._pending = b""

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; "" for skipped or unknown ids."""
        if not 0 <= token_id < self._size or token_id in self._skip:
            return ""
        data = self._pending + self._table[token_id] if self._pending else self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """What an incomplete last character decodes to, at the end of the sequence."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def check_invariants(self) -> None:
        assert len(self._pending) <= 3, "an incomplete UTF-8 character has at most three bytes"
