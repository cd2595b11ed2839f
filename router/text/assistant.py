"""A model's answer text to events: reasoning first, tool calls in what remains."""

from __future__ import annotations

from router.text.events import Content, Event
from router.text.reasoning import ReasoningParser
from router.text.tools import ToolParser


class AssistantParser:
    """Chains the parsers that a request needs; without any, text is content."""

    def __init__(self, *, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self.reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [Content(text)] if self.reasoning is None else self.reasoning.feed(text)
        return self._through_tools(events)

    def _through_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        out: list[Event] = []
        for event in events:
            out += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return out

    def finish(self) -> list[Event]:
        events = [] if self.reasoning is None else self._through_tools(self.reasoning.finish())
        return events + ([] if self._tools is None else self._tools.finish())
