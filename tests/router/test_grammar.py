"""Structured output in the router: what compiles, what is refused and how, and that nothing can get it stuck."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_schemas import REFUSED, SCHEMAS

from router.text.grammar import GrammarBusy, GrammarError, GrammarOptions, Grammars
from router.text.grammar_process import CompileProcess, Vocabulary

pytest.importorskip("llguidance")

TOKENS = [b"<s>", b"</s>", *[bytes([byte]) for byte in range(256)]]
VOCABULARY = Vocabulary(TOKENS, size=264, eos_ids=(1,), special_ids=(0, 1))


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(VOCABULARY)
    yield made
    made._cache.check_invariants()
    made.close()


async def refusal(grammars: Grammars, kind: Any, value: Any) -> GrammarError:
    started = time.perf_counter()
    with pytest.raises(GrammarError) as caught:
        await grammars.compile(kind, value)
    assert time.perf_counter() - started < grammars.options.timeout_s + 1.5
    return caught.value


def test_router_text_imports_neither_torch_nor_the_grammar_library() -> None:
    code = "import sys, router.text.grammar; print([m for m in ('torch', 'llguidance', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", SCHEMAS)
async def test_schema_compiles(grammars: Grammars, name: str) -> None:
    kind, source = await grammars.compile("json_schema", SCHEMAS[name])
    assert kind == "llguidance" and "%json" in source
    assert await grammars.compile("json_schema", json.dumps(SCHEMAS[name])) == (kind, source)


@pytest.mark.parametrize("name", REFUSED)
async def test_unsupported_schema_names_feature_and_path(grammars: Grammars, name: str) -> None:
    schema, words, path = REFUSED[name]
    error = await refusal(grammars, "json_schema", schema)
    assert words in str(error), str(error)
    assert error.path == path
    assert (path or "root") in str(error)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_object", None),
        ("json_schema", True),
        ("regex", r"\d{3}-\d{4}"),
        ("regex", "a/b"),
        ("regex", "^(yes|no)$"),
        ("choice", ["yes", "no", 'a "quoted" one', "two\nlines", "日本"]),
        ("ebnf", 'root ::= "a" [0-9]+ | item\nitem ::= "(" item ")" | "x"'),
        ("ebnf", 'root ::= [\\u0041-\\u005A\\u4e00-\\u9fff]+ "\\u00e9"'),
        ("ebnf", 'start: greeting " " NAME\ngreeting: "Hello" | "Hi"\nNAME: /[a-z]+/'),
    ],
)
async def test_every_kind_compiles(grammars: Grammars, kind: Any, value: Any) -> None:
    assert (await grammars.compile(kind, value))[0] == "llguidance"


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", 3, "must be an object or a boolean"),
        ("json_schema", {"const": float("nan")}, "not valid JSON"),
        ("json_schema", {"const": "\ud800"}, "surrogate"),
        ("json_schema", {"x-guidance": {}}, "x-guidance"),
        ("json_schema", {"type": "str"}, "Invalid type: str"),
        ("json_schema", False, "schema is false"),
        ("regex", "", "non-empty"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("choice", [], "non-empty list"),
        ("choice", "yes", "non-empty list"),
        ("choice", ["a", ""], "empty option"),
        ("ebnf", "root ::= other", "other"),
        ("ebnf", 'root ::= "a', "GBNF"),
        ("ebnf", "start: missing", "missing"),
        ("ebnf", '%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
    ],
)
async def test_bad_input_is_refused_with_the_reason(grammars: Grammars, kind: Any, value: Any, words: str) -> None:
    assert words in str(await refusal(grammars, kind, value))


def _nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "{}" + closing * depth


HOSTILE: dict[str, tuple[str, Any]] = {
    "deep": ("json_schema", _nested('{"properties":{"a":', "}}", 90)),
    "very deep": ("json_schema", _nested('{"items":', "}", 20_000)),
    "huge enum": ("json_schema", {"enum": [f"{i:x}" * 3 for i in range(40_000)]}),
    "all combinations": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"const": 1}}} for j in range(6)]} for i in range(12)]},
    ),
    "2,000 optional keys": ("json_schema", {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}),
    "reference cycle": ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "doubling tokens": (
        "ebnf",
        "\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1} R{i + 1}" for i in range(30)), 'R30: "a"']),
    ),
    "deep regex": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "deep lark": ("ebnf", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "deep gbnf": ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "long": ("regex", "a" * (1 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_input_is_refused_in_bounded_time(grammars: Grammars, name: str) -> None:
    await refusal(grammars, *HOSTILE[name])
    assert await grammars.compile("regex", f"after {name}")


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*b", "(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", ".*a.{200}", "(x*)*y", "[a-z]{1,100000}"],
)
async def test_exponential_patterns_are_either_compiled_or_refused_quickly(grammars: Grammars, pattern: str) -> None:
    started = time.perf_counter()
    try:
        await grammars.compile("regex", pattern)
    except GrammarError as error:
        assert "simplify" in str(error) or "too" in str(error)
    assert time.perf_counter() - started < grammars.options.timeout_s + 1.5


class Counting(CompileProcess):
    """Counts what reaches it."""

    calls = 0

    def compile(self, kind: str, text: str, timeout_s: float) -> Any:
        type(self).calls += 1
        return super().compile(kind, text, timeout_s)


async def test_outcomes_are_cached_and_shared() -> None:
    class Mine(Counting):
        pass

    made = Grammars(VOCABULARY, GrammarOptions(cache_bytes=2_000), start=Mine)
    try:
        same = await asyncio.gather(*(made.compile("regex", "abc") for _ in range(20)))
        assert len(set(same)) == 1 and Mine.calls == 1
        for _ in range(3):
            await refusal(made, "json_schema", {"not": {}})
        assert Mine.calls == 2
        for index in range(10):
            await made.compile("regex", f"abc{index}")
            made._cache.check_invariants()
        await made.compile("regex", "abc")
        assert Mine.calls == 13, "the least recently used entry should have gone"
    finally:
        made.close()


async def test_a_stuck_compilation_is_killed_and_others_go_on() -> None:
    class Stuck(CompileProcess):
        def compile(self, kind: str, text: str, timeout_s: float) -> Any:
            if text == "stuck":
                os.kill(self.pid, signal.SIGSTOP)
            return super().compile(kind, text, timeout_s)

    made = Grammars(VOCABULARY, GrammarOptions(timeout_s=0.3, workers=1), start=Stuck)
    try:
        await made.compile("regex", "warm")
        started = time.perf_counter()
        stuck = asyncio.ensure_future(refusal(made, "regex", "stuck"))
        await asyncio.sleep(0)
        assert await made.compile("regex", "warm"), "what is cached needs no process"
        assert time.perf_counter() - started < 0.1
        assert "longer than 0.3 s" in str(await stuck)
        assert await made.compile("regex", "fresh")
    finally:
        made.close()


async def test_a_crash_of_native_code_is_a_refusal_and_not_the_routers_end() -> None:
    class Crashing(CompileProcess):
        def compile(self, kind: str, text: str, timeout_s: float) -> Any:
            if text == "crash":
                os.kill(self.pid, signal.SIGKILL)
            return super().compile(kind, text, timeout_s)

    made = Grammars(VOCABULARY, GrammarOptions(workers=1), start=Crashing)
    try:
        assert "memory" in str(await refusal(made, "regex", "crash"))
        assert await made.compile("regex", "fresh")
        os.kill(made._idle[0].pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
        assert await made.compile("regex", "an idle process that died is replaced")
    finally:
        made.close()


async def test_a_compilation_that_eats_memory_is_a_refusal() -> None:
    made = Grammars(VOCABULARY, GrammarOptions(memory_bytes=8 << 20))
    try:
        assert await made.compile("regex", "small")
        assert "more memory" in str(await refusal(made, "json_schema", {"enum": [f"{i:x}" * 4 for i in range(10_000)]}))
        assert await made.compile("regex", "small again")
    finally:
        made.close()


async def test_waiting_is_bounded_and_a_client_that_leaves_harms_nobody() -> None:
    class Slow(CompileProcess):
        def compile(self, kind: str, text: str, timeout_s: float) -> Any:
            time.sleep(0.1)
            return super().compile(kind, text, timeout_s)

    made = Grammars(VOCABULARY, GrammarOptions(workers=1, max_waiting=2), start=Slow)
    try:
        first, second = (asyncio.ensure_future(made.compile("regex", text)) for text in ("a", "b"))
        also_second = asyncio.ensure_future(made.compile("regex", "b"))
        await asyncio.sleep(0)
        with pytest.raises(GrammarBusy, match="waiting"):
            await made.compile("regex", "c")
        second.cancel()
        assert await first and await also_second
    finally:
        made.close()


async def test_processes_end_with_the_router() -> None:
    made = Grammars(VOCABULARY)
    await made.compile("regex", "a")
    pid = made._idle[0].pid
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
