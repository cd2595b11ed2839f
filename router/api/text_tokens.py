"""Which tokens a text is made of, where an answer also holds reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from router.text.output import Piece, TokenRecord


class TextTokens:
    """Cuts pieces at their tokens, and gives a shown text those tokens whose own text it is.

    ``slices`` first, then ``shown`` for the content that a slice led to: content may come later than its tokens (a
    parser holds back what might become a tag) and end within one (it holds back spaces), and tokens of tags are never
    shown.
    """

    def __init__(self) -> None:
        self._at = 0
        """Characters of output before the next piece."""
        self._text = ""
        """Output since the last shown text."""
        self._records: list[TokenRecord] = []
        """Tokens since then, oldest first."""

    def slices(self, piece: Piece) -> Iterator[Piece]:
        """The piece, a token at a time; only the last slice has the finish."""
        start, end = self._at, self._at + len(piece.text)
        records = list(piece.tokens)
        cuts = [min(max(record.offset, start), end) for record in records]
        if records and cuts[0] > start:  # the end of a token that was begun in an earlier piece
            yield self._took(Piece(piece.text[: cuts[0] - start]))
        for record, (begin, until) in zip(records, pairwise(cuts), strict=False):
            self._records.append(record)
            yield self._took(Piece(piece.text[begin - start : until - start]))
        self._records += records[-1:]
        rest = cuts[-1] - start if records else 0
        yield self._took(Piece(piece.text[rest:], (), piece.finish_reason, piece.stop_reason))

    def _took(self, piece: Piece) -> Piece:
        self._at += len(piece.text)
        self._text += piece.text
        return piece

    def shown(self, text: str) -> list[TokenRecord]:
        """The tokens with a character in ``text`` that no earlier text had, in order. What the output has before it
        was no text, what it has behind is yet to be shown."""
        behind = self._text
        before = 0 if behind.startswith(text) else behind.rfind(text)
        if before < 0:  # put together by a parser: the newest is the likeliest
            before = max(0, len(behind) - len(text))
        self._text = behind[before + len(text) :]
        last = self._at - len(self._text)
        first = self._at - len(behind) + before
        ends = [*(record.offset for record in self._records[1:]), self._at]
        taken = [
            record
            for record, end in zip(self._records, ends, strict=False)
            if record.offset < last and (end > first or record.offset >= first) and not record.cut
        ]
        self._records = [record for record in self._records if record.offset >= last]
        return taken
