"""QK-norm, rotary positions, KV write and causal paged attention in plain torch.

Query heads that share a KV head are rows of one small product, never copies of the keys. Requests with one new token
are attended to together, in groups of similar length so that padding stays cheap; longer ones one by one, in blocks
of queries that see only the keys up to their own end.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.interface import AttentionMeta, AttentionShape, LayerKV
from kernels.quantized_kv import dequantize, raw, write

GROUP_COST_PAGES = 12
"""What one more group costs (two calls), in page gathers: a group splits only when it saves more padding."""
QUERY_BLOCK = 128
"""New tokens attended to at once; of 64, 128 and 256 the fastest on contexts of 0 to 1,024 tokens."""
GPU_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, torch's first choice on a Hopper: it plans each length of the context anew, 20 to 40 ms on the host,
and every step brings new lengths."""
MAX_MASK = 4 << 20
"""Elements of the causal mask; longer contexts take smaller blocks."""


@dataclass
class DecodeGroup:
    """``rows`` int64 [R] of the packed tokens, or a slice of them; ``pages`` [R * P]; ``mask`` [R, 1, 1, L], 0 or -inf,
    None when every request fills the first ``length`` gathered tokens."""

    rows: torch.Tensor | slice
    pages: torch.Tensor
    num_rows: int
    length: int
    mask: torch.Tensor | None


@dataclass
class Span:
    """A request with several new tokens, ``start:end`` of the packed ones, ``context`` tokens before them."""

    start: int
    end: int
    context: int
    pages: torch.Tensor


@dataclass
class CausalMask:
    """``values`` [block * per_kv, width]: row t * per_kv + g forbids, of the last ``block`` columns, those after t. The
    columns to its left forbid nothing, so a slice of them serves every context."""

    block: int
    values: torch.Tensor


@dataclass
class Plan:
    """Made once per step, used by every layer. cos, sin [M, 1, 2, head_dim / 2], the latter's first half negated."""

    cos: torch.Tensor
    sin: torch.Tensor
    groups: list[DecodeGroup]
    spans: list[Span]
    mask: CausalMask | None


class TorchAttention:
    """Callable with the signature of ``Ops.attention``. Keeps gather buffers, which grow to the largest step."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        qkv: torch.Tensor,
        kv: LayerKV,
        meta: AttentionMeta,
        shape: AttentionShape,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        plan = _plan(meta, shape, qkv, cos, sin)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        split = qkv.view(-1, heads + 2 * kv_heads, dim)
        joined = _joined(kv.k, kv.v)
        if q_norm is not None and k_norm is not None:
            qk = torch.empty_like(split[:, : heads + kv_heads])
            qk[:, :heads] = F.rms_norm(split[:, :heads], (dim,), q_norm, shape.eps)
            qk[:, heads:] = F.rms_norm(split[:, heads : heads + kv_heads], (dim,), k_norm, shape.eps)
            split[:, : heads + kv_heads] = rotate(qk, plan)
        elif qkv.dtype == torch.float32:
            rotate_(split[:, : heads + kv_heads], plan)
        else:
            split[:, : heads + kv_heads] = rotate(split[:, : heads + kv_heads], plan)
        if joined is not None and joined.dtype == qkv.dtype:
            joined.view(-1, 2 * kv_heads, dim).index_copy_(0, meta.slots, split[:, heads:])
        else:
            write(kv, meta.slots, split[:, heads : heads + kv_heads], split[:, heads + kv_heads :])
        with sdpa_kernel(GPU_BACKENDS) if qkv.is_cuda else nullcontext():
            return self._attend(split, kv, joined, plan, shape)

    def _attend(
        self, split: torch.Tensor, kv: LayerKV, joined: torch.Tensor | None, plan: Plan, shape: AttentionShape
    ) -> torch.Tensor:
        """split [M, heads + 2 kv, D], rotated and written -> [M, heads * D]."""
        m, heads, kv_heads, dim = split.shape[0], shape.num_heads, shape.num_kv_heads, shape.head_dim
        q = split[:, :heads].unflatten(1, (kv_heads, heads // kv_heads))
        if len(plan.groups) == 1 and plan.groups[0].num_rows == m:
            group = plan.groups[0]
            mixed = self._decode(q[group.rows], kv, joined, group, shape.scale)
            if isinstance(group.rows, slice):
                return mixed.reshape(m, heads * dim)
        out = torch.empty(m, kv_heads, heads // kv_heads, dim, dtype=split.dtype, device=split.device)
        for group in plan.groups:
            out[group.rows] = self._decode(q[group.rows], kv, joined, group, shape.scale)
        for span in plan.spans:
            if span.context == 0 and kv.k.dtype == split.dtype:  # else everybody reads what the pages made of it
                new = split[span.start : span.end]
                k, v = new[:, heads : heads + kv_heads], new[:, heads + kv_heads :]
            else:
                k, v = self._gather(kv, joined, span.pages, split.dtype)
            assert plan.mask is not None
            _prefill(q[span.start : span.end], k, v, span.context, plan.mask, shape.scale, out[span.start : span.end])
        return out.view(m, heads * dim)

    def _decode(
        self, q: torch.Tensor, kv: LayerKV, joined: torch.Tensor | None, group: DecodeGroup, scale: float
    ) -> torch.Tensor:
        """q [R, kv, group, D] -> the same; keys come as [R, kv, L, D] views of the gathered pages."""
        k, v = self._gather(kv, joined, group.pages, q.dtype)
        k = k.unflatten(0, (group.num_rows, -1))[:, : group.length].transpose(1, 2)
        v = v.unflatten(0, (group.num_rows, -1))[:, : group.length].transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)

    def _gather(
        self, kv: LayerKV, joined: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of the given pages -> k, v [len(pages) * page_size, kv, D], valid until the next gather."""
        k_scale, v_scale = kv.k_scale, kv.v_scale
        if joined is not None:
            scale = None
            if k_scale is not None and v_scale is not None:
                scales = _joined(k_scale, v_scale)
                assert scales is not None, "scales lie as their codes do"
                scale = self._select(2, scales, pages)
            both = _values(self._select(0, joined, pages), scale, dtype)
            half = both.shape[1] // 2
            return both[:, :half], both[:, half:]
        k = _values(self._select(0, kv.k, pages), None if k_scale is None else self._select(2, k_scale, pages), dtype)
        v = _values(self._select(1, kv.v, pages), None if v_scale is None else self._select(3, v_scale, pages), dtype)
        return k, v

    def _select(self, which: int, pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        need = pages.numel()
        buffer = self._buffers.get(which)
        if buffer is None or len(buffer) < need or buffer.shape[1:] != pool.shape[1:] or buffer.dtype != pool.dtype:
            size = 1 << (need - 1).bit_length()
            buffer = self._buffers[which] = torch.empty(size, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        torch.index_select(raw(pool), 0, pages, out=raw(buffer[:need]))
        return buffer[:need]


def _values(pages: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Gathered pages [P, page_size, heads, ...] by token, in the dtype of the computation."""
    return dequantize(pages.flatten(0, 1), None if scale is None else scale.flatten(0, 1), dtype)


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int, mask: CausalMask, scale: float, out: torch.Tensor
) -> None:
    """q and out [n, kv, group, D]; k, v [at least context + n, kv, D]."""
    n, kv_heads, per_kv, dim = q.shape
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    last = mask.values.shape[1] - mask.block
    for start in range(0, n, mask.block):
        end = min(start + mask.block, n)
        size, seen = end - start, context + end
        # Column `last` of the mask is this block's first own token.
        visible = mask.values[: size * per_kv, last - (seen - size) : last + size]
        if visible.is_cuda:
            visible = visible.contiguous()  # torch's kernels read 16 bytes of it at a time, wherever it begins
        rows = q[start:end].transpose(0, 1).reshape(1, kv_heads, size * per_kv, dim)
        mixed = F.scaled_dot_product_attention(rows, k[:, :, :seen], v[:, :, :seen], attn_mask=visible, scale=scale)
        out[start:end].copy_(mixed.view(kv_heads, size, per_kv, dim).transpose(0, 1))


def _joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """k and v [num_pages, page_size, heads, ...] as one tensor [num_pages, page_size, 2 heads, ...] where they are the
    halves of one: a single write and a single gather then serve both."""
    pages, size, heads, *rest = k.shape
    width = prod(rest)
    stride = k.stride()
    if stride[:3] != (size * 2 * heads * width, 2 * heads * width, width) or v.stride() != stride:
        return None
    if v.data_ptr() != k.data_ptr() + heads * width * k.element_size():
        return None
    return k.as_strided((pages, size, 2 * heads, *rest), stride)


def rotate_(x: torch.Tensor, plan: Plan) -> None:
    """x fp32 [M, heads, D], rotated in halves, in place."""
    halves = x.unflatten(-1, (2, -1))
    swapped = halves.flip(2)
    halves.mul_(plan.cos).addcmul_(swapped, plan.sin)


def rotate(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """x [M, heads, D] rotated in halves; computed in fp32."""
    halves = x.float().unflatten(-1, (2, -1))
    return (halves * plan.cos).addcmul_(halves.flip(2), plan.sin).flatten(-2).to(x.dtype)


def _plan(meta: AttentionMeta, shape: AttentionShape, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Plan:
    if meta.extra is None:
        meta.extra = {}
    plan = meta.extra.get("torch_attention")
    if plan is None:
        plan = meta.extra["torch_attention"] = _make_plan(meta, shape, qkv, cos, sin)
    assert isinstance(plan, Plan)
    return plan


def _make_plan(
    meta: AttentionMeta, shape: AttentionShape, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Plan:
    positions = meta.positions.long()
    c, s = cos.index_select(0, positions), sin.index_select(0, positions)
    plan = Plan(torch.stack((c, c), 1)[:, None], torch.stack((-s, s), 1)[:, None], [], [], None)
    bounds = list(pairwise(meta.cu_q_host))
    singles = [i for i, (a, b) in enumerate(bounds) if b - a == 1]
    for members in _groups([-(-meta.kv_len_host[i] // meta.page_size) for i in singles]):
        plan.groups.append(_decode_group([singles[m] for m in members], bounds, meta, qkv))
    for i, (a, b) in enumerate(bounds):
        if b - a > 1:
            length = meta.kv_len_host[i]
            pages = meta.block_table[i, : -(-length // meta.page_size)]
            plan.spans.append(Span(a, b, length - (b - a), pages))
    if plan.spans:
        longest = max(span.context + span.end - span.start for span in plan.spans)
        widest = max(span.end - span.start for span in plan.spans)
        plan.mask = _causal_mask(longest, widest, shape.num_heads // shape.num_kv_heads, qkv)
    return plan


def _causal_mask(longest: int, widest: int, per_kv: int, like: torch.Tensor) -> CausalMask:
    block = min(QUERY_BLOCK, widest)
    while block > 16 and block * per_kv * (longest + block) > MAX_MASK:
        block //= 2
    values = torch.full((block, longest + block), float("-inf"), dtype=like.dtype, device=like.device)
    return CausalMask(block, values.triu_(longest + 1).repeat_interleave(per_kv, 0))


def _groups(pages: list[int]) -> list[list[int]]:
    """Indices grouped by similar length. Each split saves more padded pages than GROUP_COST_PAGES."""
    pending = [sorted(range(len(pages)), key=lambda i: (pages[i], i))] if pages else []
    done: list[list[int]] = []
    while pending:
        group = pending.pop()
        longest = pages[group[-1]]
        saved, cut = max(((c * (longest - pages[group[c - 1]]), c) for c in range(1, len(group))), default=(0, 0))
        if saved > GROUP_COST_PAGES:
            pending += [group[:cut], group[cut:]]
        else:
            done.append(sorted(group))
    return done


def _decode_group(
    requests: list[int], bounds: list[tuple[int, int]], meta: AttentionMeta, qkv: torch.Tensor
) -> DecodeGroup:
    rows = [bounds[i][0] for i in requests]
    lengths = [meta.kv_len_host[i] for i in requests]
    length, device = max(lengths), qkv.device
    contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
    pages = meta.block_table[torch.tensor(requests, device=device), : -(-length // meta.page_size)].flatten()
    mask = None
    if min(lengths) < length:
        beyond = torch.arange(length, device=device) >= torch.tensor(lengths, device=device)[:, None]
        mask = torch.zeros(beyond.shape, dtype=qkv.dtype, device=device).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None]
    where = slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows, device=device)
    return DecodeGroup(where, pages, len(requests), length, mask)
