"""The five operations of a layer on an NVIDIA GPU: which Triton kernel, or cuBLAS, runs each of them.

Three regimes, by the number of tokens M:

    M = 1        matrix-vector kernels with norm, SiLU x gate, residual; 5 kernels a layer, 6 with split attention
    M <= 64      tensor-core kernels with deterministic split-K; the producer of h writes h * g and partial sum(h^2)
    above        cuBLAS, one norm kernel per product pair; SiLU x gate in its product's TMA kernel where that pays

The tuning table can move a single product from one regime to another; a consumer takes the residual stream in
whichever form its producer left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import triton_gated as gated
from kernels.interface import AttentionMeta, AttentionShape, Draw, LayerKV, Stream
from kernels.triton_common import Launcher, next_power_of_2
from kernels.triton_decode import decode_attention
from kernels.triton_gemm import SplitWorkspace, skinny_gemm
from kernels.triton_gemv import gemv
from kernels.triton_narrow import narrow_attention
from kernels.triton_norm import add_norm, embed, silu_mul
from kernels.triton_prefill import prefill_attention
from kernels.triton_rope import rope_write
from kernels.triton_sampling import best_tile, sample_logits
from kernels.tuning import (
    GemmConfig,
    PrefillConfig,
    Role,
    TuningTable,
    bucket_of,
    decode_attention_config,
    without_pdl,
)

DETERMINISTIC_GEMM = GemmConfig("dot", bn=32, bk=64, stages=4)
DETERMINISTIC_PREFILL = PrefillConfig(rows=64, block=64, stages=3, warps=4)


class TritonOps:
    """Implements ``kernels.interface.Ops``. One instance per stream: split-K workspaces are shared by its kernels.

    ``deterministic``: one configuration and one order of additions for every M, so that a row's result does not depend
    on what else is in the batch, on chunk borders or on cached prefixes. Slower; the default regimes differ in their
    last bits.
    ``linear_add`` above 64 tokens adds into ``residual.h`` in place: the residual stream has one owner."""

    def __init__(
        self,
        device: torch.device,
        *,
        table: TuningTable | None = None,
        deterministic: bool = False,
        launch: Launcher | None = None,
    ) -> None:
        self.device = device
        self.deterministic = deterministic
        self.launch = launch or Launcher(device)
        cuda = device.type == "cuda"
        if table is None:
            table = TuningTable.for_device(torch.cuda.get_device_name(device)) if cuda else TuningTable()
        self.table = table
        self.workspace = SplitWorkspace(device)
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
        self._configs: dict[tuple[str, int, int, int], GemmConfig] = {}
        self._descriptors: dict[int, TensorDescriptor] = {}
        self._record: dict[str, str] = {}
        """Product and class of sizes -> what ran it, and why; a text per kernel where a class has several."""
        self._side: torch.cuda.Stream | None = None

    @property
    def capturable(self) -> bool:
        """Decode reads lengths and pages on the device only."""
        return True

    @property
    def compiled(self) -> int:
        return self.launch.compiled

    def choices(self) -> dict[str, str]:
        return dict(self._record)

    def config(self, role: Role, n: int, k: int, m: int) -> GemmConfig:
        """Configuration of one product, chosen once per (role, shape, M) and recorded."""
        key = (role, n, k, m)
        found = self._configs.get(key)
        if found is None:
            found, why = self.table.choose(role, n, k, m)
            if self.deterministic:
                if n % 32 or k % 64:
                    raise ValueError(f"deterministic mode needs N % 32 = 0 and K % 64 = 0, got {role} N={n} K={k}")
                found, why = DETERMINISTIC_GEMM, "deterministic"
            if found.kind == "blas" and role == "gate_up" and self._can_gate(n, k) and self._gate_pays(n, k, m):
                found = GemmConfig("gated", bn=gated.BN, bk=gated.BK)
            if not self.launch.pdl_available:
                found = without_pdl(found)
            self._configs[key] = found
            self._note(f"{role} {n}x{k} M<={bucket_of(m) or next_power_of_2(m)}", f"{found.kind} ({why})")
        return found

    def _note(self, product: str, choice: str) -> None:
        noted = self._record.get(product)
        if noted is None or choice not in noted:
            self._record[product] = choice if noted is None else f"{noted}; {choice}"

    def _can_gate(self, n: int, k: int) -> bool:
        return self.launch.pdl_available and n % gated.BN == 0 and k % gated.BK == 0

    def _gate_pays(self, n: int, k: int, m: int) -> bool:
        """Its tiles are 128 tokens high, so sizes in between waste up to half of a second wave; cuBLAS has a tile for
        each size, and what it leaves to a kernel for SiLU x gate is small until the intermediate leaves the cache.
        Beyond, cuBLAS gains 5 to 12 % of the product, which is what that pass takes when K is about 3300."""
        return -(-m // gated.BM) * (n // gated.BN) <= self.programs or (m > 1024 and k < 3300)

    def _normed(self, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if x.normed is not None:
            return x.normed
        return add_norm(self.launch, x.h, None, norm, eps, scaled=False)[1]

    def _scaled(self, x: Stream, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input of a tensor-core product, and the sums to scale its rows by (None: it is normed already)."""
        if x.scaled is not None:
            return x.scaled, x.sumsq
        return self._normed(x, norm, eps), None

    def embed(self, ids: torch.Tensor, table: torch.Tensor, next_norm: torch.Tensor, eps: float) -> Stream:
        scaled = ids.shape[0] <= 64 or self.deterministic
        h, normed, sumsq = embed(self.launch, ids, table, next_norm, eps, scaled=scaled)
        return Stream(h, normed, sumsq) if scaled else Stream(h, normed=normed)

    def norm_linear(
        self, x: Stream, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        m = x.h.shape[0]
        n, k = weight.shape
        config = self.config("qkv", n, k, m)
        if config.kind not in ("gemv", "dot"):
            return F.linear(self._normed(x, norm, eps), weight, bias)
        y = torch.empty(m, n, dtype=x.h.dtype, device=x.h.device)
        if config.kind == "gemv":
            gemv(self.launch, config, x.h, weight, y, norm=norm, eps=eps, bias=bias)
        else:
            rows, sumsq = self._scaled(x, norm, eps)
            skinny_gemm(self.launch, config, self.workspace, rows, weight, y, eps=eps, sumsq=sumsq, bias=bias)
        return y

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: Stream, next_norm: torch.Tensor) -> Stream:
        m = x.shape[0]
        n, k = weight.shape
        config = self.config("add", n, k, m)
        if config.kind not in ("gemv", "dot"):
            h = residual.h.addmm_(x, weight.T)
            return Stream(h)
        h = torch.empty_like(residual.h)
        if config.kind == "gemv":
            gemv(self.launch, config, x, weight, h, residual=residual.h)
            return Stream(h)
        scaled = torch.empty_like(h)
        sumsq = torch.empty(m, n // config.bn, dtype=torch.float32, device=h.device)
        skinny_gemm(self.launch, config, self.workspace, x, weight, h, residual=residual.h, next_norm=next_norm,
                    scaled=scaled, sumsq_out=sumsq)  # fmt: skip
        return Stream(h, scaled, sumsq)

    def norm_mlp(self, x: Stream, norm: torch.Tensor, eps: float, gate_up: torch.Tensor) -> torch.Tensor:
        m = x.h.shape[0]
        n, k = gate_up.shape[0] // 2, gate_up.shape[1]
        config = self.config("gate_up", n, k, m)
        if config.kind == "blas" or (config.kind == "gated" and x.h.dtype.itemsize != 2):
            return silu_mul(self.launch, F.linear(self._normed(x, norm, eps), gate_up))
        y = torch.empty(m, n, dtype=x.h.dtype, device=x.h.device)
        if config.kind == "gemv":
            gemv(self.launch, config, x.h, gate_up, y, norm=norm, eps=eps, gated=True)
        elif config.kind == "gated":
            gated.gated_gemm(self.launch, self._normed(x, norm, eps), self._descriptor(gate_up), y,
                             programs=self.programs)  # fmt: skip
        else:
            rows, sumsq = self._scaled(x, norm, eps)
            skinny_gemm(self.launch, config, self.workspace, rows, gate_up, y, eps=eps, sumsq=sumsq, gated=True)
        return y

    def _descriptor(self, weight: torch.Tensor) -> TensorDescriptor:
        found = self._descriptors.get(weight.data_ptr())
        if found is None:
            found = self._descriptors[weight.data_ptr()] = gated.descriptor(weight, gated.BN, gated.BK)
        return found

    def attention(
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
        out = torch.empty(qkv.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        if kv.k_scale is not None:
            narrow_attention(
                self.launch, qkv, kv, meta, shape, q_norm, k_norm, cos, sin, out, splits=not self.deterministic
            )  # fmt: skip
            return out
        if meta.decode_only and not self.deterministic:
            rows, heads = meta.kv_len.shape[0], shape.num_kv_heads
            uneven = meta.uneven or meta.shared is not None
            config = decode_attention_config(rows, heads, meta.max_kv, uneven=uneven)
            if meta.chained:
                rope_write(self.launch, qkv, kv, meta, shape, q_norm, k_norm, cos, sin)
                q_norm = k_norm = None
            decode_attention(
                self.launch, config, qkv, kv, meta, shape, q_norm, k_norm, cos, sin, out, fused=not meta.chained
            )
            return out
        rope_write(self.launch, qkv, kv, meta, shape, q_norm, k_norm, cos, sin)
        if self.deterministic:
            prefill_attention(self.launch, DETERMINISTIC_PREFILL, qkv, kv, meta, shape, out, min_new=1)
            return out
        single, several = self._new_tokens(meta)
        beside = qkv.is_cuda and single > 0 and several > 0 and qkv.shape[0] > 64
        if several:
            chunks = self.prefill_config(qkv, kv, meta, shape)
            with self._beside() if beside else nullcontext():
                prefill_attention(self.launch, chunks, qkv, kv, meta, shape, out, min_new=2)
        if single:
            config = decode_attention_config(single, shape.num_kv_heads, meta.max_kv, uneven=True)
            config = without_pdl(config) if beside else config
            decode_attention(self.launch, config, qkv, kv, meta, shape, None, None, cos, sin, out, fused=False)
        if beside:
            torch.cuda.current_stream(self.device).wait_stream(self._side_stream())
        return out

    def prefill_config(
        self, qkv: torch.Tensor, kv: LayerKV, meta: AttentionMeta, shape: AttentionShape
    ) -> PrefillConfig:
        """How this step's chunks attend."""
        if meta.max_q * shape.num_heads // shape.num_kv_heads <= 64:
            return PrefillConfig(rows=32, block=64, stages=3, warps=2)
        config = self.table.prefill_config(qkv.shape[0])
        # The copy engine came with sm_90; and what narrow pages hold is not what the projection holds.
        able = self.launch.pdl_available and kv.k.dtype == qkv.dtype
        return config if able else replace(config, fresh=False, gather=False)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched inside runs beside what follows: chunks are bound by arithmetic, single tokens by memory,
        and neither fills the chip. Chunks go first, as their programs are few and long. The caller joins the two before
        it returns; buffers of the main stream outlive the join."""
        side = self._side_stream()
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            yield

    def _side_stream(self) -> torch.cuda.Stream:
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        return self._side

    @staticmethod
    def _new_tokens(meta: AttentionMeta) -> tuple[int, int]:
        """How many requests have one new token, and how many have more; found once per step."""
        if meta.extra is None:
            meta.extra = {}
        if "new_tokens" not in meta.extra:
            ends = meta.cu_q_host
            single = sum(b - a == 1 for a, b in pairwise(ends))
            meta.extra["new_tokens"] = (single, len(ends) - 1 - single)
        found: tuple[int, int] = meta.extra["new_tokens"]
        return found

    def norm_logits(
        self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, head: torch.Tensor
    ) -> torch.Tensor:
        x = self._rows(x, rows, norm, eps)
        s = x.h.shape[0]
        n, k = head.shape
        config = self.config("head", n, k, s)
        logits = torch.empty(s, n, dtype=torch.float32, device=x.h.device)
        if config.kind == "gemv":
            gemv(self.launch, config, self._normed(x, norm, eps), head, logits)
        elif config.kind == "dot":
            rows_in, sumsq = self._scaled(x, norm, eps)
            skinny_gemm(self.launch, config, self.workspace, rows_in, head, logits, eps=eps, sumsq=sumsq)
        else:
            return torch.mm(self._normed(x, norm, eps), head.T, out_dtype=torch.float32)
        return logits

    def norm_sample(
        self,
        x: Stream,
        rows: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        head: torch.Tensor,
        draw: Draw | None = None,
    ) -> torch.Tensor:
        """Ids [S] int32 chosen from each row's logits as ``draw`` says (None: greedy), -1 where a logit is not finite.
        Logits are not written where the product is ours."""
        x = self._rows(x, rows, norm, eps)
        s = x.h.shape[0]
        n, k = head.shape
        config = self.config("head", n, k, s)
        if config.kind not in ("gemv", "dot"):
            logits = torch.mm(self._normed(x, norm, eps), head.T, out_dtype=torch.float32)
            return sample_logits(self.launch, logits, draw)
        tiles = -(-n // config.bn)
        values = torch.empty(s, tiles, dtype=torch.float32, device=x.h.device)
        index = torch.empty(s, tiles, dtype=torch.int32, device=x.h.device)
        if config.kind == "gemv":
            gemv(self.launch, config, self._normed(x, norm, eps), head, values, index=index, draw=draw)
        else:
            rows_in, sumsq = self._scaled(x, norm, eps)
            skinny_gemm(self.launch, config, self.workspace, rows_in, head, values, eps=eps, sumsq=sumsq, index=index,
                        draw=draw)  # fmt: skip
        return best_tile(self.launch, values, index, draw, pdl=config.pdl)

    def _rows(self, x: Stream, rows: torch.Tensor | None, norm: torch.Tensor, eps: float) -> Stream:
        """The rows whose logits are asked, normed on their own; all rows pass unchanged. Deterministic mode norms
        separately in either case, so that both take the same roundings."""
        if rows is None and not self.deterministic:
            return x
        h = x.h if rows is None else x.h.index_select(0, rows)
        return Stream(h, normed=self._normed(Stream(h), norm, eps))
