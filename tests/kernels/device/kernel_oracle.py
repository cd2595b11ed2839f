"""References in float64 that share no code with the kernels, and tiny inputs for them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch

from kernels.interface import AttentionMeta, AttentionShape, LayerKV


def close(got: torch.Tensor, want: torch.Tensor, tol: float = 2e-5) -> None:
    """Relative error in the Frobenius norm; NaN never passes. 2e-5 suits fp32 sums of a few hundred terms."""
    assert got.shape == want.shape, (got.shape, want.shape)
    want = want.to(torch.float64).cpu()
    got = got.to(torch.float64).cpu()
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    assert error < tol, f"relative error {error:.2e}, allowed {tol:.0e}"


def rms_norm(x: torch.Tensor, g: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * g.double()


def gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin [T, D / 2]."""
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


@dataclass
class Case:
    """A packed batch with random pages behind it. ``history`` [R] lists of (k, v) fp64 [kv_len, kv_heads, D] after the
    step, ``q`` fp64 [M, heads, D] normed and rotated."""

    qkv: torch.Tensor
    kv: LayerKV
    meta: AttentionMeta
    shape: AttentionShape
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    q: torch.Tensor
    history: list[tuple[torch.Tensor, torch.Tensor]]
    untouched: torch.Tensor
    """bool [num_pages, page_size]: slots that the step must leave as they are."""
    before: LayerKV

    def want(self) -> torch.Tensor:
        out = []
        group = self.shape.num_heads // self.shape.num_kv_heads
        starts = self.meta.cu_q_host
        for r, (k, v) in enumerate(self.history):
            q = self.q[starts[r] : starts[r + 1]]
            new, total = q.shape[0], k.shape[0]
            s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.shape.scale
            seen = torch.arange(total)[None] <= (total - new + torch.arange(new))[:, None]
            p = torch.softmax(s.masked_fill(~seen, -math.inf), -1)
            out.append(torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1)))
        return torch.cat(out).reshape(self.qkv.shape[0], -1)

    def slice(self, request: int, start: int, end: int) -> AttentionMeta:
        """New tokens [start, end) of one request, as a batch of their own over the same pages."""
        m, first = self.meta, self.meta.cu_q_host[request] + start
        rows = slice(first, first + end - start)
        total = self.meta.kv_len_host[request] - self.new_tokens()[request] + end
        cu, lens = [0, end - start], [total]
        on = lambda values: torch.tensor(values, dtype=torch.int32, device=self.qkv.device)  # noqa: E731
        return AttentionMeta(on(cu), on(lens), m.block_table[request : request + 1], m.positions[rows], m.slots[rows],
                             m.page_size, end - start, total, end - start == 1, cu, lens)  # fmt: skip

    def twin(self) -> Case:
        """The same batch over the same old pages, for another layer."""
        kv = LayerKV(self.before.k.clone(), self.before.v.clone())
        return replace(self, kv=kv, history=[(k.clone(), v.clone()) for k, v in self.history])

    def refill(self, qkv: torch.Tensor) -> Case:
        """The batch with another projection (fp64, on the CPU): q, and the new keys and values in ``history``."""
        dim, heads, kv_heads = self.shape.head_dim, self.shape.num_heads, self.shape.num_kv_heads
        q, k, v = qkv.double().view(qkv.shape[0], -1, dim).split([heads, kv_heads, kv_heads], 1)
        pos = self.meta.positions.long().cpu()
        cos, sin = self.cos.cpu()[pos], self.sin.cpu()[pos]
        self.q = rope(rms_norm(q, self.q_norm.cpu()) if self.q_norm is not None else q, cos, sin)
        k = rope(rms_norm(k, self.k_norm.cpu()) if self.k_norm is not None else k, cos, sin)
        at = 0
        for (old_k, old_v), n in zip(self.history, self.new_tokens(), strict=True):
            old_k[-n:], old_v[-n:] = k[at : at + n], v[at : at + n]
            at += n
        return self

    def check_cache(self, tol: float = 2e-5) -> None:
        """Every new key and value is where it belongs, and no other slot has changed by one bit."""
        for side, now, old in ((0, self.kv.k, self.before.k), (1, self.kv.v, self.before.v)):
            mine = self.untouched.to(now.device)
            assert torch.equal(now[mine], old[mine])
            flat = now.flatten(0, 1)[self.meta.slots.long()]
            want = torch.cat([h[side][-n:] for h, n in zip(self.history, self.new_tokens(), strict=True)])
            close(flat, want, tol)

    def new_tokens(self) -> list[int]:
        c = self.meta.cu_q_host
        return [b - a for a, b in itertools.pairwise(c)]


def attention_case(
    device: torch.device,
    new: list[int],
    prefix: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page: int = 16,
    qk_norm: bool = True,
    dtype: torch.dtype = torch.float32,
    max_kv: int | None = None,
) -> Case:
    """Requests with ``new`` tokens after ``prefix`` cached ones, on shuffled pages. ``max_kv``: a bound larger than the
    longest context, as a captured graph has."""
    lens = [n + p for n, p in zip(new, prefix, strict=True)]
    need = [-(-n // page) for n in lens]
    pages = torch.randperm(sum(need) + 3)[: sum(need)] + 1
    table = torch.zeros(len(new), max(need) + 1, dtype=torch.int32)
    at = 0
    for r, n in enumerate(need):
        table[r, :n] = pages[at : at + n].int()
        at += n
    k = torch.randn(sum(need) + 4, page, kv_heads, dim).to(dtype)
    v = torch.randn_like(k)
    m = sum(new)
    qkv = torch.randn(m, (heads + 2 * kv_heads) * dim).to(dtype)
    angle = torch.rand(max(lens), dim // 2) * 6.28
    cos, sin = angle.cos(), angle.sin()
    q_norm = (torch.rand(dim) + 0.5).to(dtype) if qk_norm else None
    k_norm = (torch.rand(dim) + 0.5).to(dtype) if qk_norm else None
    pos = torch.cat([torch.arange(p, p + n) for n, p in zip(new, prefix, strict=True)])
    owner = torch.cat([torch.full((n,), r) for r, n in enumerate(new)])
    slots = table[owner, pos // page].long() * page + pos % page
    q, kn, vn = qkv.double().view(m, -1, dim).split([heads, kv_heads, kv_heads], 1)
    q = rope(rms_norm(q, q_norm) if q_norm is not None else q, cos[pos], sin[pos])
    kn = rope(rms_norm(kn, k_norm) if k_norm is not None else kn, cos[pos], sin[pos])
    full_k, full_v = k.double().flatten(0, 1), v.double().flatten(0, 1)
    full_k[slots], full_v[slots] = kn, vn
    history = []
    for r, n in enumerate(lens):
        idx = torch.arange(n)
        where = table[r, idx // page].long() * page + idx % page
        history.append((full_k[where], full_v[where]))
    untouched = torch.ones(k.shape[0] * page, dtype=torch.bool)
    untouched[slots] = False
    cu = [0]
    for n in new:
        cu.append(cu[-1] + n)
    to = lambda t: None if t is None else t.to(device)  # noqa: E731
    meta = AttentionMeta(
        cu_q=to(torch.tensor(cu, dtype=torch.int32)), kv_len=to(torch.tensor(lens, dtype=torch.int32)),
        block_table=to(table), positions=to(pos.int()), slots=to(slots), page_size=page, max_q=max(new),
        max_kv=max_kv or max(lens), decode_only=all(n == 1 for n in new), cu_q_host=cu, kv_len_host=lens,
    )  # fmt: skip
    shape = AttentionShape(heads, kv_heads, dim, 1e-6, dim**-0.5)
    kv = LayerKV(to(k), to(v))
    before = LayerKV(kv.k.clone(), kv.v.clone())
    return Case(to(qkv), kv, meta, shape, to(q_norm), to(k_norm), to(cos), to(sin), q, history,
                untouched.view(-1, page), before)  # fmt: skip
