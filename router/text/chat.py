"""Chat template rendering, to the character what transformers' ``apply_chat_template`` renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.tokenizer import Tokenizer

_CONTINUE_MARK = "\x02EVERWARM-CONTINUES-HERE\x03 "
"""Ends the final message while it renders, so that what the template adds after it can be cut. Its trailing space
tells whether the template strips messages."""


class TemplateRefusal(Exception):
    """The template, or its use, refuses these messages; the text is fit for a client."""


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; when serving it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template. Rendering runs in jinja's immutable sandbox: it comes with the checkpoint."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """``special``: bos_token, eos_token, ... as the template names them. Raises TemplateRefusal for bad syntax."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"the checkpoint's chat template does not parse: {error}") from None
        self.source = source
        self._special = dict(special)
        self.wants_parts = _iterates_over_content(tree)
        names = {node.name for node in tree.find_all(nodes.Name)}
        self.takes_tools = "tools" in names
        self.knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``variables`` are chat_template_kwargs. Raises TemplateRefusal.

        With ``continue_final_message`` the text ends where the last message's content does.
        """
        prepared = [self._prepare(message) for message in messages]
        final = _mark_final(prepared) if continue_final_message else ""
        try:
            text = self._template.render(
                {
                    **self._special,
                    **(variables or {}),
                    "messages": prepared,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateRefusal(f"the model's chat template refuses these messages: {error}") from None
        return _cut_at_mark(text, final) if continue_final_message else text

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # Keys without a value are left out: templates print a literal None otherwise.
        out = {key: value for key, value in message.items() if value is not None}
        content = out.get("content")
        if isinstance(content, list) and not self.wants_parts:
            out["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and self.wants_parts and not _also_takes_strings(self.source):
            out["content"] = [{"type": "text", "text": content}]
        if out["role"] == "developer" and not self.knows_developer:
            out["role"] = "system"
        if calls := out.get("tool_calls"):
            out["tool_calls"] = [_with_object_arguments(call) for call in calls]
        return out


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates want arguments as an object, clients send them as JSON text; text that isn't JSON stays text."""
    function = dict(call["function"])
    try:
        parsed = json.loads(function["arguments"]) if isinstance(function["arguments"], str) else None
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        function["arguments"] = parsed
    return {**call, "function": function}


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over ``message.content``, so that content should reach it as a list of parts."""
    for loop in tree.find_all(nodes.For):
        target = loop.iter
        if isinstance(target, nodes.Filter) and target.node is not None:
            target = target.node
        if isinstance(target, nodes.Getattr) and target.attr == "content":
            return True
        if isinstance(target, nodes.Getitem) and isinstance(target.arg, nodes.Const) and target.arg.value == "content":
            return True
    return False


def _also_takes_strings(source: str) -> bool:
    return "is string" in source or "is not string" in source


def _mark_final(messages: list[dict[str, Any]]) -> str:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str) and content:
        messages[-1]["content"] = content + _CONTINUE_MARK
        return content
    if isinstance(content, list) and content:
        *head, last = content
        messages[-1]["content"] = [*head, {**last, "text": last["text"] + _CONTINUE_MARK}]
        return last["text"]
    raise TemplateRefusal("continue_final_message needs a last message with text to continue")


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0 or final.strip() not in text[:at]:
        raise TemplateRefusal("the chat template drops the final message's text, so it can't be continued")
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_MARK, at) else kept.rstrip()


def chat_template(tokenizer: Tokenizer, *, override: str | None = None) -> ChatTemplate | None:
    """The checkpoint's template (or the operator's own); None when there is none."""
    source = override if override is not None else tokenizer.chat_template
    return None if source is None else ChatTemplate(source, tokenizer.special)
