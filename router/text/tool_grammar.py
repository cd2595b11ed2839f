"""Grammars of tool calls in a model's own format, in llguidance's Lark dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.grammar_source import json_rule
from router.text.tokenizer import Tokenizer
from router.text.tools import Format

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Wish:
    """What the calls must be. ``forced``: the answer is calls and nothing else; otherwise text may come before,
    between and after, and only what follows a call marker is bound. ``answer``: with ``forced``, a JSON schema of what
    the answer may be instead."""

    forced: bool
    parallel: bool
    names: tuple[str, ...]
    answer: Any = None


def tool_grammar(
    form: Format, schemas: Mapping[str, Mapping[str, Any] | None], wish: Wish, tokenizer: Tokenizer, *, thinks: bool
) -> str:
    """Lark source. ``schemas``: function name -> JSON schema of its arguments, None for any object.

    ``thinks``: the prompt opened a reasoning block, which the answer closes first.
    """
    key = "parameters" if form == "llama3_json" else "arguments"
    rules = []
    for index, name in enumerate(wish.names):
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{key}": '
        rules.append(f"call_{index}: {_quoted(head)} args_{index} {_quoted('}')}")
        rules.append(f"args_{index}: {json_rule(schemas.get(name) or _ANY_OBJECT)}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(wish.names))))
    body = {"hermes": _hermes, "llama3_json": _llama3, "mistral": _mistral}[form](wish, tokenizer)
    start = "start: think SPACE body" if thinks else "start: body"
    if wish.answer is not None:
        start += " | answer"
        rules.append(f"answer: {json_rule(wish.answer)}")
    think = ['think[suffix="</think>"]: /(?s:.*)/', "SPACE: /[ \\n]{0,4}/"] if thinks else []
    return "\n".join([start, *think, *body, *rules]) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _hermes(wish: Wish, tokenizer: Tokenizer) -> Sequence[str]:
    block = '"\\n" call "\\n</tool_call>"'
    if wish.forced:
        more = f' ("\\n<tool_call>" {block})*' if wish.parallel else ""
        return [f'body: "<tool_call>" {block}{more}']
    # Whatever text does, once it has written the marker it is bound to a call.
    count = "*" if wish.parallel else "?"
    return [
        f"body: (before {block}){count} TAIL",
        'before[suffix="<tool_call>"]: /(?s:.*)/',
        "TAIL: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/",
    ]


def _llama3(wish: Wish, tokenizer: Tokenizer) -> Sequence[str]:
    calls = 'call ("; " call)*' if wish.parallel else "call"
    if wish.forced:
        return [f"body: {calls}"]
    return [f"body: {calls} | PLAIN", r"PLAIN: /([^{\s](?s:.*))?/"]


def _mistral(wish: Wish, tokenizer: Tokenizer) -> Sequence[str]:
    index = tokenizer.token_id("[TOOL_CALLS]")
    special = index is not None and index in tokenizer.special_ids
    marker = f"<[{index}]>" if special else '"[TOOL_CALLS]"'
    more = ' (", " call)*' if wish.parallel else ""
    calls = f'{marker} " "? "[" call{more} "]"'
    if wish.forced:
        return [f"body: {calls}"]
    return [f"body: PLAIN ({calls})?", r"PLAIN: /(?s:.*)/ & ~/(?s:.*\[TOOL_CALLS\].*)/"]
