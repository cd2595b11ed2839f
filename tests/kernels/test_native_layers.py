"""All layers in one call: the same bits as operation by operation, whatever the shape, the step and the threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_native import CPU, HERE, ops, random_blocks  # noqa: F401
from test_reference import make_meta, random_pages

from kernels import native
from kernels.interface import LayerKV
from kernels.native_ops import FEW_ROWS, NativeOps
from replica.model import Decoder, ModelConfig, random_model, tiny_config

pytestmark = pytest.mark.skipif(not HERE, reason=f"{native.library()}")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "default model's": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576, "num_layers": 3},
    "odd": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 80, "hidden_size": 96, "intermediate_size": 96},
    "wide heads": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "hidden_size": 64, "num_layers": 1},
}
FAMILIES = {"llama": "llama", "default model's": "llama", "odd": "qwen2", "wide heads": "qwen3"}
STEPS = {
    "one token": [(200, 1)],
    "first token": [(0, 1)],
    "tokens": [(5, 1), (300, 1), (63, 1), (64, 1), (127, 1), (1, 1)],
    "chunk": [(0, 31)],
    "chunks and tokens": [(130, 7), (5, 1), (33, 2), (0, 9), (255, 1)],
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_decoder(config: ModelConfig, ops: NativeOps, bits: int) -> Decoder:  # noqa: F811
    """Random blocks as weights."""
    weights = random_model(config, 1)
    for layer in weights.layers:
        for role in ("qkv", "o", "gate_up", "down"):
            blocks, values = random_blocks(bits, *getattr(layer, role).shape)
            kept = ops.adopt(blocks) if ops._quantizes else ops.prepare_blocks(role, values, blocks)
            setattr(layer, role, kept)
    weights.prepared = True
    return Decoder(config, weights, ops, 512)


class OneByOne:
    """An implementation that has no ``layers``."""

    def __init__(self, ops: NativeOps) -> None:  # noqa: F811
        for name in ("embed", "norm_linear", "attention", "linear_add", "norm_mlp"):
            setattr(self, name, getattr(ops, name))


class Step:
    """Random tokens, and pages that hold their context."""

    def __init__(self, config: ModelConfig, requests: list[tuple[int, int]]) -> None:
        self.meta, num_pages = make_meta(requests)
        self.heads = config.num_kv_heads
        torch.manual_seed(3)
        self.kv = [random_pages(num_pages, self.heads, config.head_dim, True) for _ in range(config.num_layers)]
        self.ids = torch.randint(0, config.vocab_size, (self.meta.cu_q_host[-1],))

    def run(self, decoder: Decoder, rows: list[int] | None) -> list[torch.Tensor]:
        """The residual stream and the pages of every layer, which are copies."""
        pages = [LayerKV(*torch.cat((p.k, p.v), 2).split(self.heads, 2)) for p in self.kv]
        self.meta.extra = None
        out = decoder.hidden(
            self.ids, pages, self.meta, None if rows is None else torch.tensor(rows, dtype=torch.int64)
        )
        return [out.h, *(p.k for p in pages), *(p.v for p in pages)]


def both_ways(decoder: Decoder, requests: list[tuple[int, int]], rows: list[int] | None) -> list[list[torch.Tensor]]:
    step, whole = Step(decoder.config, requests), decoder.ops
    found = [step.run(decoder, rows)]
    decoder.ops = OneByOne(whole)  # type: ignore[arg-type, assignment]
    found.append(step.run(decoder, rows))
    decoder.ops = whole
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_layers_in_one_call_are_the_operations_one_by_one(ops: NativeOps, step: str, shape: str, bits: int) -> None:  # noqa: F811
    decoder = make_decoder(tiny_config(FAMILIES[shape], **SHAPES[shape]), ops, bits)
    calls = count_calls(ops)
    tokens = sum(new for _, new in STEPS[step])
    for rows in (None, [tokens - 1], sorted(random.Random(tokens).sample(range(tokens), (tokens + 1) // 2)), []):
        whole, apart = both_ways(decoder, STEPS[step], rows)
        assert all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))
        assert whole[0].isfinite().all() and len(whole[0]) == (tokens if rows is None else len(rows))
    assert calls == ["ew_layers"] * 4


def test_where_nothing_is_sampled_the_last_layer_ends_with_its_keys_and_values(ops: NativeOps) -> None:  # noqa: F811
    decoder = make_decoder(tiny_config(num_layers=1), ops, 4)
    step = Step(decoder.config, STEPS["chunk"])
    step.run(decoder, None)
    gated = ops._room("gated", 1)
    gated.fill_(-7.0)
    step.run(decoder, [])
    assert (gated == -7.0).all(), "its gates were computed for nobody"
    step.run(decoder, [0])
    assert not (gated == -7.0).all()


def test_no_token_at_all(ops: NativeOps) -> None:  # noqa: F811
    decoder = make_decoder(tiny_config(), ops, 4)
    assert len(Step(decoder.config, [(8, 0)]).run(decoder, None)[0]) == 0


def count_calls(ops: NativeOps) -> list[str]:  # noqa: F811
    """What is called from now on, of whole layers."""
    library, calls = ops._native, []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name == "ew_layers":
                calls.append(name)
            return getattr(library, name)

    ops._native = Counting()  # type: ignore[assignment]
    return calls


@pytest.fixture
def quantizing() -> NativeOps:
    if not native.library().ew_has_codes():  # type: ignore[union-attr]
        pytest.skip("no VNNI here")
    return NativeOps(CPU, torch.float32, quantizes=True)


@pytest.mark.parametrize("step", [*STEPS, "long"])
def test_rounded_activations_too_at_any_number_of_rows(quantizing: NativeOps, step: str) -> None:
    requests = {**STEPS, "long": [(64, 190), (300, 1), (0, 40)]}[step]
    for shape in SHAPES:
        decoder = make_decoder(tiny_config(FAMILIES[shape], **SHAPES[shape]), quantizing, 4)
        whole, apart = both_ways(decoder, requests, [0])
        assert all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))


def test_many_rows_and_weights_without_blocks_go_operation_by_operation(ops: NativeOps) -> None:  # noqa: F811
    decoder = make_decoder(tiny_config(), ops, 4)
    calls = count_calls(ops)
    both_ways(decoder, [(0, FEW_ROWS + 1)], None)
    assert not calls
    plain = Decoder(tiny_config(), random_model(tiny_config(), 1), ops, 512)
    both_ways(plain, [(0, 3)], None)
    assert not calls


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_threads_than_cores_and_two_engines_at_once_give_the_same_bits(threads: int) -> None:
    """Several threads wait for one another on a core, in two teams that know nothing of each other."""
    config = tiny_config(**SHAPES["default model's"])

    decoders = [make_decoder(config, NativeOps(CPU, torch.float32), 4) for _ in range(2)]
    steps = [[Step(config, STEPS[name]) for name in ("tokens", "chunks and tokens")] for _ in decoders]
    torch.set_num_threads(1)
    expected = [step.run(decoders[0], None) for step in steps[0]]

    def run(decoder: Decoder, mine: list[Step]) -> bool:
        torch.set_num_threads(threads)
        return all(
            torch.equal(a, b)
            for _ in range(20)
            for step, wanted in zip(mine, expected, strict=True)
            for a, b in zip(step.run(decoder, None), wanted, strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, decoders, steps))


def test_a_rounded_row_alone_is_what_it_is_in_a_crowd(quantizing: NativeOps) -> None:
    config = tiny_config(**SHAPES["default model's"])
    decoder = make_decoder(config, quantizing, 4)
    torch.manual_seed(4)
    meta, num_pages = make_meta([(200, 1), (40, 1), (90, 7)])
    kv = [random_pages(num_pages, 3, 64, True) for _ in range(config.num_layers)]
    ids = torch.randint(0, 256, (9,))
    crowd = decoder.hidden(ids, kv, meta, None).h
    alone, _ = make_meta([(200, 1)])
    alone.block_table, alone.slots = meta.block_table[:1].clone(), meta.slots[:1]
    assert torch.equal(decoder.hidden(ids[:1], kv, alone, None).h[0], crowd[0])
