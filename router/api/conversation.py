"""From a chat request to a plan, and from its answer's text to what it means. Shared by every route that converses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from router.api.call import Call
from router.api.errors import ApiError, bad_request
from router.api.generation import make_plan
from router.api.reasoning_budget import ReasoningBudget
from router.api.run import Plan, Prompt, Run
from router.api.sampling import budget, truncated
from router.api.schemas.chat import ChatRequest
from router.api.services import Services
from router.api.structured import compile_grammar
from router.api.tooling import ToolPlan, bind_tools, json_answer, plan_tools
from router.text.assistant import AssistantParser
from router.text.chat import ChatTemplate, TemplateRefusal
from router.text.events import CallArguments, CallStart, Content, Event, Reasoning
from router.text.output import Piece
from router.text.reasoning import BEGIN, END, ReasoningParser, opened_by
from router.text.tool_prompt import spelled_out, with_tools
from router.text.tools import MARKERS, PARSERS


@dataclass(frozen=True)
class Conversation:
    """A chat request, ready to be admitted."""

    plan: Plan
    tools: ToolPlan | None
    opened: bool
    """The prompt ends inside a reasoning block."""
    reasons: bool
    """The answer may begin with reasoning."""
    hides_reasoning: bool

    @property
    def parsed(self) -> bool:
        """Whether the answer's text has to be read; otherwise it is content as it is."""
        return self.reasons or self.tools is not None

    def interpreter(self) -> Interpreter:
        """A fresh one for each choice."""
        return Interpreter(self)


class Interpreter:
    """One choice's pieces to events."""

    def __init__(self, conversation: Conversation) -> None:
        tools = conversation.tools
        reasoning = ReasoningParser(opened=conversation.opened) if conversation.reasons else None
        self._parser = AssistantParser(reasoning=reasoning, tools=PARSERS[tools.format]() if tools else None)
        self._one_call = tools is not None and not tools.parallel
        self._named = tools is not None and tools.named is not None
        self._hides = conversation.hides_reasoning
        self.num_calls = 0
        self.reasoned = False

    def feed(self, piece: Piece) -> list[Event]:
        events = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish()
        return [event for event in events if self._keep(event)]

    def _keep(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            self.reasoned = True
            return not self._hides
        if self._one_call and isinstance(event, CallStart | CallArguments) and event.index > 0:
            return False
        if isinstance(event, CallStart):
            self.num_calls += 1
        return not (isinstance(event, Content) and self._one_call and self.num_calls)

    @property
    def reasoning_open(self) -> bool:
        reasoning = self._parser.reasoning
        return reasoning is not None and reasoning.inside

    def finish_reason(self, piece: Piece) -> str | None:
        """As OpenAI has it: "tool_calls" for calls of the model's own will, "stop" for the one it was told to make."""
        calls = piece.finish_reason == "stop" and self.num_calls and not self._named
        return "tool_calls" if calls else piece.finish_reason


async def prepare(call: Call, request: ChatRequest, *, logprobs: int | None) -> Conversation:
    """Renders, tokenizes and binds a conversation. Raises a 400 naming what is at fault."""
    services = call.services
    tools = plan_tools(services, request)
    grammar = await compile_grammar(services, request)
    answer = json_answer(request, tools) if grammar is not None and tools is not None else None
    text = render(services, request, tools, free=grammar is None)
    prompt = await _tokenized(call, request, text)
    opened = services.reasons and opened_by(text)
    reasons = services.reasons and grammar is None
    if tools is not None:
        grammar = await bind_tools(services, tools, thinks=opened and reasons, answer=answer)
        if grammar is not None and request.min_tokens:
            raise bad_request("min_tokens can't be combined with forced or strict tools", param="min_tokens")
    plan = make_plan(call, request, [prompt], logprobs=logprobs, grammar=grammar)
    markers = MARKERS[tools.format] if tools else ()
    tokenizer = services.card.tokenizer
    shown = {tokenizer.token_id(marker) for marker in (*markers, *((BEGIN, END) if reasons else ()))}
    plan = replace(
        plan,
        text=replace(
            plan.text,
            shown_special=frozenset(i for i in shown if i in tokenizer.special_ids),
            watch_id=tokenizer.token_id(END) if reasons else None,
        ),
        reasoning=_budget(services, request, plan, opened) if request.thinking_token_budget else None,
    )
    return Conversation(plan, tools, opened, reasons, request.include_reasoning is False)


def _budget(services: Services, request: ChatRequest, plan: Plan, opened: bool) -> ReasoningBudget:
    """Raises a 400 where a limit on reasoning would not be exactly that."""
    tokenizer, param = services.card.tokenizer, "thinking_token_budget"
    end = tokenizer.token_id(END)
    if not services.reasons or end is None:
        raise bad_request(f"{param}: this model's answers have no reasoning that could be limited", param=param)
    if plan.sampling.grammar is not None or request.frequency_penalty or request.presence_penalty:
        # The answer goes on as a new request, which would neither know the grammar's state nor what was counted.
        with_what = "frequency_penalty, presence_penalty, forced or strict tools, or a format"
        raise bad_request(f"{param} can't be combined with {with_what}", param=param)
    closing = tokenizer.encode(f"\n{END}\n\n", add_special_tokens=False)
    return ReasoningBudget(request.thinking_token_budget or 0, tokenizer.token_id(BEGIN), end, tuple(closing), opened)


async def _tokenized(call: Call, request: ChatRequest, text: str) -> Prompt:
    services = call.services
    limits = budget(request, services.context)
    bounded = request.truncate_prompt_tokens is None
    if request.add_special_tokens:
        ids = await services.encode(text, add_special_tokens=True, param="messages", bounded=bounded)
    else:
        ids = await services.encode_prompt(text, bounded=bounded)
    ids = truncated(ids, request, limits)
    if not ids:
        raise bad_request("messages: the chat template renders them to an empty prompt", param="messages")
    return Prompt(ids, limits.for_prompt(len(ids)), text)


_OF_THE_REQUEST = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""What a template gets from the request's own fields, whatever ``chat_template_kwargs`` says."""


def render(services: Services, request: ChatRequest, tools: ToolPlan | None, *, free: bool = True) -> str:
    """The prompt's text. ``free``: no format binds the answer, so it may reason first."""
    template = services.template
    if template is None:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or start the server with one",
            code="no_chat_template",
        )
    for name in _OF_THE_REQUEST & (request.chat_template_kwargs or {}).keys():
        raise bad_request(
            f"chat_template_kwargs.{name}: is a field of the request itself, not a variable of the template",
            param=f"chat_template_kwargs.{name}",
        )
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
        )
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    messages: list[dict[str, Any]] = [message.model_dump(exclude_none=True) for message in request.messages]
    if "tool_calls" not in template.source:
        messages = spelled_out(messages)
    if tools is not None and not template.takes_tools:
        messages = with_tools(messages, tools.for_template)
    variables = _reasoning_variables(template, request, free, services.reasons)
    try:
        return template.render(
            messages,
            tools=tools.for_template if tools is not None and template.takes_tools else None,
            add_generation_prompt=opens,
            continue_final_message=continues,
            variables={**variables, **(request.chat_template_kwargs or {})},
        )
    except TemplateRefusal as error:
        raise bad_request(str(error), param="messages", code="template_error") from None


def _reasoning_variables(template: ChatTemplate, request: ChatRequest, free: bool, reasons: bool) -> Mapping[str, Any]:
    effort = request.reasoning_effort
    switch = "enable_thinking" in template.source
    if effort is None:
        # A format binds the answer from its first token on, so there is no room for reasoning before it.
        return {} if free or not switch else {"enable_thinking": False}
    variables: dict[str, Any] = {"enable_thinking": effort != "none"} if switch else {}
    if "reasoning_effort" in template.source:
        variables["reasoning_effort"] = effort
    if not variables and (reasons or effort != "none"):
        raise bad_request(
            f"reasoning_effort is {effort!r}, but this model's chat template has no such control",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return variables


def reasoning_tokens(run: Run, interpreters: Callable[[int], Interpreter | None]) -> int | None:
    """Tokens spent on reasoning, over all choices; None where the end of reasoning is not a token of its own."""
    if run.plan.text.watch_id is None:
        return None
    total = 0
    for choice in run.choices:
        interpreter = interpreters(choice.index)
        if interpreter is not None and (interpreter.reasoned or interpreter.reasoning_open):
            total += choice.output.watched_at or choice.output.num_tokens
    return total
