"""Fields of OpenAI's or vLLM's requests that aren't served: refused with a reason unless they ask for nothing.

Fields that neither defines are ignored, and named in the ``x-everwarm-ignored-fields`` response header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from router.api.errors import bad_request, shown
from router.api.schemas.base import Request


@dataclass(frozen=True)
class Unserved:
    reason: str
    harmless: tuple[Any, ...] = ()
    """Values beside null that ask for nothing we don't do anyway."""
    ignored: bool = False
    """Accepted whatever its value: its own definition gives it no effect on the answer."""


_STATE = "answers are not stored"
_MEDIA = "only text is served"
_OLD_GRAMMAR = "use structured_outputs"

_GENERATION: dict[str, Unserved] = {
    "best_of": Unserved("use n", (1,)),
    "use_beam_search": Unserved("beam search is not served", (False,)),
    "length_penalty": Unserved("beam search is not served", (1, 1.0)),
    "spaces_between_special_tokens": Unserved("special tokens are joined as the model wrote them", (True,)),
    "kv_transfer_params": Unserved("prefixes are shared by the cluster itself"),
    "repetition_detection": Unserved("use repetition_penalty or stop"),
    "logits_processors": Unserved("code is not accepted in a request"),
    "vllm_xargs": Unserved("these are vLLM's own extensions"),
    "guided_json": Unserved(_OLD_GRAMMAR),
    "guided_regex": Unserved(_OLD_GRAMMAR),
    "guided_choice": Unserved(_OLD_GRAMMAR),
    "guided_grammar": Unserved(_OLD_GRAMMAR),
    "prompt_embeds": Unserved("prompts are text or token ids"),
    "service_tier": Unserved("there is one tier", ("auto", "default")),
    "store": Unserved(_STATE, (False,)),
    "prompt_cache_retention": Unserved("pages stay cached as long as there is room", ("in_memory", "in-memory")),
    "prompt_cache_options": Unserved("pages stay cached as long as there is room"),
    "moderation": Unserved("moderation is not served"),
    "prompt_cache_key": Unserved("the cache finds shared prefixes by itself", ignored=True),
    "safety_identifier": Unserved("for the provider's own checks", ignored=True),
}

COMPLETIONS: dict[str, Unserved] = {
    **_GENERATION,
    "suffix": Unserved("text can't be inserted before a suffix by this model", ("",)),
}

CHAT: dict[str, Unserved] = {
    **_GENERATION,
    "audio": Unserved(_MEDIA),
    "modalities": Unserved(_MEDIA, (["text"],)),
    "prediction": Unserved("predicted outputs are not served"),
    "web_search_options": Unserved("the server has no web access"),
    "functions": Unserved("use tools", ([],)),
    "function_call": Unserved("use tool_choice", ("none",)),
    "verbosity": Unserved("the served model has no such control", ("medium",)),
    "echo": Unserved("use /v1/completions", (False,)),
    "documents": Unserved("put them into the messages", ([],)),
    "chat_template": Unserved("the template is the operator's choice"),
    "media_io_kwargs": Unserved(_MEDIA),
    "mm_processor_kwargs": Unserved(_MEDIA),
}

_TURN = "nothing is stored; send the whole conversation as input"
RESPONSES: dict[str, Unserved] = {
    "previous_response_id": Unserved(_TURN),
    "conversation": Unserved(_TURN),
    "store": Unserved(_STATE, (False,)),
    "background": Unserved("answers come in the response itself", (False,)),
    "background_options": Unserved("answers come in the response itself"),
    "prompt": Unserved("prompt templates are not stored"),
    "truncation": Unserved("input that doesn't fit is refused", ("disabled",)),
    "max_tool_calls": Unserved("the client runs the tools"),
    "context_management": Unserved(_TURN),
    "service_tier": _GENERATION["service_tier"],
    "prompt_cache_retention": _GENERATION["prompt_cache_retention"],
    "prompt_cache_options": _GENERATION["prompt_cache_options"],
    "moderation": _GENERATION["moderation"],
    "prompt_cache_key": _GENERATION["prompt_cache_key"],
    "safety_identifier": _GENERATION["safety_identifier"],
    "image": Unserved(_MEDIA),
    "access_programs": Unserved("the server has none"),
}

MESSAGES: dict[str, Unserved] = {
    "container": Unserved("the server runs no code"),
    "mcp_servers": Unserved("the client runs the tools", ([],)),
    "context_management": Unserved("send the conversation as it is to be seen"),
    "service_tier": Unserved("there is one tier", ("auto", "standard_only")),
    "output_config": Unserved("the served model has no such control"),
    "output_format": Unserved("structured output is in /v1/chat/completions and /v1/responses"),
    "inference_geo": Unserved("the server is where it is"),
    "speed": Unserved("there is one speed", ("standard",)),
    "diagnostics": Unserved("the server has no such report"),
    "cache_control": Unserved("every prefix is cached", ignored=True),
    "user_profile_id": Unserved("for the provider's own accounts", ignored=True),
    "workspace_id": Unserved("for the provider's own accounts", ignored=True),
}

_VISIBLE = re.compile(r"[^!-+\--~]")


_SENT_BACK = frozenset(
    ("input.id", "input.status", "input.content.annotations", "input.content.logprobs", "messages.annotations")
)
"""What answers bring along and clients send back as input: defined, and without effect."""
_MOST_NAMES = 500
"""More don't fit into the header."""


class _Undefined:
    """Names the fields of one request's body that its models don't define. Of nested objects only those that say
    something: clients send back messages full of nulls and empty lists."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._fields: dict[type[Request], dict[str, str]] = {}
        """Attributes by the names that bodies have for them."""

    def walk(self, body: Mapping[str, Any], request: Request, prefix: str) -> None:
        """``request`` was read from ``body``, all of whose names begin with ``prefix``."""
        model = type(request)
        if (fields := self._fields.get(model)) is None:
            fields = self._fields[model] = {info.alias or name: name for name, info in model.model_fields.items()}
        for key, value in body.items():
            if (name := fields.get(key)) is not None:
                if isinstance(value, dict | list):
                    self._enter(value, getattr(request, name), f"{prefix}{key}.")
            elif not prefix:
                self.names.add(key)
            elif value is not None and value != [] and value != {} and f"{prefix}{key}" not in _SENT_BACK:
                self.names.add(f"{prefix}{key}")

    def _enter(self, value: dict[str, Any] | list[Any], read: Any, prefix: str) -> None:
        """Only what was read as models: a list of ids, or one that was rewritten, has no fields to name."""
        if isinstance(value, dict):
            value, read = [value], [read]
        if isinstance(read, list) and len(read) == len(value) and read and isinstance(read[-1], Request):
            for inner, request in zip(value, read, strict=True):
                if isinstance(request, Request) and isinstance(inner, dict):
                    self.walk(inner, request, prefix)


def check_unserved(body: Mapping[str, Any], table: Mapping[str, Unserved]) -> None:
    """Raises a 400 for a field that would have to change the answer and can't."""
    for name in table.keys() & body.keys():
        value, rule = body[name], table[name]
        if value is None or rule.ignored or any(type(value) is type(ok) and value == ok for ok in rule.harmless):
            continue
        allowed = f" (allowed: null, {', '.join(map(shown, rule.harmless))})" if rule.harmless else ""
        raise bad_request(
            f"{name} is not supported: {rule.reason}{allowed}; got {shown(value)}",
            param=name,
            code="unsupported_parameter",
        )


def ignored_header(body: Mapping[str, Any], request: Request, table: Mapping[str, Unserved]) -> str | None:
    """Value of the header that names the fields of ``body``, from which ``request`` was read, that nobody defined;
    those of nested objects as ``stream_options.name``. Visible ASCII, at most 1,000 characters."""
    undefined = _Undefined()
    undefined.walk(body, request, "")
    names = nsmallest(_MOST_NAMES, undefined.names - table.keys())
    return ",".join(_VISIBLE.sub("?", name)[:64] for name in names)[:1000] if names else None
