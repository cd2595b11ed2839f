"""Pages of int8, int4 and fp8 through the Triton kernels: what is stored, and attention over what is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_oracle import Case, attention_case, close

from kernels.interface import LayerKV
from kernels.quantized_kv import STORED, dequantize, quantize
from kernels.triton_ops import TritonOps

LEVELS = {"int8": 127, "int4": 7}
CASES = {
    "decode": ([1, 1, 1, 1], [0, 14, 15, 70]),
    "decode, split": ([1, 1, 1], [300, 40, 128]),
    "chunks": ([17, 33], [16, 0]),
    "mixed": ([1, 5, 1, 40], [63, 20, 64, 7]),
}


def narrow(case: Case, name: str) -> LayerKV:
    k, k_scale = quantize(case.before.k.float(), STORED[name])
    v, v_scale = quantize(case.before.v.float(), STORED[name])
    return LayerKV(k.contiguous(), v.contiguous(), k_scale, v_scale)


def opened(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    return dequantize(kv.k, kv.k_scale, torch.float32).double(), dequantize(kv.v, kv.v_scale, torch.float32).double()


def run(case: Case, kv: LayerKV, *, deterministic: bool = False) -> torch.Tensor:
    ops = TritonOps(case.qkv.device, deterministic=deterministic)
    return ops.attention(
        case.qkv.clone(), kv, case.meta, case.shape, case.q_norm, case.k_norm, case.cos, case.sin
    )  # fmt: skip


def read_back(case: Case, kv: LayerKV) -> Case:
    """The case with the history that the pages now hold."""
    k, v = (side.flatten(0, 1).cpu() for side in opened(kv))
    size, history = case.meta.page_size, []
    for table, length in zip(case.meta.block_table.cpu().long(), case.meta.kv_len_host, strict=True):
        at = torch.arange(length)
        where = table[at // size] * size + at % size
        history.append((k[where], v[where]))
    return replace(case, history=history)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize(("which", "deterministic"), [*((which, False) for which in CASES), ("mixed", True)])
def test_int8_and_int4(device, which: str, name: str, deterministic: bool) -> None:
    odd = which == "mixed"
    case = attention_case(device, *CASES[which], dim=64 if odd else 32, page=64 if odd else 16, qk_norm=not odd)
    kv = narrow(case, name)
    old = LayerKV(*(part.clone() for part in (kv.k, kv.v, kv.k_scale, kv.v_scale)))
    got = run(case, kv, deterministic=deterministic)
    for before, after in zip(vars(old).values(), vars(kv).values(), strict=True):
        assert torch.equal(before[case.untouched.to(device)], after[case.untouched.to(device)]), "another slot changed"
    stored = read_back(case, kv)
    for exact, kept, new in zip(case.history, stored.history, case.new_tokens(), strict=True):
        for want, have in zip(exact, kept, strict=True):
            step = want[-new:].abs().amax(-1, keepdim=True) / LEVELS[name]
            assert ((have[-new:] - want[-new:]).abs() <= step * 0.5001 + 1e-6).all(), "a new token is not in its bound"
    close(got, stored.want())


@pytest.mark.parametrize("name", LEVELS)
def test_a_chunk_sees_what_a_single_token_sees(device, name: str) -> None:
    """Deterministic: the same bits whether 7 tokens come at once or one by one."""
    case = attention_case(device, [7], [40])
    whole, pieces = narrow(case, name), narrow(case, name)
    together = run(case, whole, deterministic=True)
    apart = []
    for t in range(7):
        one = replace(case, qkv=case.qkv[t : t + 1], meta=case.slice(0, t, t + 1))
        apart.append(run(one, pieces, deterministic=True))
    assert torch.equal(together, torch.cat(apart))
    assert all(torch.equal(a, b) for a, b in zip(vars(whole).values(), vars(pieces).values(), strict=True))


@pytest.mark.parametrize("name", LEVELS)
def test_padding_writes_nothing_and_a_nan_shows(device, name: str) -> None:
    case = attention_case(device, [1, 1, 1], [20, 33, 5])
    kv = narrow(case, name)
    padded = replace(case.meta, slots=case.meta.slots.clone(), kv_len=case.meta.kv_len.clone())
    padded.slots[1], padded.kv_len[1] = -1, 0
    old = [part.clone() for part in (kv.k, kv.v, kv.k_scale, kv.v_scale)]
    page, offset = divmod(int(case.meta.slots[1]), case.meta.page_size)
    case.qkv[2, 3 + case.shape.num_heads * case.shape.head_dim] = float("nan")
    out = run(replace(case, meta=padded, k_norm=None, q_norm=None), kv)
    for before, after in zip(old, (kv.k, kv.v, kv.k_scale, kv.v_scale), strict=True):
        assert torch.equal(before[page, offset], after[page, offset])
    assert out[0].isfinite().all() and not out[2].isfinite().all()


@pytest.mark.parametrize("which", CASES)
def test_fp8(device, which: str) -> None:
    """The kernels of wide pages, which convert on the way. Values are such that rounding is exact: the interpreter
    loses the carry where rounding ends in the next power of two."""
    case = attention_case(device, *CASES[which], qk_norm=False)
    rounded = case.qkv.float().to(torch.float8_e4m3fn).float()
    case = replace(
        case, qkv=rounded.to(case.qkv.dtype), cos=torch.ones_like(case.cos), sin=torch.zeros_like(case.sin)
    ).refill(rounded.cpu())
    kv = narrow(case, "fp8")
    assert kv.k_scale is None
    got = run(case, kv)
    stored = read_back(case, kv)
    for exact, kept, new in zip(case.history, stored.history, case.new_tokens(), strict=True):
        assert all(torch.equal(want[-new:], have[-new:]) for want, have in zip(exact, kept, strict=True))
    close(got, stored.want())
