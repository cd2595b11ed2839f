"""What all routes share: the cluster, the model, the options, and text work that must not block the loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.api.errors import ApiError, bad_request, retry_after
from router.api.metrics import Metrics
from router.api.options import ApiOptions
from router.backend import Backend
from router.text.card import ModelCard
from router.text.chat import ChatTemplate, chat_template
from router.text.grammar import Grammars
from router.text.grammar_process import Vocabulary
from router.text.memo import TokenMemo
from router.text.reasoning import END
from router.text.tools import Format, format_of
from router.tracing import Tracing


@dataclass
class Services:
    backend: Backend
    card: ModelCard
    options: ApiOptions
    metrics: Metrics
    template: ChatTemplate | None
    memo: TokenMemo
    grammars: Grammars
    tool_format: Format | None
    """None: the template teaches a format not known here."""
    reasons: bool
    """Answers may hold reasoning in <think> tags."""
    tracing: Tracing | None = None
    watchers: set[asyncio.Task[None]] = field(default_factory=set)
    """Held until they end: an event loop holds its tasks weakly."""
    draining: bool = False
    in_flight: int = 0

    @classmethod
    def build(cls, backend: Backend, card: ModelCard, options: ApiOptions) -> Services:
        tokenizer = card.tokenizer
        template = chat_template(tokenizer, override=options.chat_template)
        return cls(
            backend,
            card,
            options,
            Metrics(card.name, options.metric_prefix),
            template,
            TokenMemo(tokenizer, max_bytes=options.memo_bytes),
            Grammars(
                Vocabulary(
                    tokenizer.token_bytes, card.vocab_size, card.eos_token_ids, tuple(sorted(tokenizer.special_ids))
                )
            ),
            _tool_format(template, options),
            options.reasoning_parser == "think" or (options.reasoning_parser == "auto" and _knows_thinking(template)),
            Tracing(options.otlp_endpoint, card.name) if options.otlp_endpoint else None,
        )

    def check_open(self) -> None:
        """Raises a 503 while draining. Without a replica ``admit`` waits a moment: one may be about to come back."""
        if self.draining:
            raise ApiError(503, "this router is draining; try again", code="draining", headers=retry_after(1))

    def check_ready(self) -> None:
        """Raises a 503 unless a request sent now would be placed."""
        self.check_open()
        if not self.backend.ready():
            raise ApiError(503, "no replica is ready yet; try again", code="unavailable", headers=retry_after(1))

    @property
    def context(self) -> int:
        """Prompt + answer, tokens: the model's limit, or the smallest replica's where that is less."""
        limit = self.backend.limits().get("max_model_len")
        return self.card.max_model_len if not limit else min(limit, self.card.max_model_len)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str, bounded: bool = True) -> list[int]:
        """Ids of free text. When ``bounded``, raises a 400 for text that can't fit however it is tokenized."""
        if bounded:
            self._check_length(text, param)
        if len(text) <= self.options.tokenize_inline_chars:
            return self.card.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.card.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_prompt(self, text: str, *, bounded: bool = True) -> list[int]:
        """Ids of a rendered template, through the memo."""
        if bounded:
            self._check_length(text, "messages")
        missing = self.memo.missing(text)
        if sum(len(segment) for _, segment in missing) <= self.options.tokenize_inline_chars:
            return self.memo.encode(text)
        return self.memo.encode(text, await asyncio.to_thread(self.memo.tokenize, missing))

    def _check_length(self, text: str, param: str) -> None:
        # No token is longer than max_token_bytes, so such a text is too long before it is tokenized.
        floor = len(text) // self.card.tokenizer.max_token_bytes
        if floor >= self.context:
            raise bad_request(
                f"the prompt has {len(text)} characters, at least {floor} tokens; this model's context of "
                f"{self.context} tokens allows at most {self.context - 1}",
                param=param,
                code="context_length_exceeded",
            )


def _tool_format(template: ChatTemplate | None, options: ApiOptions) -> Format | None:
    if options.tool_parser != "auto":
        return options.tool_parser
    if template is None or not template.takes_tools:
        return "hermes"
    return format_of(template.source)


def _knows_thinking(template: ChatTemplate | None) -> bool:
    return template is not None and END in template.source
