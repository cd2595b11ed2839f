"""Sampling options as they cross the token plane. Imported through :mod:`router.wire`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from router.framing import ProtocolError

GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's limits (its LLParserLimits), equal on both sides: what a router compiled, a replica can run. They bound
a compilation to about a second, a mask to about 15 ms and a request's lexer to about 100 MB."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. Names and meanings are vLLM's; token ids only, no text.

    Order of application: allowed ids, bad words, min_tokens, logit_bias, penalties, grammar mask; then greedy when
    ``temperature`` is 0, else temperature, min_p, top-k, top-p and a draw whose noise is a counter function of
    (seed, absolute position).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """u64; the router draws one when the client gives none, so that a resumed request goes on identically."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the request when sampled: the checkpoint's eos ids (unless ignore_eos) and the client's own."""
    min_tokens: int = 0
    """Stop ids can't be sampled before so many tokens."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    """None: none; k >= 0: the chosen token's and the k likeliest."""
    prompt_logprobs: int | None = None
    grammar: tuple[str, str] | None = None
    """(kind, source): what the router compiled. The one kind is "llguidance"; see router.text.grammar."""

    def to_wire(self) -> dict[str, Any]:
        """Only what differs from the defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def from_wire(cls, raw: dict[str, Any]) -> Sampling:
        """Raises ProtocolError for an unknown field or wrong type: an option is honoured or refused, never dropped."""
        if not isinstance(raw, dict):
            raise ProtocolError(f"sampling must be a map, not {type(raw).__name__}")
        if unknown := {str(name) for name in raw} - _SAMPLING_FIELDS.keys():
            raise ProtocolError(f"unknown sampling fields {sorted(unknown)}")
        values = {name: _frozen(value) for name, value in raw.items()}
        for name, value in values.items():
            if not _SAMPLING_FIELDS[name](value):
                raise ProtocolError(f"sampling field {name} has the wrong type: {value!r:.80}")
        return cls(**values)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _is_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)


def _is_optional_int(value: Any) -> bool:
    return value is None or type(value) is int


def _is_bias(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and _is_ids(pair[:1]) and _is_number(pair[1]) for pair in value
    )


def _is_grammar(value: Any) -> bool:
    return value is None or (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )


_SAMPLING_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("max_tokens", "top_k", "min_tokens"), _is_int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _is_number),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _is_number),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _is_optional_int),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _is_ids),
    "seed": lambda value: _is_int(value) and 0 <= value < 1 << 64,
    "logit_bias": _is_bias,
    "bad_words": lambda value: isinstance(value, tuple) and all(_is_ids(word) for word in value),
    "grammar": _is_grammar,
}
