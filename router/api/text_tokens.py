"""Which tokens a text is made of, where an answer also holds reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterator

from router.text.output import Piece, TokenRecord


class TextTokens:
    """Cuts pieces at their tokens, and gives a shown text those tokens whose own text it is.

    ``slices`` first, then ``shown`` for the content that a slice led to: content may come later than its tokens (a
    parser holds back what might become a tag), and tokens of tags are never shown.
    """

    def __init__(self) -> None:
        self._at = 0
        """Characters of output before the next piece."""
        self._pending: list[tuple[TokenRecord, int]] = []
        """Tokens since the last shown text, with the characters that each completed."""

    def slices(self, piece: Piece) -> Iterator[Piece]:
        """The piece, a token at a time; only the last slice has the finish."""
        start, end = self._at, self._at + len(piece.text)
        records = list(piece.tokens)
        cuts = [min(max(record.offset, start), end) for record in records]
        self._at = end
        if records and cuts[0] > start:  # the end of a token that was begun in an earlier piece
            yield Piece(piece.text[: cuts[0] - start])
        for record, begin, until in zip(records, cuts, [*cuts[1:], end], strict=True):
            self._pending.append((record, until - begin))
            if record is not records[-1]:
                yield Piece(piece.text[begin - start : until - start])
        rest = cuts[-1] - start if records else 0
        yield Piece(piece.text[rest:], (), piece.finish_reason, piece.stop_reason)

    def shown(self, text: str) -> list[TokenRecord]:
        """The newest tokens that fit into ``text``, in order. What came before them was no text."""
        room, taken = len(text), list[TokenRecord]()
        while self._pending and self._pending[-1][1] <= room:
            record, length = self._pending.pop()
            room -= length
            if not record.cut:
                taken.append(record)
        self._pending.clear()
        return taken[::-1]
