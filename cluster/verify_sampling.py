"""Every sampling option must change what comes out: one that is accepted and ignored would pass any comparison."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from replica import grammar
from replica.llm import LLM, Output
from router.wire import Sampling

COUNT = 12
_GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /[0-9]+(,[0-9]+)*/'


@dataclass(frozen=True)
class Effect:
    """Whether an option changed the output; ``how`` says what was compared."""

    option: str
    changed: bool
    how: str


def masks_for(vocab_size: int) -> grammar.Grammars | None:
    """Grammars over a made-up vocabulary of which every id spells something; None without llguidance."""
    if not grammar.available():
        return None
    spelled = ["0123456789,"[i] if i < 11 else f"<{i}>" for i in range(vocab_size)]
    return grammar.Grammars([text.encode() for text in spelled], vocab_size=vocab_size, eos_token_ids=[vocab_size - 1])


def effects(llm: LLM, prompt: list[int], *, with_grammar: bool) -> list[Effect]:
    """One entry per field of Sampling. Raises LookupError for a field that nobody wrote a check for."""
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": COUNT}
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": COUNT}
    seen: dict[str, Output] = {}

    def output(options: dict[str, Any]) -> Output:
        """Many options share a base."""
        if (key := repr(sorted(options.items()))) not in seen:
            seen[key] = _one(llm, prompt, options)
        return seen[key]

    cold = output(greedy).ids
    often = max(set(cold), key=cold.count)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "max_tokens": (greedy, {"max_tokens": 3}),
        "temperature": (greedy, drawn),
        "top_p": (drawn, {"top_p": 1e-6}),
        "top_k": (drawn, {"top_k": 1}),
        "min_p": (drawn, {"min_p": 1.0}),
        "seed": (drawn, {"seed": 8}),
        "stop_token_ids": (greedy, {"stop_token_ids": (cold[0],)}),
        "min_tokens": (greedy | {"stop_token_ids": (cold[0],)}, {"min_tokens": 5}),
        "frequency_penalty": (greedy | {"logit_bias": ((often, 50.0),)}, {"frequency_penalty": 20.0}),
        "presence_penalty": (greedy | {"logit_bias": ((often, 50.0),)}, {"presence_penalty": 100.0}),
        "repetition_penalty": (greedy | {"logit_bias": ((often, 50.0),)}, {"repetition_penalty": 1e4}),
        "logit_bias": (greedy, {"logit_bias": ((cold[0], -100.0),)}),
        "allowed_token_ids": (greedy, {"allowed_token_ids": ((cold[0] + 1) % llm.engine.runner.vocab_size,)}),
        "bad_words": (greedy, {"bad_words": ((cold[0],),)}),
        "logprobs": (greedy, {"logprobs": 2}),
        "prompt_logprobs": (greedy, {"prompt_logprobs": 2}),
        "grammar": (greedy, {"grammar": ("llguidance", _GRAMMAR)}),
    }
    found = []
    for option in fields(Sampling):
        if option.name not in cases:
            raise LookupError(f"sampling option {option.name!r} has no check in {__name__}")
        if option.name == "grammar" and not with_grammar:
            continue
        base, change = cases[option.name]
        before, after = output(base), output(base | change)
        found.append(Effect(option.name, _seen(before) != _seen(after), f"{_text(base)} against {_text(change)}"))
    return found


def _one(llm: LLM, prompt: list[int], options: dict[str, Any]) -> Output:
    out = llm.generate([prompt], Sampling(**options))[0]
    if out.error:
        raise RuntimeError(f"{options}: {out.error}")
    return out


def _seen(out: Output) -> tuple[Any, ...]:
    return tuple(out.ids), out.logprobs is None, out.prompt_logprobs is None


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value if name != 'grammar' else 'digits'}" for name, value in options.items())
