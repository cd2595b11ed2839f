"""A structured-output request -> one llguidance grammar in its Lark dialect. Runs inside the compile process."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from router.text.gbnf import NotRegular, as_regex

JSON_WHITESPACE = r"( |\r?\n( {0,32}|\t{0,8}))?"
"""Between two JSON tokens: nothing, a space, or a line break with an indent. Bounded, or a model can pad for ever."""
_JSON_OPTIONS = {
    "whitespace_pattern": JSON_WHITESPACE,
    # One spelling per string: with \\u or \\/ a free-form key could repeat a declared one unseen by the grammar.
    "json_allowed_escapes": '"\\bfnrt',
}
# Forcing would let the library choose among equivalent tokenizations, for which it asks the model's tokenizer; a
# replica has none. Without it every token that fits is allowed and the model chooses.
_HEADER = '%llguidance {"no_forcing": true}\n'


class SourceError(ValueError):
    """The request can't become a grammar; the message is fit for a client."""


def lark_source(kind: str, text: str) -> str:
    """Grammar source of ``text``: JSON for json_schema and choice, else as the client wrote it.

    Raises SourceError for what has no grammar; whether the result compiles is llguidance's to say.
    """
    if kind == "json_object":
        return json_source({"type": "object"})
    if kind == "json_schema":
        return json_source(json.loads(text))
    if kind == "regex":
        return f"{_HEADER}start: TEXT\nTEXT: /{_regex(text)}/\n"
    if kind == "choice":
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(text))
        return f"{_HEADER}start: CHOICE\nCHOICE: {options}\n"
    if kind == "ebnf":
        return _HEADER + (_gbnf(text) if "::=" in text else _lark(text))
    raise SourceError(f"unknown grammar kind {kind!r}")


def json_source(schema: Any) -> str:
    """Grammar of the JSON texts that satisfy ``schema`` (draft 2020-12; earlier ones by their ``$schema``)."""
    return f"{_HEADER}start: {json_rule(schema)}\n"


def json_rule(schema: Any) -> str:
    """The same as the right side of a rule."""
    body = {} if schema is True else schema
    if isinstance(body, dict):
        body = {**body, "x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps(body, ensure_ascii=False)}"


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    # Digits, words and spaces are ASCII, as in the JSON Schema patterns and in other servers' regex option.
    return regex_to_lark(pattern, use_ascii="dws")


def _lark(text: str) -> str:
    if re.search(r"^\s*%llguidance\b", text, re.MULTILINE):
        raise SourceError("%llguidance options can't be set by a request")
    return text


def _gbnf(text: str) -> str:
    """One expression where the grammar is regular; else rules, of which those without recursion become tokens that
    match as much as they can."""
    with contextlib.suppress(NotRegular):
        return f"start: TEXT\nTEXT: /{as_regex(text)}/\n"
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        converted = gbnf_to_lark(_spell_out_unicode(text))
    except RecursionError:
        raise SourceError("the grammar is nested too deeply") from None
    except Exception as error:
        raise SourceError(f"not a valid GBNF grammar: {error}") from None
    return re.sub(r"^%llguidance \{\}\s*", "", converted)


def _spell_out_unicode(text: str) -> str:
    r"""``\uXXXX`` and ``\UXXXXXXXX`` as the characters they stand for, where those have no meaning of their own."""

    def plain(match: re.Match[str]) -> str:
        code = int(match[1] or match[2], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise SourceError(f"{match[0]} is not a character")
        char = chr(code)
        return char if code > 0xFF or char.isalnum() else f"\\x{code:02x}"

    return re.sub(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})", plain, text)
