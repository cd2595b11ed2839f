"""Which implementation runs each operation, decided once from device, dtype, shape and the ``fused_*`` switches.

Candidates are whole :class:`~kernels.interface.Ops` objects in order of preference; each may decline an operation
and must say why. What was chosen, and why the ones before it were not, is kept for the log and ``/v1/engine``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels import native
from kernels.blocks import Blocks
from kernels.interface import AttentionMeta, AttentionShape, LayerKV, Stream
from kernels.reference import TorchOps

OPERATIONS = ("embed", "norm_linear", "attention", "linear_add", "norm_mlp", "norm_logits")
SWITCH_OF = {
    "embed": "fused_rmsnorm",
    "linear_add": "fused_rmsnorm",
    "norm_linear": "fused_qkv",
    "attention": "fused_attention",
    "norm_mlp": "fused_silu",
}
"""``norm_logits`` has no switch: it takes the first candidate that accepts."""
SWITCHES = tuple(sorted(set(SWITCH_OF.values())))
_READER = {"qkv": "norm_linear", "o": "linear_add", "down": "linear_add", "gate_up": "norm_mlp", "head": "norm_logits"}


@dataclass(frozen=True)
class Site:
    """What a choice may depend on. ``kv_dtype`` is what the pages hold: uint8 stands for packed int4."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    deterministic: bool = False
    """Results must not depend on the batch: only candidates that promise this may run."""
    quantization: str = "none"
    """What the products' weights become: none or w8a8."""
    cpu_kernels: str = "auto"
    """auto, native or torch."""


@dataclass(frozen=True)
class Candidate:
    """``decline(operation, site)`` returns why the operation can't run or doesn't pay here, or None."""

    name: str
    fused: bool
    make: Callable[[Site], Any]
    decline: Callable[[str, Site], str | None] = lambda operation, site: None


def _torch_candidate() -> Candidate:
    def decline(operation: str, site: Site) -> str | None:
        if site.deterministic and site.device.type == "cuda":
            return "cuBLAS orders its additions by the batch, which deterministic=true forbids"
        return None

    return Candidate("torch", False, lambda site: TorchOps(site.device, site.dtype), decline)


def _triton_candidate() -> Candidate:
    def make(site: Site) -> Any:
        from kernels.triton_ops import TritonOps

        return TritonOps(site.device, deterministic=site.deterministic)

    def decline(operation: str, site: Site) -> str | None:
        if site.device.type != "cuda":
            return f"Triton kernels need a CUDA device, this is {site.device.type}"
        if site.dtype != torch.bfloat16:
            return f"Triton kernels are written for bfloat16, this is {str(site.dtype).removeprefix('torch.')}"
        if operation == "attention" and (site.head_dim < 32 or site.head_dim & (site.head_dim - 1)):
            return f"head_dim {site.head_dim} is not a power of two of at least 32"
        return None

    return Candidate("triton", True, make, decline)


def _native_candidate() -> Candidate:
    def make(site: Site) -> Any:
        from kernels.native_ops import NativeOps

        return NativeOps(site.device, site.dtype)

    def decline(operation: str, site: Site) -> str | None:
        from kernels.native_ops import declines

        if site.device.type != "cpu" or site.dtype != torch.float32:
            return "native kernels are written for a CPU and float32"
        if site.cpu_kernels == "torch":
            return "cpu_kernels is torch"
        if isinstance(found := native.library(), native.Unavailable):
            return str(found)
        if operation == "attention":
            return declines(site.num_heads, site.num_kv_heads, site.head_dim, site.kv_dtype)
        return None

    return Candidate("native", False, make, decline)


def _int8_candidate() -> Candidate:
    def make(site: Site) -> Any:
        from kernels.native_ops import NativeOps
        from kernels.quantized import ROLES, Int8Ops

        library = None if site.cpu_kernels == "torch" else native.library()
        can = isinstance(library, ctypes.CDLL) and library.ew_has_codes()
        return Int8Ops(site.device, ROLES, NativeOps(site.device, site.dtype, quantizes=True) if can else None)

    def decline(operation: str, site: Site) -> str | None:
        if site.quantization != "w8a8":
            return f"quantization is {site.quantization}"
        if operation in ("embed", "attention"):
            return "only products are quantized"
        if site.device.type != "cpu" or site.dtype != torch.float32:
            return "w8a8 products are written for a CPU and float32"
        return None

    return Candidate("w8a8", False, make, decline)


def _check_native(site: Site) -> None:
    """Raises ValueError where native kernels were asked for by name and can't be had."""
    if site.cpu_kernels == "native" and (why := _native_candidate().decline("norm_linear", site)) is not None:
        raise ValueError(f"cpu_kernels: 'native' can't be honoured here: {why}")


def default_candidates(quantization: str = "none") -> tuple[Candidate, ...]:
    """In order of preference; the last accepts everything. Quantized products first where they are asked for: nobody
    else can read their weights."""
    first = (_int8_candidate(),) if quantization != "none" else ()
    return (*first, _triton_candidate(), _native_candidate(), _torch_candidate())


class Dispatch:
    """Implements ``kernels.interface.Ops``: every operation is bound to one candidate's."""

    def __init__(
        self, site: Site, switches: Mapping[str, str] | None = None, candidates: Sequence[Candidate] | None = None
    ) -> None:
        """``switches``: fused_* -> "auto", "true" or "false". Raises ValueError for an unknown switch or value, and
        for "true" where no fused implementation can run."""
        _check_native(site)
        candidates = default_candidates(site.quantization) if candidates is None else candidates
        switches = dict(switches or {})
        for name, value in switches.items():
            if name not in SWITCHES:
                raise ValueError(f"unknown switch {name!r}; switches are {', '.join(SWITCHES)}")
            if value not in ("auto", "true", "false"):
                raise ValueError(f"{name}: {value!r}; allowed are 'auto', 'true' and 'false'")
        made: dict[str, Any] = {}
        self._chosen: dict[str, tuple[Any, str]] = {}
        for operation in OPERATIONS:
            switch = SWITCH_OF.get(operation)
            candidate, reason = _choose(operation, site, switch, switches.get(switch or "", "auto"), candidates)
            if candidate.name not in made:
                made[candidate.name] = candidate.make(site)
            self._chosen[operation] = (made[candidate.name], f"{candidate.name} ({reason})")
        self._made = made
        self._bind()

    def _bind(self) -> None:
        chosen = {operation: ops for operation, (ops, _) in self._chosen.items()}
        self.embed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Stream] = chosen["embed"].embed
        self.norm_linear: Callable[[Stream, torch.Tensor, float, torch.Tensor, torch.Tensor | None], torch.Tensor] = (
            chosen["norm_linear"].norm_linear
        )
        self.attention: Callable[
            [
                torch.Tensor, LayerKV, AttentionMeta, AttentionShape, torch.Tensor | None, torch.Tensor | None,
                torch.Tensor, torch.Tensor,
            ],
            torch.Tensor,
        ] = chosen["attention"].attention  # fmt: skip
        self.linear_add: Callable[[torch.Tensor, torch.Tensor, Stream, torch.Tensor], Stream] = chosen[
            "linear_add"
        ].linear_add
        self.norm_mlp: Callable[[Stream, torch.Tensor, float, torch.Tensor], torch.Tensor] = chosen["norm_mlp"].norm_mlp
        self.norm_logits: Callable[[Stream, torch.Tensor | None, torch.Tensor, float, torch.Tensor], torch.Tensor] = (
            chosen["norm_logits"].norm_logits
        )

        # Only where the head's product is ours can ids be chosen without writing logits.
        self.norm_sample: Callable[..., torch.Tensor] | None = getattr(chosen["norm_logits"], "norm_sample", None)

        # Per row of logits, where the largest is and whether all are finite; None: torch has to do.
        self.largest: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = getattr(
            chosen["norm_logits"], "largest", None
        )

        # Only where one implementation multiplies and another that it knows attends can layers be one call.
        products = {chosen[operation] for operation in ("norm_linear", "linear_add", "norm_mlp")}
        offer = getattr(products.pop(), "layers_with", None) if len(products) == 1 else None
        self.layers: Callable[..., Stream | None] | None = offer and offer(chosen["attention"])

    @property
    def capturable(self) -> str | None:
        """Why a decode step can't be captured in a CUDA graph, or None: attention must not look at host lengths."""
        ops, why = self._chosen["attention"]
        return None if getattr(ops, "capturable", False) else f"attention is {why}"

    @property
    def compiled(self) -> int:
        """Distinct compiled kernels launched so far; constant once everything is warm."""
        return sum(getattr(ops, "compiled", 0) for ops in self._made.values())

    @property
    def quantized_bytes(self) -> int:
        """Of weights that an implementation keeps itself, in its own format."""
        return sum(getattr(ops, "quantized_bytes", 0) for ops in self._made.values())

    def prepare(self, role: str, weight: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """``weight`` as the implementation that will read it wants it. role: qkv, o, gate_up, down or head. ``blocks``:
        what the weight was decoded from, for those that can read it."""
        reader = self._chosen[_READER[role]][0]
        if blocks is not None and (prepare := getattr(reader, "prepare_blocks", None)) is not None:
            ready: torch.Tensor = prepare(role, weight, blocks)
            return ready
        prepare = getattr(reader, "prepare", None)
        return weight if prepare is None else prepare(role, weight)

    def choices(self) -> dict[str, str]:
        """operation -> "implementation (why)", and what each implementation recorded of its own, prefixed by name."""
        found = {operation: text for operation, (_, text) in self._chosen.items()}
        for name, ops in self._made.items():
            found.update({f"{name}: {key}": text for key, text in ops.choices().items()})
        return found


def _choose(
    operation: str, site: Site, switch: str | None, value: str, candidates: Sequence[Candidate]
) -> tuple[Candidate, str]:
    declined: list[str] = []
    for candidate in candidates:
        if value != "auto" and candidate.fused != (value == "true"):
            continue
        why_not = candidate.decline(operation, site)
        if why_not is None:
            reasons = [f"{switch}={value}"] if value != "auto" else []
            return candidate, "; ".join(reasons + declined) or "first choice"
        declined.append(f"not {candidate.name}: {why_not}")
    raise ValueError(
        f"{switch or operation}: {value!r} can't be honoured here: {'; '.join(declined) or 'no candidate'}"
    )
