"""QK-norm, rotary positions, KV write and causal paged attention in plain torch.

Query heads that share a KV head are rows of one small product, never copies of the keys. Requests with one new token
are attended to together, in groups of similar length so that padding stays cheap; longer ones one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from kernels.interface import AttentionMeta, AttentionShape, LayerKV

GROUP_COST_PAGES = 12
"""What one more group costs (three calls), in page gathers: a group splits only when it saves more padding."""
MAX_MASK = 4 << 20
"""Elements of an explicit causal mask; beyond, context and new tokens are attended to apart and merged."""


@dataclass
class DecodeGroup:
    """``rows`` [R] of the packed tokens, or a slice of them; ``pages`` [R * P]; ``mask`` [R, 1, 1, L], 0 or -inf."""

    rows: torch.Tensor | slice
    pages: torch.Tensor
    num_rows: int
    mask: torch.Tensor | None


@dataclass
class Span:
    """A request with several new tokens, ``start:end`` of the packed ones, ``context`` tokens before them."""

    start: int
    end: int
    context: int
    pages: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Plan:
    """Made once per step, used by every layer. cos, sin [M, 1, head_dim], the latter's first half negated."""

    cos: torch.Tensor
    sin: torch.Tensor
    groups: list[DecodeGroup]
    spans: list[Span]


class TorchAttention:
    """Callable with the signature of ``Ops.attention``. Keeps gather buffers, which grow to the largest step."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

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
        plan = self._plan(meta, shape, qkv, cos, sin)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        split = qkv.view(-1, heads + 2 * kv_heads, dim)
        qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
        if q_norm is not None and k_norm is not None:
            q_normed = F.rms_norm(qk[:, :heads], (dim,), q_norm, shape.eps)
            k_normed = F.rms_norm(qk[:, heads:], (dim,), k_norm, shape.eps)
            qk = torch.cat((q_normed, k_normed), dim=1)
        qk = rotate(qk, plan.cos, plan.sin)
        q, k = qk[:, :heads], qk[:, heads:]
        kv.k.view(-1, kv_heads, dim).index_copy_(0, meta.slots, k.to(kv.k.dtype))
        kv.v.view(-1, kv_heads, dim).index_copy_(0, meta.slots, v.to(kv.v.dtype))
        out = torch.empty(qkv.shape[0], kv_heads, heads // kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
        q = q.unflatten(1, (kv_heads, heads // kv_heads))
        for group in plan.groups:
            out[group.rows] = self._decode(q[group.rows], kv, group, shape)
        for span in plan.spans:
            self._prefill(q[span.start : span.end], k, v, kv, span, shape, out[span.start : span.end])
        return out.view(qkv.shape[0], heads * dim)

    def _decode(self, q: torch.Tensor, kv: LayerKV, group: DecodeGroup, shape: AttentionShape) -> torch.Tensor:
        """q [R, kv, group, D] -> the same; keys come as [R, kv, L, D] views of the gathered pages."""
        k = self._gather("k", kv.k, group.pages, q.dtype).unflatten(0, (group.num_rows, -1)).transpose(1, 2)
        v = self._gather("v", kv.v, group.pages, q.dtype).unflatten(0, (group.num_rows, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=shape.scale)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        span: Span,
        shape: AttentionShape,
        out: torch.Tensor,
    ) -> None:
        """q and out [n, kv, group, D]; k, v of all packed tokens [M, kv, D]."""
        n, kv_heads, per_kv, dim = q.shape
        if span.context == 0:
            k, v = k[span.start : span.end].transpose(0, 1), v[span.start : span.end].transpose(0, 1)
        else:
            length = span.context + n
            k = self._gather("k", kv.k, span.pages, q.dtype)[:length].transpose(0, 1)
            v = self._gather("v", kv.v, span.pages, q.dtype)[:length].transpose(0, 1)
        if span.mask is not None:
            rows = q.permute(1, 2, 0, 3).reshape(kv_heads, per_kv * n, dim)
            mixed = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=span.mask, scale=shape.scale)
        elif span.context == 0:
            mixed = F.scaled_dot_product_attention(
                q.permute(1, 2, 0, 3).reshape(1, kv_heads * per_kv, n, dim),
                k[None],
                v[None],
                is_causal=True,
                scale=shape.scale,
                enable_gqa=True,
            )
        else:
            mixed = _merged(q, k, v, span.context, shape.scale)
        out.copy_(mixed.view(kv_heads, per_kv, n, dim).permute(2, 0, 1, 3))

    def _gather(self, name: str, pool: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Tokens of the given pages -> [len(pages) * page_size, kv, D], valid until the next gather of ``name``."""
        need = pages.numel()
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < need or buffer.shape[1:] != pool.shape[1:] or buffer.dtype != pool.dtype:
            size = 1 << (need - 1).bit_length()
            buffer = self._buffers[name] = torch.empty(size, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        gathered = buffer[:need]
        torch.index_select(pool, 0, pages, out=gathered)
        return gathered.flatten(0, 1).to(dtype)

    def _plan(
        self, meta: AttentionMeta, shape: AttentionShape, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> Plan:
        if meta.extra is None:
            meta.extra = {}
        plan = meta.extra.get("torch_attention")
        if plan is None:
            plan = meta.extra["torch_attention"] = _make_plan(meta, shape, qkv, cos, sin)
        assert isinstance(plan, Plan)
        return plan


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [M, heads, D] rotated in halves; computed in fp32. cos, sin [M, 1, D], sin's first half negated."""
    xf = x.float().unflatten(-1, (2, -1))
    shape = (cos.shape[0], 1, 2, -1)
    return (xf * cos.view(shape)).addcmul_(xf.flip(2), sin.view(shape)).flatten(-2).to(x.dtype)


def _merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """Attention to the context and, causally, to the new tokens, merged by their log-sum-exps.

    q [n, kv, group, D]; k, v [kv, L, D] -> [kv, group * n, D]. CPU only: the call that returns the sums is."""
    n, kv_heads, per_kv, dim = q.shape
    heads = q.permute(1, 2, 0, 3).reshape(kv_heads * per_kv, n, dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    new_k, new_v = (x[:, context:].repeat_interleave(per_kv, 0) for x in (k, v))
    new, new_sum = flash(heads[None], new_k[None], new_v[None], 0.0, True, scale=scale)
    rows = heads.reshape(1, kv_heads, per_kv * n, dim)
    old, old_sum = flash(rows, k[None, :, :context], v[None, :, :context], 0.0, False, scale=scale)
    share = torch.sigmoid(old_sum.reshape(-1, n) - new_sum.reshape(-1, n))[..., None].to(q.dtype)
    return torch.lerp(new[0], old.reshape(new[0].shape), share).reshape(kv_heads, per_kv * n, dim)


def _make_plan(
    meta: AttentionMeta, shape: AttentionShape, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Plan:
    positions = meta.positions.long()
    c, s = cos.index_select(0, positions), sin.index_select(0, positions)
    plan = Plan(torch.cat((c, c), -1)[:, None], torch.cat((-s, s), -1)[:, None], [], [])
    bounds = list(pairwise(meta.cu_q_host))
    singles = [i for i, (a, b) in enumerate(bounds) if b - a == 1]
    for members in _groups([-(-meta.kv_len_host[i] // meta.page_size) for i in singles]):
        plan.groups.append(_decode_group([singles[m] for m in members], bounds, meta, qkv))
    for i, (a, b) in enumerate(bounds):
        if b - a > 1:
            plan.spans.append(_span(i, a, b, meta, shape, qkv))
    return plan


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
    num_pages = -(-max(lengths) // meta.page_size)
    device = qkv.device
    contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
    pages = meta.block_table[torch.tensor(requests, device=device), :num_pages].flatten()
    positions = torch.arange(num_pages * meta.page_size, device=device)
    mask = None
    if min(lengths) < len(positions):
        beyond = positions >= torch.tensor(lengths, device=device)[:, None]
        mask = torch.zeros(beyond.shape, dtype=qkv.dtype, device=device).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None]
    where = slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows, device=device)
    return DecodeGroup(where, pages, len(requests), mask)


def _span(i: int, start: int, end: int, meta: AttentionMeta, shape: AttentionShape, qkv: torch.Tensor) -> Span:
    length, n = meta.kv_len_host[i], end - start
    context, per_kv = length - n, shape.num_heads // shape.num_kv_heads
    pages = meta.block_table[i, : -(-length // meta.page_size)]
    mask = None
    if per_kv * n * length <= MAX_MASK or (context and qkv.device.type != "cpu"):
        mask = torch.full((n, length), float("-inf"), dtype=qkv.dtype, device=qkv.device).triu_(context + 1)
        mask = mask.repeat(per_kv, 1)[None, None]
    return Span(start, end, context, pages, mask)
