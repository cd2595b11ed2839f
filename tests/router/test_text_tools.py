"""Tool-call and reasoning parsers: known answers, and the same result for any split of the text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.assistant import AssistantParser
from router.text.events import CallArguments, CallStart, Content, Event, Reasoning
from router.text.reasoning import ReasoningParser, opened_by
from router.text.tools import PARSERS, Format, format_of

Result = dict[str, Any]


def collect(events: list[Event]) -> Result:
    """Per channel what a client ends up with."""
    out: Result = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        if isinstance(event, Content):
            out["content"] += event.text
        elif isinstance(event, Reasoning):
            out["reasoning"] += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(out["calls"])
            out["calls"].append([event.name, ""])
        else:
            assert isinstance(event, CallArguments) and event.index == len(out["calls"]) - 1
            out["calls"][-1][1] += event.text
    return out


def parse(text: str, cuts: list[int], form: Format | None, opened: bool | None = None) -> Result:
    reasoning = None if opened is None else ReasoningParser(opened=opened)
    parser = AssistantParser(reasoning=reasoning, tools=None if form is None else PARSERS[form]())
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events: list[Event] = []
    for start, end in pairwise(edges):
        events += parser.feed(text[start:end])
    return collect(events + parser.finish())


ARGS = '{"city": "Zürich \\"x\\" }{ </tool_call>", "n": [1, {"a": null}]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGS}}}'

HERMES: list[tuple[str, str, list[list[str]]]] = [
    ("just text  ", "just text  ", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [["get_weather", ARGS]]),
    (f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [["get_weather", ARGS]]),
    (
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call> done",
        "done",
        [["get_weather", ARGS], ["get_weather", ARGS]],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [["f", '{"a": 1}']]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["f", '{"a": 1}']]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [["f", '{"a": 1}']]),
    ('<tool_call>{"name": "f", "arguments": {"a": ', "", [["f", '{"a": ']]),
    ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
    ('<tool_call>{"nome": "f"}</tool_call>', '<tool_call>{"nome": "f"}</tool_call>', []),
    ("a </tool_call> b <tool", "a </tool_call> b <tool", []),
    (f"<tool_call>{CALL} noise </tool_call>", "", [["get_weather", ARGS]]),
]
LLAMA: list[tuple[str, str, list[list[str]]]] = [
    ("Hello {there}", "Hello {there}", []),
    ('{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    ('\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    ('{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"b": "}"}}', "", [["f", "{}"], ["g", '{"b": "}"}']]),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}\n', "", [["f", '{"a": 1}']]),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "Bob"}', '{"name": "Bob"}', []),
    (' {"answer": 42} ok', ' {"answer": 42} ok', []),
    ('{"name": "f"', '{"name": "f"', []),
    ("  ", "  ", []),
    ("<|python", "<|python", []),
]
MISTRAL: list[tuple[str, str, list[list[str]]]] = [
    ("plain [not] calls", "plain [not] calls", []),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [["f", '{"a": 1}']]),
    (
        'Sure. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Sure.",
        [["f", '{"a": 1}'], ["g", "{}"]],
    ),
    ('[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g{"b": 2}', "", [["f", '{"a": "]"}'], ["g", '{"b": 2}']]),
    ('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [["f", '{"a": 1}']]),
    ("[TOOL_CALLS] !! {", "[TOOL_CALLS] !! {", []),
    ("[TOOL_CALLS][nonsense]", "[TOOL_CALLS][nonsense]", []),
    ("[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    ('[TOOL_CALLS] [ \n{"x": 1}, 2]', '[TOOL_CALLS] [ \n{"x": 1}, 2]', []),
    ("so [TOOL_CALLS][  ", "so [TOOL_CALLS][  ", []),
]
CASES = (
    [("hermes", *case) for case in HERMES] + [("llama3_json", *c) for c in LLAMA] + [("mistral", *c) for c in MISTRAL]
)


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES, ids=[f"{c[0]}-{c[1][:24]!r}" for c in CASES])
def test_known_answers_for_every_split_in_two_and_char_by_char(
    form: Format, text: str, content: str, calls: list[list[str]]
) -> None:
    expected = {"content": content, "reasoning": "", "calls": calls}
    assert parse(text, [], form) == expected
    assert parse(text, list(range(len(text))), form) == expected
    for cut in range(len(text)):
        assert parse(text, [cut], form) == expected, text[:cut]


THINK: list[tuple[str, bool, str, str]] = [
    ("<think>\nhm, 2\n</think>\n\nFour.", False, "hm, 2", "Four."),
    ("\n<think>a <think> b</think>x</think>", False, "a <think> b", "x</think>"),
    ("hm\n\n2 </think>Four.", True, "hm\n\n2", "Four."),
    ("never ends </thin", True, "never ends </thin", ""),
    ("No <think>tags</think> here", False, "", "No <think>tags</think> here"),
    ("<thi", False, "", "<thi"),
    ("</think>\n\nFour.", True, "", "Four."),
    ("<think></think>Four.", False, "", "Four."),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), THINK)
def test_reasoning_for_every_split(text: str, opened: bool, reasoning: str, content: str) -> None:
    expected = {"content": content, "reasoning": reasoning, "calls": []}
    assert parse(text, list(range(len(text))), None, opened) == expected
    for cut in range(len(text)):
        assert parse(text, [cut], None, opened) == expected, text[:cut]


_TAGS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "<"]
_JSON = [*'{}[]"\\:,; \n', CALL, "name", '"name": "f"', '"arguments": {}', "text", "null", "f"]
_parts = st.sampled_from([*_TAGS, *_JSON])


@settings(max_examples=400, deadline=None)
@given(
    st.lists(_parts, max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from([*PARSERS, None]),
    st.sampled_from([None, True, False]),
)
@example('{"name": "f", "arguments": {}}<', [3, 9], "hermes", None)
def test_any_text_gives_the_same_for_any_split(
    text: str, cuts: list[int], form: Format | None, opened: bool | None
) -> None:
    whole = parse(text, [], form, opened)
    assert parse(text, cuts, form, opened) == whole
    assert parse(text, list(range(len(text))), form, opened) == whole


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=10), st.integers(), st.lists(st.text(max_size=3)))),
    st.sampled_from(list(PARSERS)),
    st.lists(st.integers(0, 300), max_size=6),
    st.booleans(),
)
def test_arguments_survive_whatever_they_hold(arguments: Any, form: Format, cuts: list[int], ascii_only: bool) -> None:
    raw = json.dumps(arguments, ensure_ascii=ascii_only)
    text = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {raw}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {raw}}}]',
    }[form]
    assert parse(text, cuts, form)["calls"] == [["f", raw]]


def test_formats_are_read_off_templates() -> None:
    assert format_of('...<tool_call>\n{"name"...') == "hermes"
    assert format_of("[TOOL_CALLS]") == "mistral"
    assert format_of("<|python_tag|>") == "llama3_json"
    assert format_of("<tool_call>\n<function=") is None
    assert format_of("plain") is None


def test_prompts_that_open_the_reasoning() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n") and not opened_by("<think>\n\n</think>\n\n")
