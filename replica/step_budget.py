"""How many tokens the next step may have, so that a long prompt does not hold up those who decode for too long."""

from __future__ import annotations

from bisect import bisect_right
from math import sqrt

from replica.config import ResolvedConfig
from replica.step_time import StepTimeModel

QUIET = 18
"""While at most so many requests decode, a step may take chunk_size tokens, beyond only busy_chunk_size: a long step
delays everybody who decodes, and helps one prompt."""
SIZES = (256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Under a target, steps have one of these sizes, or chunk_size: steps captured on a GPU are padded to them, so a token
more would cost as much as the next size."""


class StepBudget:
    """Without a target ``chunk_size`` or ``busy_chunk_size`` tokens; with one, what the fitted step time lets fit into
    ``itl_target_ms`` where somebody decodes, but not less than the smallest size: prefill must go on, and all weights
    are read anyway."""

    def __init__(self, config: ResolvedConfig, step_time: StepTimeModel) -> None:
        self._most, self._busy, self._target = config.chunk_size, config.busy_chunk_size, config.itl_target_ms
        least = max(SIZES[0], config.max_batch_size)
        self._sizes = [size for size in SIZES if least <= size < self._most] + [self._most]
        self._step_time = step_time

    @property
    def varies(self) -> bool:
        return self._target is not None or self._busy != self._most

    @property
    def typical(self) -> int:
        """Of a step beside others, for estimates of how many a prompt takes."""
        return min(self._busy, self._most)

    def tokens(self, context: int, running: int, start: int) -> int:
        """``running`` tokens of decoding rows attend to ``context`` tokens in all; the next prompt in line has
        ``start`` tokens of context already."""
        if self._target is None:
            return self._most if running <= QUIET else self._busy
        if not running:
            return self._most
        a, b, t0, k1, k2 = self._step_time.coefficients
        if a <= 0:  # not enough steps with prefill yet
            return self._busy
        slack = max(0.0, self._target - t0 - k1 * context - k2 * running)
        linear = a + b * start  # ms = linear * u + b / 2 * u^2
        prompt = 2 * slack / (linear + sqrt(linear * linear + 2 * b * slack))
        return self._sizes[max(0, bisect_right(self._sizes, prompt + running) - 1)]
