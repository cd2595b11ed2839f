"""Perplexity of the engine on English text that every Python interpreter carries: the language reference's topics."""

from __future__ import annotations

import math

from cluster.checkpoint import Checkpoint, load_card
from replica.llm import LLM
from router.wire import Sampling

WINDOW = 512
"""Tokens that are scored with nothing before them but themselves."""
_CHARACTERS_PER_TOKEN = 12
"""More than any tokenizer needs."""


def text_ids(checkpoint: Checkpoint, count: int) -> list[int]:
    """The first ``count`` tokens. Raises ValueError when the checkpoint has no tokenizer or the text is too short."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = load_card(checkpoint, ("bench",)).tokenizer
    ids = list(tokenizer.encode(text[: count * _CHARACTERS_PER_TOKEN], add_special_tokens=False))
    if len(ids) < count:
        raise ValueError(f"perplexity: the text has {len(ids)} tokens, {count} were asked for")
    return ids[:count]


def perplexity(engine: LLM, ids: list[int], window: int = WINDOW) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window; a window's first one
    is not scored. Raises RuntimeError when a request fails."""
    windows = [ids[at : at + window] for at in range(0, len(ids), window)]
    scored: list[float] = []
    for out in engine.generate(
        [w for w in windows if len(w) > 1], Sampling(temperature=0, max_tokens=1, prompt_logprobs=0)
    ):
        if out.prompt_logprobs is None:
            raise RuntimeError(f"perplexity: {out.error or 'no log-probabilities came back'}")
        scored += [entry.token for entry in out.prompt_logprobs if entry is not None]
    return math.exp(-sum(scored) / len(scored))
