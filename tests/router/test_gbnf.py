"""GBNF without recursion as one regular expression: the same language as a reading by the book."""

from __future__ import annotations

import re

import pytest

from router.text.gbnf import NotRegular, as_regex


def python_regex(expression: str) -> re.Pattern[str]:
    r"""Rust's ``\x{41}`` in Python's spelling."""
    return re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", expression))


CASES = [
    ('root ::= "a" | "b" "c"', ["a", "bc"], ["", "b", "ab", "abc"]),
    ('root ::= ("a" | "b" ("c")? )* "end"', ["end", "abcbend"], ["", "acend", "endend"]),
    ("root ::= [a-c]+ [^a-c\\n]{2}", ["abxy", "c\t-"], ["ab", "abx\n", "abxyz"]),
    ('root ::= x-1 Y\nx-1 ::= "p"\nY ::= x-1 # comment "here"\n  | "q"', ["pp", "pq"], ["p", "qq"]),
    ('root ::= "\\"" [^"\\\\]* "\\"" "\\n\\t\\x41"', ['"x y"\n\tA'], ['"x\\y"\n\tA', '"x"\n\tB']),
    ('root ::= [\\u0041-\\u005A\\u4e00-\\u9fff] "\\u00e9" "日"', ["Zé日", "一é日"], ["aé日"]),
    ("root ::= [-+*/] [a-] [\\]\\-x]", ["-a]", "/--", "+ax"], ["a-x", "-bx"]),
    ('root ::= "(" [0-9]{1,3} ("," [0-9]{0,2})? ")."', ["(1).", "(123,).", "(1,99)."], ["().", "(1234).", "(1))"]),
    ('root ::= . "b"', ["ab", "\nb", "日b"], ["b", "aab"]),
    ('root ::= a\na ::= b b\nb ::= "x"? ""', ["", "x", "xx"], ["xxx"]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), CASES, ids=[grammar for grammar, _, _ in CASES])
def test_language(grammar: str, inside: list[str], outside: list[str]) -> None:
    pattern = python_regex(as_regex(grammar))
    for text in inside:
        assert pattern.fullmatch(text), text
    for text in outside:
        assert not pattern.fullmatch(text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "(" root ")" | "x"',
        'root ::= a\na ::= b\nb ::= "x" a?',
        "root ::= missing",
        'start ::= "a"',
        '"a"',
        'root ::= "a',
        "root ::= (",
        "root ::= )",
        "root ::= *",
        'root ::= "a"**',
        "root ::= [z-a]",
        'root ::= "a"\nroot ::= "b"',
        'root ::= "\\ud800"',
        "root ::= " + "(" * 500 + '"a"' + ")" * 500,
        "\n".join([*(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"', "root ::= r0"]),
        "\n".join([*(f"r{i} ::= r{i + 1}" for i in range(4000)), 'r4000 ::= "a"', "root ::= r0"]),
        'root ::= TagDispatch(("a", b))',
    ],
)
def test_everything_else_is_left_to_the_general_converter(grammar: str) -> None:
    with pytest.raises(NotRegular):
        as_regex(grammar)
