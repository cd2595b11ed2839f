"""What a model's text means: content, reasoning, and tool calls as they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call ``index`` (0, 1, ...) begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of call ``index``: JSON text as the model wrote it."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments
