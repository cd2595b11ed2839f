"""GBNF grammars that only look context-free: without recursion a grammar is one regular expression.

As one expression it is matched exactly and costs microseconds a mask; as rules, every character class would be a
token of its own and a mask would cost as much as the vocabulary is long. Syntax: llama.cpp's ``grammars/README.md``.
"""

from __future__ import annotations

import re

_MAX_EXPANDED = 50_000
"""Characters of the expression after every rule has been put in place."""
_MAX_NESTING = 100
_TOKEN = re.compile(
    r"""\s+|\#[^\n]*
    |(?P<rule>[a-zA-Z][a-zA-Z0-9_-]*)\s*::=
    |(?P<name>[a-zA-Z][a-zA-Z0-9_-]*)
    |"(?P<text>(?:[^"\\\n]|\\.)*)"
    |\[(?P<chars>\^?(?:[^\]\\\n]|\\.)+)\]
    |(?P<count>[*+?]|\{\d+(?:,\d*)?\})
    |(?P<sign>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_DASH = "plain dash"
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}


class NotRegular(Exception):
    """The grammar is recursive, too large as one expression, or not written in the syntax known here."""


def as_regex(text: str) -> str:
    """An expression (Rust's syntax) that matches what rule ``root`` matches. Raises NotRegular."""
    rules = _split(text)
    if "root" not in rules:
        raise NotRegular("no rule is named root")
    return _Expansion(rules).rule("root")


def _split(text: str) -> dict[str, list[tuple[str, str]]]:
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] | None = None
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotRegular(f"unknown syntax at {text[at : at + 20]!r}")
        at = found.end()
        kind = found.lastgroup
        if kind == "rule":
            if found["rule"] in rules:
                raise NotRegular(f"rule {found['rule']} is defined twice")
            body = rules[found["rule"]] = []
        elif kind is not None:
            if body is None:
                raise NotRegular("the grammar does not begin with a rule")
            body.append((kind, found[kind]))
    return rules


class _Expansion:
    """Puts rules in place of their names, each once; a rule that meets itself on the way is recursive."""

    def __init__(self, rules: dict[str, list[tuple[str, str]]]) -> None:
        self._rules = rules
        self._done: dict[str, str] = {}
        self._open: list[str] = []

    def rule(self, name: str) -> str:
        if name not in self._done:
            if name in self._open or name not in self._rules or len(self._open) >= _MAX_NESTING:
                raise NotRegular(f"rule {name} is recursive, missing or nested too deeply")
            self._open.append(name)
            self._done[name] = self._expression(self._rules[name])
            self._open.pop()
        return self._done[name]

    def _expression(self, tokens: list[tuple[str, str]]) -> str:
        out: list[str] = []
        depth = 0
        size = 0
        for index, (kind, value) in enumerate(tokens):
            part, depth = self._part(kind, value, depth, bool(index) and tokens[index - 1][0] != "count")
            out.append(part)
            size += len(part)
            if size > _MAX_EXPANDED:
                raise NotRegular("the expression is too long")
        if depth:
            raise NotRegular("parentheses do not match")
        return f"(?:{''.join(out)})"

    def _part(self, kind: str, value: str, depth: int, may_count: bool) -> tuple[str, int]:
        if kind == "name":
            return self.rule(value), depth
        if kind == "text":
            return f"(?:{''.join(map(_char, _unescaped(value)))})", depth
        if kind == "chars":
            negated = value.startswith("^")
            return f"[{'^' if negated else ''}{_members(value[negated:])}]", depth
        if kind == "count":
            if not may_count:
                raise NotRegular("a repetition of nothing, or of a repetition")
            return value, depth
        if value == ".":
            return r"[\x{0}-\x{10FFFF}]", depth
        depth += {"(": 1, ")": -1}.get(value, 0)
        if depth < 0 or depth > _MAX_NESTING:
            raise NotRegular("parentheses do not match, or are nested too deeply")
        return {"(": "(?:"}.get(value, value), depth


def _unescaped(text: str) -> list[str]:
    """Characters of a literal or a class, each one either plain or what an escape stands for. A dash that is escaped
    makes no range, so the plain one is told apart from it."""
    out: list[str] = []
    at = 0
    while at < len(text):
        if (found := _ESCAPE.match(text, at)) is None:
            out.append(_DASH if text[at] == "-" else text[at])
            at += 1
            continue
        digits = found[1] or found[2] or found[3]
        code = int(digits, 16) if digits else ord(_CONTROL.get(found[4], found[4]))
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise NotRegular(f"{found[0]} is not a character")
        out.append(chr(code))
        at = found.end()
    return out


def _members(text: str) -> str:
    chars = _unescaped(text)
    out: list[str] = []
    at = 0
    while at < len(chars):
        if at + 2 < len(chars) and chars[at + 1] == _DASH:
            if chars[at] > chars[at + 2]:
                raise NotRegular(f"the range {chars[at]}-{chars[at + 2]} is empty")
            out.append(f"{_char(chars[at])}-{_char(chars[at + 2])}")
            at += 3
        else:
            out.append(_char(chars[at]))
            at += 1
    return "".join(out)


def _char(char: str) -> str:
    char = "-" if char == _DASH else char
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"
