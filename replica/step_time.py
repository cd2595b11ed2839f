"""Online fit of what a step costs, in the terms the placement policy prices with.

    ms = a * u + b * quad + t0 + k1 * context + k2 * running

summed over a step's rows: u new prefill tokens, quad = sum of u_i * (c_i + u_i / 2) with c_i tokens of context before
them (the attention's share), context = tokens attended by decoding rows, running = tokens of decoding rows (one each,
more where guesses are verified).

Recursive least squares in information form (Ljung, System Identification, 1999, section 11.2), with three departures.
Steps with and without prefill forget separately, so an hour of pure decoding does not erase what prefill costs. Errors
are relative, as predictions are judged in percent, and Huber-weighted, so a compile or a page fault moves little.
Coefficients are kept non-negative by an active set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FORGET = 0.995
"""Weight of a step after the next one of its kind: a memory of about 200 steps."""
HUBER = 3.0
"""Relative errors beyond so many mean absolute errors count linearly."""
SHORTEST = 2.0
"""A step of less than so large a part of the usual time counts no more than one of that: when a step is read back late,
what is left for the one after it is next to nothing, and its relative error would outweigh everything."""
WARM = 20
"""Steps of a kind before outliers are judged."""
BLOCK = (4, 64)
"""Steps taken in at once, at first and in the long run; a plain recursion would cost ten times as much per step."""
_SCALE = np.array([256.0, 256.0 * 1024.0, 1.0, 8192.0, 16.0])


@dataclass(slots=True)
class StepShape:
    """The regressors of one step."""

    prefill_tokens: int = 0
    prefill_quad: float = 0.0
    context: int = 0
    running: int = 0


class StepTimeModel:
    """``prior``: a, b, t0, k1, k2 in ms before anything was measured; one measured step outweighs it."""

    def __init__(self, prior: tuple[float, float, float, float, float] = (0.1, 0.0, 2.0, 0.0, 0.1)) -> None:
        self._prior = np.array(prior) * _SCALE
        self._moment = np.zeros((2, 5, 5))
        self._cross = np.zeros((2, 5))
        self._error = [1.0, 1.0]
        self._usual = [0.0, 0.0]
        """Milliseconds, fading."""
        self.num_steps = [0, 0]
        """Steps taken in without and with prefill."""
        self._theta = self._prior
        self._pending: list[tuple[float, ...]] = []
        self._block = BLOCK[0]
        self.on_decode: Callable[[int, float], None] | None = None
        """Hears of each step without prefill: its tokens and milliseconds."""

    def update(self, shape: StepShape, ms: float) -> None:
        """Learns from a step that took ``ms``; the work is done once per block of steps."""
        if self.on_decode is not None and not shape.prefill_tokens:
            self.on_decode(shape.running, ms)
        self._pending.append(
            (shape.prefill_tokens, shape.prefill_quad, 1.0, shape.context, shape.running, max(ms, 1e-3))
        )
        if len(self._pending) >= self._block:
            self.settle()

    def settle(self) -> None:
        """Takes in what waits for its block to be full."""
        if not self._pending:
            return
        self._block = min(BLOCK[1], max(BLOCK[0], sum(self.num_steps) // 4))
        block = np.array(self._pending)
        self._pending.clear()
        features, ms = block[:, :5] / _SCALE, block[:, 5]
        for kind, chosen in enumerate((block[:, 0] == 0, block[:, 0] > 0)):
            if chosen.any():
                self._learn(kind, features[chosen], ms[chosen])
        moment = self._moment.sum(0)
        ridge = np.diag(1e-4 * moment.diagonal() + 1e-12)
        self._theta = _non_negative(moment + ridge, self._cross.sum(0) + ridge @ self._prior)

    def _learn(self, kind: int, features: np.ndarray, ms: np.ndarray) -> None:
        usual = float(np.median(ms))
        self._usual[kind] += (1 - 0.95 ** len(ms)) * (usual - self._usual[kind]) if self._usual[kind] else usual
        size = np.maximum(ms, self._usual[kind] / SHORTEST)
        weights = 1.0 / (size * size) * FORGET ** np.arange(len(ms) - 1, -1, -1)
        if self.num_steps[kind] >= WARM:
            errors = np.abs(features @ self._theta - ms) / size
            limit = HUBER * self._error[kind]
            weights *= np.minimum(1.0, limit / np.maximum(errors, 1e-9))
            # The clip lets the scale follow a lasting change of regime within tens of steps, not a single spike.
            typical = float(np.minimum(errors, 3 * limit).mean())
            self._error[kind] += (1 - 0.95 ** len(ms)) * (typical - self._error[kind])
            self._error[kind] = max(self._error[kind], 0.01)
        elif self.num_steps[kind] + len(ms) >= WARM:
            self._error[kind] = 0.1
        fade = FORGET ** len(ms)
        self._moment[kind] = fade * self._moment[kind] + (features * weights[:, None]).T @ features
        self._cross[kind] = fade * self._cross[kind] + (weights * ms) @ features
        self.num_steps[kind] += len(ms)

    def predict(self, shape: StepShape) -> float:
        """Milliseconds, by the blocks taken in."""
        return float(_features(shape) @ self._theta)

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """a, b, t0, k1, k2 by the blocks taken in; milliseconds, non-negative. Zeros until WARM steps with prefill were
        seen: beside a peer's fit, a prior or a few points' noise would price a cold replica as the faster one."""
        if self.num_steps[1] < WARM:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        a, b, t0, k1, k2 = (self._theta / _SCALE).tolist()
        return a, b, t0, k1, k2


def _features(shape: StepShape) -> np.ndarray:
    raw = (shape.prefill_tokens, shape.prefill_quad, 1.0, shape.context, shape.running)
    return np.array(raw, dtype=np.float64) / _SCALE


def _non_negative(moment: np.ndarray, cross: np.ndarray) -> np.ndarray:
    """argmin x'Mx/2 - c'x subject to x >= 0, by dropping the most negative coefficient until none is left."""
    active = list(range(len(cross)))
    theta = np.zeros(len(cross))
    while active:
        solution = np.linalg.solve(moment[np.ix_(active, active)], cross[active])
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            theta[active] = solution
            break
        del active[worst]
    return theta
