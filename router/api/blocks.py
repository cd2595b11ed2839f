"""Events to blocks: the items of a Responses answer, the content blocks of a Messages answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.text.events import CallArguments, CallStart, Content, Event
from router.text.output import TokenRecord

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A stretch of one kind. ``text``: the reasoning, the content, or a call's arguments."""

    index: int
    kind: BlockKind
    name: str = ""
    parts: list[str] = field(default_factory=list)
    tokens: list[TokenRecord] = field(default_factory=list)
    """Of text, where they were asked for."""
    id: str = ""
    """The route's own."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True)
class Change:
    """``open`` and ``close`` come once per block, in order; blocks don't overlap."""

    what: Literal["open", "delta", "close"]
    block: Block
    text: str = ""
    tokens: Sequence[TokenRecord] = ()


class Blocks:
    """A new block begins whenever the kind changes, and with every call."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False

    def feed(self, events: Iterable[Event]) -> Iterator[Change]:
        for event in events:
            if isinstance(event, CallStart):
                yield from self._begin("call", event.name)
                continue
            kind: BlockKind = "text" if isinstance(event, Content) else "reasoning"
            if isinstance(event, CallArguments):
                kind = "call"
            if not self._open or self.blocks[-1].kind != kind:
                assert kind != "call", "arguments follow the start of their call"
                yield from self._begin(kind)
            block = self.blocks[-1]
            block.parts.append(event.text)
            yield Change("delta", block, event.text)

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[Change]:
        yield from self.finish()
        self.blocks.append(Block(len(self.blocks), kind, name))
        self._open = True
        yield Change("open", self.blocks[-1])

    def finish(self) -> Iterator[Change]:
        if self._open:
            self._open = False
            yield Change("close", self.blocks[-1])

    def check_invariants(self) -> None:
        assert [block.index for block in self.blocks] == list(range(len(self.blocks)))
        assert all(block.name for block in self.blocks if block.kind == "call")
