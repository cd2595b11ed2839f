"""A chat request's tools: what the template is told, and what the answer is bound to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.errors import ApiError, bad_request, retry_after
from router.api.schemas.chat import ChatRequest
from router.api.schemas.tools import NamedToolChoice, Tool
from router.api.services import Services
from router.api.structured import asked
from router.text.grammar import GrammarBusy, GrammarError
from router.text.tool_grammar import Wish, tool_grammar
from router.text.tools import Format


@dataclass(frozen=True)
class ToolPlan:
    """Tools that the model may call in this answer."""

    format: Format
    tools: Sequence[Tool]
    forced: bool
    named: str | None
    """The one function that must be called."""
    parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def bound(self) -> bool:
        """Whether the answer needs a grammar."""
        return self.forced or any(tool.function.strict for tool in self.tools)


def plan_tools(services: Services, request: ChatRequest) -> ToolPlan | None:
    """None when the model is to call nothing. Raises a 400 for tools or choices that can't be served."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_request(f"tools: the function {twice!r} is defined twice", param="tools")
    if choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None and named not in names:
        raise bad_request(f"tool_choice: no tool is named {named!r}; there are {', '.join(names)}", param="tool_choice")
    if services.tool_format is None:
        raise bad_request(
            "tools: this model's chat template teaches a tool-call format that is not known here; an operator can "
            "choose one with tool_parser",
            param="tools",
            code="unsupported_parameter",
        )
    forced = named is not None or choice == "required"
    parallel = request.parallel_tool_calls is not False and named is None
    return ToolPlan(services.tool_format, tools, forced, named, parallel)


def json_answer(request: ChatRequest, plan: ToolPlan) -> Any:
    """Schema of the answer that a model may give instead of calling a tool; None when it must call, which leaves its
    format nothing to bind. Raises a 400 where one can't be told from the other."""
    wish = asked(request)
    if wish is None or plan.forced:
        return None
    param, kind, value = wish
    if kind not in ("json_object", "json_schema"):
        raise bad_request(
            f"{param} can't be combined with tools that the model may leave alone: only JSON can; set tool_choice to "
            "none or required",
            param=param,
            code="unsupported_parameter",
        )
    if plan.format == "llama3_json":
        raise bad_request(
            f"{param} can't be combined with tools that this model may leave alone: it writes its calls as JSON too, "
            "so an answer could pass for one; set tool_choice to none or required",
            param=param,
            code="unsupported_parameter",
        )
    if kind == "json_object":
        return {"type": "object"}
    return json.loads(value) if isinstance(value, str) else value


async def bind_tools(services: Services, plan: ToolPlan, *, thinks: bool, answer: Any = None) -> tuple[str, str] | None:
    """Grammar of the calls that were asked for; None when the model is free. ``answer``: see :func:`json_answer`.

    Schemas of strict tools are enforced or refused; a forced call's other schemas are enforced where they can be.
    """
    if not plan.bound and answer is None:
        return None
    names = (plan.named,) if plan.named is not None else tuple(tool.function.name for tool in plan.tools)
    forced = plan.forced or answer is not None
    wish = Wish(forced, plan.parallel, names, answer)
    strict = {t.function.name: t.function.parameters for t in plan.tools if t.function.strict}
    every = {t.function.name: t.function.parameters for t in plan.tools if t.function.strict or forced}

    async def compiled(schemas: Mapping[str, Mapping[str, Any] | None]) -> tuple[str, str]:
        source = tool_grammar(plan.format, schemas, wish, services.card.tokenizer, thinks=thinks)
        return await services.grammars.compile("ebnf", source)

    try:
        if every != strict:
            try:
                return await compiled(every)
            except GrammarError:
                pass
        return await compiled(strict)
    except GrammarError as error:
        raise bad_request(
            f"tools: a schema can't be enforced: {error}", param="tools", code="invalid_grammar"
        ) from None
    except GrammarBusy as error:
        raise ApiError(503, str(error), param="tools", code="overloaded", headers=retry_after(1)) from None
