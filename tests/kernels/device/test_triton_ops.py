"""Two decoder layers through ``TritonOps`` in each of its regimes, against float64; and its deterministic mode."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import Case, attention_case, close, gated, rms_norm

from kernels.interface import AttentionMeta, LayerKV, Stream
from kernels.triton_ops import TritonOps
from kernels.tuning import (
    DecodeConfig,
    GemmConfig,
    TuningTable,
    decode_attention_config,
    fits,
    gemm_rule,
    uneven_contexts,
)

EPS = 1e-6
HIDDEN, INTER, VOCAB = 64, 128, 160
HEADS, KV_HEADS, DIM = 4, 2, 32


class Tiny:
    """Weights of two layers, and the same forward pass over ops and in float64."""

    def __init__(self, device: torch.device, bias: bool = False) -> None:
        width = (HEADS + 2 * KV_HEADS) * DIM
        mk = lambda *s: torch.randn(*s, device=device) * s[-1] ** -0.5  # noqa: E731
        near_one = lambda n: torch.rand(n, device=device) + 0.5  # noqa: E731
        self.table, self.head, self.final = mk(VOCAB, HIDDEN) * 8, mk(VOCAB, HIDDEN), near_one(HIDDEN)
        self.bias = mk(width) if bias else None
        self.layers = [
            (near_one(HIDDEN), mk(width, HIDDEN), mk(HIDDEN, HEADS * DIM), near_one(HIDDEN), mk(2 * INTER, HIDDEN),
             mk(HIDDEN, INTER))
            for _ in range(2)
        ]  # fmt: skip

    def hidden(self, ops: TritonOps, ids: torch.Tensor, case: Case, kv: list[LayerKV], meta: AttentionMeta) -> Stream:
        x = ops.embed(ids, self.table, self.layers[0][0], EPS)
        for i, (g1, qkv, o, g2, gate_up, down) in enumerate(self.layers):
            after = self.final if i else self.layers[1][0]
            y = ops.norm_linear(x, g1, EPS, qkv, self.bias)
            y = ops.attention(y, kv[i], meta, case.shape, case.q_norm, case.k_norm, case.cos, case.sin)
            x = ops.linear_add(y, o, x, g2)
            x = ops.linear_add(ops.norm_mlp(x, g2, EPS, gate_up), down, x, after)
        return x

    def oracle(self, ids: torch.Tensor, cases: list[Case]) -> torch.Tensor:
        """Final hidden state in float64; ``cases`` are filled layer by layer with that layer's own qkv."""
        h = self.table[ids.long()].double()
        for (g1, qkv, o, g2, gate_up, down), case in zip(self.layers, cases, strict=True):
            y = rms_norm(h, g1) @ qkv.double().T
            if self.bias is not None:
                y = y + self.bias
            y = case.refill(y.cpu()).want().to(h.device)
            h = h + y @ o.double().T
            h = h + gated(rms_norm(h, g2), gate_up) @ down.double().T
        return h


def copies(case: Case, n: int) -> list[LayerKV]:
    return [LayerKV(case.before.k.clone(), case.before.v.clone()) for _ in range(n)]


REGIMES = [([1], [30]), ([1, 1, 1], [0, 16, 45]), ([1] * 17, [3] * 17), ([40, 1, 30, 1], [0, 20, 7, 33])]


@pytest.mark.parametrize(("new", "prefix"), REGIMES)
@pytest.mark.parametrize("bias", [True])
def test_layers(device: torch.device, new: list[int], prefix: list[int], bias: bool) -> None:
    model, ops = Tiny(device, bias), TritonOps(device, table=TuningTable())
    case = attention_case(device, new, prefix, heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
    ids = torch.randint(0, VOCAB, (sum(new),), device=device, dtype=torch.int32)
    x = model.hidden(ops, ids, case, copies(case, 2), case.meta)
    want = model.oracle(ids, [case, case.twin()])
    close(x.h, want, 1e-4)
    rows = torch.tensor([s - 1 for s in case.meta.cu_q_host[1:]], device=device)
    logits = ops.norm_logits(x, None if case.meta.decode_only else rows, model.final, EPS, model.head)
    want_logits = rms_norm(want[rows], model.final) @ model.head.double().T
    close(logits, want_logits, 1e-4)
    got = ops.norm_sample(x, None if case.meta.decode_only else rows, model.final, EPS, model.head)
    top = want_logits.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert clear.any() and torch.equal(got.long()[clear], want_logits.argmax(-1)[clear])
    assert logits.dtype == torch.float32
    ops.workspace.check_invariants()
    kinds = {text.split()[0] for text in ops.choices().values()}
    assert ("gemv" in kinds) == (sum(new) == 1) and ("dot" in kinds) == (sum(new) > 1), kinds


@pytest.mark.parametrize("m", [1, 3])
def test_each_operation_takes_a_stream_from_an_unfused_producer(device: torch.device, m: int) -> None:
    model, ops = Tiny(device), TritonOps(device, table=TuningTable())
    g1, qkv, *_ = model.layers[0]
    h = torch.randn(m, HIDDEN, device=device)
    close(ops.norm_linear(Stream(h), g1, EPS, qkv, None), rms_norm(h, g1) @ qkv.double().T)
    close(ops.norm_mlp(Stream(h), g1, EPS, model.layers[0][4]), gated(rms_norm(h, g1), model.layers[0][4]))
    close(ops.norm_logits(Stream(h), None, g1, EPS, model.head), rms_norm(h, g1) @ model.head.double().T)


def test_deterministic_alone_in_a_crowd_and_in_chunks(device: torch.device) -> None:
    """One request decoded alone, beside others, and its token computed as the end of a prefill chunk: equal bits."""
    model, ops = Tiny(device), TritonOps(device, table=TuningTable(), deterministic=True)
    crowd = attention_case(device, [1, 20, 1], [9, 0, 17], heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
    ids = torch.randint(0, VOCAB, (22,), device=device, dtype=torch.int32)
    kv = copies(crowd, 2)
    together = model.hidden(ops, ids, crowd, kv, crowd.meta)
    rows = torch.tensor([0, 20, 21], device=device)
    logits = ops.norm_logits(together, rows, model.final, EPS, model.head)
    for r, (a, b) in enumerate(((0, 1), (1, 21), (21, 22))):
        for cut in (a, a + (b - a) // 2):
            parts = [(s, e) for s, e in ((a, cut), (cut, b)) if e > s]
            kv = copies(crowd, 2)
            for s, e in parts:
                x = model.hidden(ops, ids[s:e], crowd, kv, crowd.slice(r, s - a, e - a))
            assert torch.equal(x.h[-1], together.h[b - 1])
            alone = ops.norm_logits(x, torch.tensor([x.h.shape[0] - 1], device=device), model.final, EPS, model.head)
            assert torch.equal(alone[0], logits[r])


def test_choices_are_noted_by_classes_of_sizes(device: torch.device) -> None:
    """A prompt of a new length adds nothing; a class with several kernels names each once."""
    ops = TritonOps(device, table=TuningTable())
    ops.launch.pdl_available, ops.programs = True, 500
    for m in [*range(1, 4097), *range(1, 4097)]:
        ops.config("gate_up", 12288, 4096, m)
    noted = {key.removeprefix("gate_up 12288x4096 "): text for key, text in ops.choices().items()}
    assert list(noted) == [f"M<={2**i}" for i in (0, 4, 5, 6, 7, 8, 9, 10, 11, 12)]
    assert noted["M<=1"] == "gemv (rule)" and noted["M<=16"] == "dot (rule)"
    # Five tiles of 128 tokens fill a wave of 500 programs; up to 1024 more don't pay.
    assert noted["M<=512"] == "gated (rule)" and noted["M<=2048"] == "blas (rule)"
    assert noted["M<=1024"] == "gated (rule); blas (rule)"
    assert ops.config("gate_up", 3072, 1024, 2048).kind == "gated", "so short a product outlasts the pass by little"


def test_deterministic_refuses_shapes_it_cannot_tile(device: torch.device) -> None:
    with pytest.raises(ValueError, match="K % 64"):
        TritonOps(device, table=TuningTable(), deterministic=True).config("qkv", 64, 48, 1)


def test_a_shape_no_tile_divides_goes_to_blas_with_the_reason() -> None:
    config, why = TuningTable().choose("add", 1000, 576, 8)
    assert config.kind == "blas" and "N=1000" in why


def test_table_beats_rule_where_it_fits() -> None:
    table = TuningTable(gemm={"qkv:64x128": {16: GemmConfig("dot", bn=16, bk=64)}})
    assert table.choose("qkv", 64, 128, 9) == (GemmConfig("dot", bn=16, bk=64), "table")
    assert table.choose("qkv", 64, 128, 17)[1] == "rule"
    assert table.choose("qkv", 64, 128, 300)[0].kind == "blas"


@pytest.mark.parametrize("bucket", [1, 16, 32, 64, 128, 256, 0])
@pytest.mark.parametrize(("n", "k"), [(576, 576), (960, 576), (6144, 4096), (4096, 14336), (49152, 576)])
def test_rule_fits_the_shapes_we_name(n: int, k: int, bucket: int) -> None:
    for role in ("qkv", "add", "gate_up", "head"):
        assert fits(gemm_rule(role, n, k, bucket), n, k)


def test_decode_splits_cover_the_context_in_whole_blocks() -> None:
    for batch in (1, 2, 8, 16, 31, 32, 64, 256):
        for max_kv in (16, 1000, 4096, 131072):
            for deterministic in (False, True):
                for uneven in (False, True):
                    c: DecodeConfig = decode_attention_config(batch, 8, max_kv, deterministic, uneven)
                    assert c.split % c.block == 0 and (c.split or not uneven)


def test_one_long_context_among_short_ones_is_split() -> None:
    assert not uneven_contexts(32 * 1024, 1024, 8) and not uneven_contexts(64 * 4096, 4096, 8)
    assert uneven_contexts(31 * 500 + 4000, 4000, 8) and not uneven_contexts(255 * 500 + 4000, 4000, 8)
