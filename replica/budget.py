"""How many tokens the next step may have."""

from __future__ import annotations

from replica.config import ResolvedConfig

SPREAD = 4
"""Steps over which a prompt is spread while others decode."""


def step_budget(config: ResolvedConfig, num_decoding: int, num_prompt: int) -> int:
    """``num_prompt``: tokens of all prompts under way or waiting, counted whole until each is done, so that a prompt's
    chunks stay equal and it ends as planned.

    A step that decodes reads all weights anyway, so up to ``chunk_floor`` tokens cost little more, and each further one
    what it would cost alone: prompts that come one at a time are spread, a backlog is worked off in full chunks."""
    if not num_decoding or config.prefill_priority == "high":
        return config.chunk_size
    return min(config.chunk_size, max(config.chunk_floor, num_decoding + num_prompt // SPREAD))
