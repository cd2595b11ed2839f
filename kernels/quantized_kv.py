"""KV pages narrower than the model's dtype: what is stored, what it costs, and the way in and out in plain torch.

    int8   codes int8  [..., D]       value = code * scale            scale = max |x| / 127
    int4   codes uint8 [..., D / 2]   value = (nibble - 8) * scale    scale = max |x| / 7
           byte i holds dimension i in its low nibble and D / 2 + i in its high one
    fp8    float8 e4m3 [..., D]       saturated at 448, no scale

One fp32 scale per token and KV head, so that a token's codes depend on that token alone: they are the same whatever is
computed beside it. Rounding is to nearest: |x - value| <= scale / 2. A vector that is not finite keeps a scale that is
not finite, so that the fault shows in the logits.
"""

from __future__ import annotations

import torch

from kernels.interface import LayerKV

STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
"""kv_cache_dtype -> dtype of the pages. Any other name is a torch dtype's."""
SCALED = ("int8", "int4")
FP8_MAX = 448.0


def stored_dtype(name: str) -> torch.dtype:
    """Of the pages, for a resolved ``kv_cache_dtype``."""
    found = STORED.get(name)
    if found is None:
        found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def stored_dim(name: str, head_dim: int) -> int:
    """Elements of a page's last axis. Raises ValueError where two nibbles don't make a byte."""
    if name != "int4":
        return head_dim
    if head_dim % 2:
        raise ValueError(f"kv_cache_dtype: int4 packs two values in a byte; head_dim {head_dim} is odd")
    return head_dim // 2


def quantize(x: torch.Tensor, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [..., D] -> codes in ``stored`` and fp32 scales [...], None where there are none."""
    if stored == torch.int8:
        codes, scale = _round(x, 127)
        return codes.to(torch.int8), scale
    if stored == torch.uint8:
        codes, scale = _round(x, 7)
        low, high = codes.add_(8).to(torch.uint8).chunk(2, -1)
        return low | (high << 4), scale
    if stored == torch.float8_e4m3fn:
        return x.clamp(-FP8_MAX, FP8_MAX).to(stored), None
    return x.to(stored), None


def _round(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers in [-levels, levels], fp32, and the scale."""
    x = x.float()
    scale = x.abs().amax(-1) / levels
    codes = torch.nan_to_num(x / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None])
    return codes.round_().clamp_(-levels, levels), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The values [..., D] in ``dtype``; computed in fp32."""
    if scale is None:
        return codes.to(dtype)
    if codes.dtype == torch.uint8:
        codes = torch.cat((codes & 15, codes >> 4), -1).to(torch.float32).sub_(8)
    return codes.to(torch.float32).mul_(scale[..., None]).to(dtype)


def write(kv: LayerKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """k, v [M, kv_heads, D] go to ``slots`` [M] of the pages, in the pages' dtype."""
    for new, pool, scales in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
        codes, scale = quantize(new, pool.dtype)
        _rows(pool).index_copy_(0, slots, raw(codes))
        if scale is not None and scales is not None:
            _rows(scales).index_copy_(0, slots, scale)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that can be indexed everywhere: float8 can't."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _rows(pool: torch.Tensor) -> torch.Tensor:
    """[num_pages, page_size, ...] by token."""
    return raw(pool).view(-1, *pool.shape[2:])
