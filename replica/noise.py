"""Sampling noise as a pure function of (seed, position, token id): no generator, no state, no order of draws.

Two rounds of multiply and xor-shift (the constants of Wellons' lowbias32) over the token id, keyed before each round
by 32 bits of splitmix64(seed, position). Integer work is exact, so every device draws the same bits; the logarithms
agree to a few units in the last place.
"""

from __future__ import annotations

import numpy as np
import torch

_M1, _M2, _M3 = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32)
_SIGN_AND_ONE = 1 - (1 << 31)
_BELOW_ONE = (1 - 2.0**-24) * 2.0**-31
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, on uint64 with wrap-around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key per drawn token: int32 [S, 2] from seeds uint64 [S] and absolute positions [S]."""
    with np.errstate(over="ignore"):
        mixed = _mix64(
            _mix64(seeds.astype(np.uint64) + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )
    return mixed[:, None].view(np.int32).reshape(-1, 2)


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits, logical on int32 (torch's shift drags the sign along)."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise fp32 [S, C] for int32 keys [S, 2] and token ids int32 [C] or [S, C].

    31 bits make a negative number in (-1, 0), the argument of log1p, whose small end keeps its relative precision: the
    largest noise is 22, so that a token of probability 1e-9 still gets its share. Always finite: one allowed token
    alone always wins.
    """
    x = (tokens * _M3) ^ keys[:, :1]
    x = _xor_shift(x, 16).mul_(_M1)
    x = _xor_shift(x, 15).bitwise_xor_(keys[:, 1:]).mul_(_M2)
    negative = x.bitwise_or_(_SIGN_AND_ONE).to(torch.float32).mul_(_BELOW_ONE)
    return negative.log1p_().neg_().log_().neg_()
