"""Log-probabilities as chat, text completions and vLLM's prompt_logprobs spell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.text.detokenizer import Detokenizer
from router.text.output import TokenRecord
from router.text.tokenizer import Tokenizer
from router.wire import Logprob

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON can't say."""


@dataclass(frozen=True)
class Speller:
    """Names tokens in logprobs."""

    tokenizer: Tokenizer
    as_ids: bool = False
    """``token_id:N`` instead of text."""

    def text(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.bytes_of(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """Like ``text``, but distinct for tokens that are not UTF-8 by themselves (keys of a mapping must be)."""
        raw = self.tokenizer.bytes_of(token_id)
        if self.as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self.tokenizer.bytes_of(token_id))
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}


def finite(value: float) -> float:
    return max(value, _FLOOR)


def chat_logprobs(records: Sequence[TokenRecord], speller: Speller, top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of chat."""
    content = []
    for record in records:
        if record.cut or record.logprob is None:
            continue
        entry = speller.chat_entry(record.token_id, record.logprob.token)
        entry["top_logprobs"] = [speller.chat_entry(i, value) for i, value in record.logprob.top[:top]]
        content.append(entry)
    return {"content": content, "refusal": None}


@dataclass
class LegacyLogprobs:
    """``choices[].logprobs`` of text completions, filled in order of the text."""

    speller: Speller
    top: int
    """So many of the likeliest per position."""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, logprob: Logprob | None, offset: int) -> None:
        self.tokens.append(self.speller.key(token_id))
        self.text_offset.append(offset)
        self.token_logprobs.append(None if logprob is None else finite(logprob.token))
        if logprob is None:
            self.top_logprobs.append(None)
            return
        top = {self.speller.key(i): finite(value) for i, value in logprob.top[: self.top]}
        # The sampled token is always among them, as OpenAI's own answers have it.
        top.setdefault(self.speller.key(token_id), finite(logprob.token))
        self.top_logprobs.append(top)

    def add_records(self, records: Sequence[TokenRecord], shift: int) -> None:
        for record in records:
            if not record.cut:
                self.add(record.token_id, record.logprob, record.offset + shift)

    def add_prompt(self, ids: Sequence[int], logprobs: Sequence[Logprob | None], text: str) -> None:
        """The echoed prompt. The engine gives the first token no probability: nothing precedes it."""
        for token_id, logprob, offset in zip(
            ids, logprobs, prompt_offsets(self.speller.tokenizer, ids, text), strict=True
        ):
            self.add(token_id, logprob, offset)

    def as_dict(self) -> dict[str, Any]:
        return {
            "text_offset": self.text_offset,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top_logprobs,
        }


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Where each prompt token begins in the prompt's text.

    Tokens that the tokenizer put before the text (a beginning-of-text token) begin at 0.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(detokenizer.feed(token_id))
    extra = length + len(detokenizer.finish()) - len(text)
    return [min(max(0, offset - extra), len(text)) for offset in offsets]


def prompt_logprobs(
    ids: Sequence[int], values: Sequence[Logprob | None], speller: Speller, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: per position, token id (as a string) -> {logprob, rank, decoded_token}."""
    out: list[dict[str, dict[str, Any]] | None] = []
    for token_id, value in zip(ids, values, strict=True):
        if value is None:
            out.append(None)
            continue
        ranked = {i: (p, rank) for rank, (i, p) in enumerate(value.top[:top], start=1)}
        ranked[token_id] = (value.token, value.rank)
        out.append(
            {
                str(i): {"logprob": finite(p), "rank": rank, "decoded_token": speller.text(i)}
                for i, (p, rank) in ranked.items()
            }
        )
    return out
