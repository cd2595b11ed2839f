"""Engine options, under the names of the design's table, and how every "auto" among them is decided.

Unknown keys are refused. :func:`resolve` makes the frozen :class:`ResolvedConfig` that the engine runs with; it
keeps one sentence per decision, which the log and ``/v1/engine`` show.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

log = logging.getLogger(__name__)


def _spell_switch(value: Any) -> Any:
    """A YAML or Python boolean means the same as its word."""
    return str(value).lower() if isinstance(value, bool) else value


def _spell_number(value: Any) -> Any:
    """Command lines hand over text, which a Literal of numbers would not accept."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _spell_off(value: Any) -> Any:
    """YAML reads a bare ``off`` as false."""
    return "off" if value is False or value is None else value


Count = Annotated[int, Field(ge=1)] | Literal["auto"]
Switch = Annotated[Literal["auto", "true", "false"], BeforeValidator(_spell_switch)]


class EngineConfig(BaseModel):
    """What one replica's engine does. Every "auto" is resolved once, at start, into ResolvedConfig and logged."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations; auto: float32 on a CPU, bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count = "auto"
    """Torch threads on a CPU; auto: 1 when replicas share the cores, all cores when alone."""
    max_model_len: Count = "auto"
    """Longest prompt + output, tokens; auto: the checkpoint's, cut to what the page pool can hold."""

    kv_cache_paging: bool = True
    """false: reserve max_model_len contiguous pages per request (the baseline that paging replaces)."""
    page_size: Annotated[Literal[16, 32, 64], BeforeValidator(_spell_number)] = 16
    """Tokens per page."""
    max_num_pages: Count = "auto"
    """Pages in the pool; auto: from memory (GPU: gpu_memory_utilization; CPU: cpu_kv_gb)."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    cpu_kv_gb: float = Field(1.0, gt=0)
    """GiB of KV per replica on a CPU when max_num_pages is auto."""
    quantization: Literal["none", "w8a8"] = "none"
    """w8a8: on a CPU, activations in int8 with a scale per token; weights too, with one per output channel, unless the
    checkpoint has blocks of its own: up to twice as fast, a little less exact."""
    kv_cache_dtype: Literal["auto", "fp8", "int8", "int4"] = "auto"
    """What pages hold. auto: the model's dtype, exact. int8, int4: one scale per token and KV head; fp8: e4m3 without
    scales. Narrower pages are more pages from the same memory, and other tokens now and then."""
    host_cache_gb: float = Field(0.0, ge=0)
    """GiB of host memory per replica for pages that the device evicts; they come back instead of being recomputed."""

    scheduler: Literal["continuous", "static"] = "continuous"
    """static: a batch runs to its end before the next starts (the baseline)."""
    max_batch_size: Count = "auto"
    """Requests in one step; auto: 256 on a GPU, 32 on a CPU."""
    max_prefill_batch: int = Field(8, ge=1)
    """Requests that may be prefilling in one step."""
    prefill_priority: Literal["low", "high"] = "low"
    """low: decodes first, prefill in what the token budget leaves; high: prefill first (TTFT over ITL), until somebody
    who decodes has gone without a token for ageing_s."""
    chunked_prefill: bool = True
    chunk_size: Count = "auto"
    """Most tokens of a step, at least max_batch_size; auto: on a GPU 4096 while few decode (2048 with less than 70
    GiB free), otherwise 2048 with less than 6 GB of weights, 640 with less than 20, and with more 1024 and 512; 512 on
    a CPU, where 256 would cost 8-13 % of the prefill rate (weights are read twice, products of 256 rows are slower)."""
    long_prefill_tokens: Count = "auto"
    """At most so many tokens a step go to one long prompt while shorter ones wait, and prompts of more are long where
    short and long ones take turns (chunk_size=auto on a GPU or with itl_target_ms, few decode); auto: half the chunk,
    at most 1024."""
    itl_target_ms: Annotated[Annotated[float, Field(gt=0)] | Literal["off"], BeforeValidator(_spell_off)] = "off"
    """Tokens of a step while others decode: as many as fit into this time, by the step times measured so far."""
    ageing_s: float = Field(5.0, gt=0)
    """A waiting request gains one priority level per so many seconds, so that long prompts finish too."""
    max_waiting: int = Field(1024, ge=1)
    """Requests that may wait; one more is refused as overloaded."""
    async_scheduling: bool = True
    """Launch step k+1 before step k's tokens are read back."""

    watermark: float = Field(0.01, ge=0, lt=1)
    """Share of the pages that admission leaves free for the growth of requests already running."""

    prefix_caching: bool = True
    prefix_cache_max_pages: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Capacity of cached, unreferenced pages; auto: the whole pool."""
    canary: bool = False
    """Keep a checksum of every indexed page and compare it in sweeps; a page that changed is dropped and the requests
    that hold it end with an error."""

    speculative: Annotated[Literal["off", "ngram", "draft"], BeforeValidator(_spell_off)] = "off"
    """ngram: draft what followed the same tokens earlier in the request; draft: a smaller model, or the first layers of
    this one. Drafts are verified several at a time; the output is the one of off."""
    speculative_tokens: int = Field(15, ge=1, le=15)
    """Drafts per request and step at most; how many are worth it is decided step by step."""
    speculative_ngram_min: int = Field(2, ge=1)
    speculative_ngram_max: int = Field(8, ge=1)
    """Equal tokens before the drafts: at least min; of several places the one with most, counted up to max."""
    speculative_model: str | None = None
    """draft: path of a model of the same tokenizer."""
    speculative_layers: Annotated[int, Field(ge=1)] | None = None
    """draft: so many first layers of the served model draft for it."""

    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """On a CPU in float32. native: kernels in C, compiled when the replica starts; auto: those where there is a C
    compiler; torch: none of them."""
    fused_rmsnorm: Switch = "auto"
    fused_qkv: Switch = "auto"
    fused_silu: Switch = "auto"
    fused_attention: Switch = "auto"
    fused_precision: Literal["fp32"] = "fp32"
    """Accumulation inside fused kernels."""
    deterministic: bool = False
    """On a GPU: one order of additions whatever else is in the batch, wherever chunks are cut and whatever is cached,
    so that outputs are equal bit for bit; slower. A CPU in float32 needs no switch for equal tokens."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What routers and replicas log."""


@dataclass(frozen=True)
class ModelFacts:
    """What the checkpoint says about itself, and what it takes."""

    max_position: int
    """Longest context it was trained for, tokens."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int = 0
    """In the dtype that will be served."""
    draft: ModelFacts | None = None
    """A second model with pages of its own."""

    def kv_bytes_per_token(self, kv_dtype: str) -> float:
        """Of a resolved ``kv_cache_dtype``, scales included."""
        per_head = self.head_dim * KV_ITEMSIZE[kv_dtype] + (4 if kv_dtype in ("int8", "int4") else 0)
        return 2 * self.num_layers * self.num_kv_heads * per_head + self._of_draft(kv_dtype)

    def _of_draft(self, kv_dtype: str) -> float:
        return 0.0 if self.draft is None else self.draft.kv_bytes_per_token(kv_dtype)


@dataclass(frozen=True)
class DeviceFacts:
    """What the engine runs on."""

    kind: Literal["cpu", "cuda"] = "cpu"
    cores: int = 1
    alone: bool = True
    """No other replica shares these cores."""
    memory_bytes: int = 0
    """Of the GPU, free before the weights are loaded: others may live on it."""
    kv_bytes: int | None = None
    """Memory for KV, where the runner measured it after loading; None: estimated."""


@dataclass(frozen=True)
class ResolvedConfig:
    """Engine options in force; fields mean what they mean in EngineConfig. ``reasons`` says how each auto came out."""

    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    threads: int
    max_model_len: int
    kv_cache_paging: bool
    page_size: int
    quantization: Literal["none", "w8a8"]
    kv_cache_dtype: str
    """float32, bfloat16, float16, fp8, int8 or int4."""
    num_pages: int
    """Pages the runner allocates, the null page included: max_num_pages after resolution."""
    page_bytes: int
    """Of a page on all layers."""
    host_cache_gb: float
    num_host_pages: int
    """Pages that host_cache_gb holds."""
    scheduler: Literal["continuous", "static"]
    max_batch_size: int
    max_prefill_batch: int
    prefill_priority: Literal["low", "high"]
    chunked_prefill: bool
    chunk_size: int
    busy_chunk_size: int
    """Tokens of a step while many decode."""
    long_prefill_tokens: int
    itl_target_ms: float | None
    """None: off."""
    ageing_s: float
    max_waiting: int
    async_scheduling: bool
    watermark: float
    prefix_caching: bool
    prefix_cache_max_pages: int
    canary: bool
    speculative: Literal["off", "ngram", "draft"]
    speculative_tokens: int
    speculative_ngram_min: int
    speculative_ngram_max: int
    speculative_model: str | None
    speculative_layers: int | None
    cpu_kernels: Literal["auto", "native", "torch"]
    fused_rmsnorm: str
    fused_qkv: str
    fused_silu: str
    fused_attention: str
    fused_precision: str
    deterministic: bool
    log_level: str
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def host_page_us(self) -> int:
        """Microseconds that one page takes between host and device: on an H200, page-locked memory moves at 55 GB/s
        after 12 us; on a CPU it is two copies at about 5 GB/s."""
        return 12 + self.page_bytes // 50_000 if self.device == "cuda" else 2 + self.page_bytes // 2_500

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)


MOST_CAPTURED = 2048
"""Tokens of the largest step that a GPU replays from a graph."""
STEPS = ((6e9, 4096, 2048), (2e10, 4096, 640), (float("inf"), 1024, 512))
"""Weights of less than so many bytes: tokens of a step on a GPU while few decode, and otherwise. On an H200 with 16 GB
of weights a step of 4096 tokens takes 0.1 s and one of 640 16 ms (docs/performance.md)."""
LARGE_GPU = 70 * 2**30
"""Free memory of a GPU on which a step may take more than 2048 tokens: smaller ones, and shares of one, are slower."""
MOST_OF_A_LONG_ONE = 1024
"""Of a prompt in one step while shorter ones wait, unless more is asked for."""
KV_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
_PASSED_ON = (
    "quantization", "kv_cache_paging", "page_size", "host_cache_gb", "canary", "scheduler", "max_prefill_batch",
    "prefill_priority", "chunked_prefill", "ageing_s", "max_waiting", "async_scheduling", "watermark", "speculative",
    "speculative_tokens", "speculative_ngram_min", "speculative_ngram_max", "speculative_model", "speculative_layers",
    "cpu_kernels", "fused_rmsnorm", "fused_qkv", "fused_silu", "fused_attention", "fused_precision", "deterministic",
    "log_level",
)  # fmt: skip


def resolve(config: EngineConfig, model: ModelFacts, device: DeviceFacts | None = None) -> ResolvedConfig:
    """Decides every "auto" and logs why. Raises ValueError, naming field, value and limit, for what can't hold."""
    device = device or DeviceFacts()
    if config.device not in ("auto", device.kind):
        raise ValueError(f"device: {config.device!r} was asked for; this process has {device.kind!r}")
    out: dict[str, Any] = {name: getattr(config, name) for name in _PASSED_ON}
    out["device"] = device.kind
    why: dict[str, str] = {}
    cuda = device.kind == "cuda"

    def pick(name: str, value: Any, reason: str) -> None:
        asked = getattr(config, name, "auto")
        out[name] = value if asked == "auto" else asked
        if asked == "auto":
            why[name] = f"{value}: {reason}"

    pick("dtype", "bfloat16" if cuda else "float32", f"the default on {device.kind}")
    if config.quantization == "w8a8" and (cuda or out["dtype"] != "float32"):
        raise ValueError(f"quantization: w8a8 runs on a CPU in float32, not on {device.kind} in {out['dtype']}")
    if config.cpu_kernels == "native" and (cuda or out["dtype"] != "float32"):
        raise ValueError(f"cpu_kernels: native runs on a CPU in float32, not on {device.kind} in {out['dtype']}")
    out["kv_cache_dtype"] = out["dtype"] if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    pick("threads", device.cores if device.alone else 1, "all cores" if device.alone else "replicas share the cores")
    _resolve_memory(config, model, device, out, why)
    _resolve_budget(config, model, device, out, why, pick)
    _resolve_prefix_cache(config, out, why, pick)
    _check_speculation(config, model)
    for name, reason in why.items():
        log.info("%s = %s", name, reason)
    return ResolvedConfig(**out, reasons=why)


def _resolve_memory(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, out: dict[str, Any], why: dict[str, str]
) -> None:
    page_bytes = model.kv_bytes_per_token(out["kv_cache_dtype"]) * config.page_size
    out["page_bytes"] = int(page_bytes)
    out["num_host_pages"] = int(config.host_cache_gb * 2**30 / page_bytes)
    if config.host_cache_gb and not out["num_host_pages"]:
        raise ValueError(
            f"host_cache_gb: {config.host_cache_gb} holds no page of {page_bytes / 2**10:.0f} KiB; "
            f"at least {page_bytes / 2**30:.2g} are needed"
        )
    if config.max_num_pages != "auto":
        pages = config.max_num_pages
    elif device.kv_bytes is not None:
        pages = int(device.kv_bytes / page_bytes)
        why["max_num_pages"] = f"{pages}: {device.kv_bytes / 2**30:.2f} GiB measured free after loading"
    elif device.kind == "cuda":
        weight_bytes = model.weight_bytes + (0 if model.draft is None else model.draft.weight_bytes)
        budget = device.memory_bytes * config.gpu_memory_utilization - weight_bytes - 2**30
        pages = int(budget / page_bytes)
        why["max_num_pages"] = f"{pages}: gpu_memory_utilization less weights and 1 GiB for activations"
    else:
        pages = int(config.cpu_kv_gb * 2**30 / page_bytes)
        why["max_num_pages"] = f"{pages}: cpu_kv_gb {config.cpu_kv_gb} at {page_bytes / 2**10:.0f} KiB a page"
    if pages < 2:
        raise ValueError(f"max_num_pages: {pages} is too few; at least 2 are needed (page 0 is the null page)")
    out["num_pages"] = pages
    room = (pages - 1) * config.page_size
    if config.max_model_len == "auto":
        out["max_model_len"] = min(model.max_position, room)
        why["max_model_len"] = f"{out['max_model_len']}: " + (
            "the checkpoint's" if model.max_position <= room else f"what {pages - 1} pages hold"
        )
        return
    out["max_model_len"] = config.max_model_len
    for limit, what in ((model.max_position, "the checkpoint's context"), (room, f"what {pages - 1} pages hold")):
        if config.max_model_len > limit:
            raise ValueError(f"max_model_len: {config.max_model_len} exceeds {limit}, {what}")


def _resolve_budget(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, out: dict[str, Any], why: dict[str, str], pick: Any
) -> None:
    cuda = device.kind == "cuda"
    target = config.itl_target_ms
    if target != "off" and not config.chunked_prefill:
        raise ValueError(f"itl_target_ms: {target:g} needs chunked_prefill; a prompt that is never cut takes its time")
    out["itl_target_ms"] = None if target == "off" else target
    batch = 256 if cuda else 32
    if config.chunk_size != "auto" and config.chunked_prefill:
        batch = min(batch, config.chunk_size)
    if not config.kv_cache_paging:
        regions = (out["num_pages"] - 1) // -(-out["max_model_len"] // config.page_size)
        batch = min(batch, regions)
    pick("max_batch_size", batch, f"the default on {out['device']}, within chunk_size and the pool")
    if config.chunked_prefill:
        _resolve_chunk(config, model, device, out, pick)
    else:
        if config.chunk_size != "auto":
            why["chunk_size"] = f"{out['max_model_len']}: chunked_prefill is off, so a prompt is never cut"
        out["chunk_size"] = out["busy_chunk_size"] = max(out["max_model_len"], out["max_batch_size"])
    if out["chunk_size"] < out["max_batch_size"]:
        raise ValueError(
            f"chunk_size: {out['chunk_size']} is below max_batch_size {out['max_batch_size']}; "
            "every running request needs one token a step"
        )
    if config.chunked_prefill:
        half = min(max(1, out["chunk_size"] // 2), MOST_OF_A_LONG_ONE)
        pick("long_prefill_tokens", half, f"half the chunk, at most {MOST_OF_A_LONG_ONE}")
    else:
        out["long_prefill_tokens"] = out["chunk_size"]
        why["long_prefill_tokens"] = f"{out['chunk_size']}: chunked_prefill is off, so a prompt is never cut"


def _resolve_chunk(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, out: dict[str, Any], pick: Any
) -> None:
    most, busy = 512, 512
    if device.kind == "cuda":
        most, busy = next(steps for limit, *steps in STEPS if model.weight_bytes < limit)
        if device.memory_bytes < LARGE_GPU:
            most = min(most, 2048)
    busy = max(busy, out["max_batch_size"])
    most = max(most, busy)
    reason = "by device and model size, at least max_batch_size"
    if most > busy:
        reason += f", while few decode; {busy} otherwise"
    if out["itl_target_ms"] is not None:
        most, reason = max(busy, MOST_CAPTURED), "the most of a step; itl_target_ms decides how much of it"
    pick("chunk_size", most, reason)
    out["busy_chunk_size"] = busy if config.chunk_size == "auto" else out["chunk_size"]


def _resolve_prefix_cache(config: EngineConfig, out: dict[str, Any], why: dict[str, str], pick: Any) -> None:
    out["prefix_caching"] = config.prefix_caching
    if config.prefix_caching and not config.kv_cache_paging:
        if "prefix_caching" in config.model_fields_set:
            raise ValueError("prefix_caching: true needs kv_cache_paging; contiguous reservations share no pages")
        out["prefix_caching"] = False
        why["prefix_caching"] = "false: kv_cache_paging is off and contiguous reservations share no pages"
    for name in ("host_cache_gb", "canary"):
        if getattr(config, name) and not out["prefix_caching"]:
            raise ValueError(f"{name}: {getattr(config, name)} needs prefix_caching; without it no page is kept")
    pick("prefix_cache_max_pages", out["num_pages"] - 1, "the whole pool")
    out["prefix_cache_max_pages"] = min(out["prefix_cache_max_pages"], out["num_pages"] - 1)


def _check_speculation(config: EngineConfig, model: ModelFacts) -> None:
    low, high, layers = config.speculative_ngram_min, config.speculative_ngram_max, config.speculative_layers
    if low > high:
        raise ValueError(f"speculative_ngram_min: {low} exceeds speculative_ngram_max {high}")
    sources = [name for name in ("speculative_model", "speculative_layers") if getattr(config, name) is not None]
    if config.speculative != "draft" and sources:
        raise ValueError(f"{sources[0]}: needs speculative=draft, not {config.speculative!r}")
    if config.speculative == "draft" and len(sources) != 1:
        raise ValueError("speculative: draft needs either speculative_model or speculative_layers")
    if layers is not None and layers >= model.num_layers:
        raise ValueError(f"speculative_layers: {layers}; fewer than the model's {model.num_layers} are needed")
