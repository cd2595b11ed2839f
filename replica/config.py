"""Engine options, under the names of the design's table. Unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Switch = Literal["auto", "true", "false"]


class EngineConfig(BaseModel):
    """What one replica's engine does. Every "auto" is resolved once, at start, into ResolvedConfig and logged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations; auto: float32 on a CPU, bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | Literal["auto"] = "auto"
    """Torch threads on a CPU; auto: 1 when replicas share the cores, all cores when alone."""
    max_model_len: int | Literal["auto"] = "auto"
    """Longest prompt + output, tokens; auto: the checkpoint's, cut to what the page pool can hold."""

    kv_cache_paging: bool = True
    """false: reserve max_model_len contiguous pages per request (the baseline that paging replaces)."""
    page_size: Literal[16, 32, 64] = 16
    """Tokens per page."""
    max_num_pages: int | Literal["auto"] = "auto"
    """Pages in the pool; auto: from memory (GPU: gpu_memory_utilization; CPU: cpu_kv_gb)."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    cpu_kv_gb: float = Field(1.0, gt=0)
    """GiB of KV per replica on a CPU when max_num_pages is auto."""

    scheduler: Literal["continuous", "static"] = "continuous"
    """static: a batch runs to its end before the next starts (the baseline)."""
    max_batch_size: int | Literal["auto"] = "auto"
    """Requests in one step; auto: 256 on a GPU, 16 on a CPU."""
    max_prefill_batch: int = Field(8, ge=1)
    """Requests that may be prefilling in one step."""
    prefill_priority: Literal["low", "high"] = "low"
    """low: decodes first, prefill in what the token budget leaves; high: prefill first (TTFT over ITL)."""
    chunked_prefill: bool = True
    chunk_size: int | Literal["auto"] = "auto"
    """Token budget of a step; auto: 512-2048 on a GPU, 256 on a CPU."""
    long_prefill_tokens: int | Literal["auto"] = "auto"
    """At most so many tokens a step go to one long prompt while shorter ones wait; auto: half the chunk."""
    ageing_s: float = Field(5.0, gt=0)
    """A waiting request gains one priority level per so many seconds, so that long prompts finish too."""
    max_waiting: int = Field(1024, ge=1)
    """Requests that may wait; one more is refused as overloaded."""
    async_scheduling: bool = True
    """Launch step k+1 before step k's tokens are read back."""

    prefix_caching: bool = True
    prefix_cache_max_pages: int | Literal["auto"] = "auto"
    """Capacity of cached, unreferenced pages; auto: the whole pool."""

    fused_rmsnorm: Switch = "auto"
    fused_qkv: Switch = "auto"
    fused_silu: Switch = "auto"
    fused_attention: Switch = "auto"
    fused_precision: Literal["fp32"] = "fp32"
    """Accumulation inside fused kernels."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
