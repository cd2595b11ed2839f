"""The whole engine on a GPU with random weights: scheduler, loop, graphs, sampling; no HTTP.

    python -m replica.gpu_bench --models 8b,0.6b --batches 1,32,64     # decode at context 1k, share of the floor
    python -m replica.gpu_bench --models 8b --requests 200             # closed loop, 32 at a time, mixed prompt lengths

The decode floor is (weights without the embedding table + KV at the mean context) / 4.3 TB/s. Rates count only the time
in which the whole batch decodes. The closed loop has 92 % prompts of 128-512 tokens (log-uniform) and 8 % of
2048-4096, 128 tokens out, greedy.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
import statistics
import time
from typing import Any

import torch

from replica.config import DeviceFacts, EngineConfig, resolve
from replica.loop import Engine
from replica.model import LayerWeights, ModelConfig, Weights
from replica.rope import RopeConfig
from replica.runner import ModelRunner
from router.pages import RootFields, chain, pack_tokens
from router.wire import Sampling, Submit, TokenDelta

COPY_RATE = 4.3e12


def qwen3(layers: int, hidden: int, inter: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=inter, num_layers=layers,
        num_heads=heads, num_kv_heads=8, head_dim=128, norm_eps=1e-6, max_position=40960,
        rope=RopeConfig(theta=1e6), tied_embeddings=tied, qk_norm=True,
    )  # fmt: skip


MODELS = {"8b": qwen3(36, 4096, 12288, 32, False), "0.6b": qwen3(28, 1024, 3072, 16, True)}


def random_weights(c: ModelConfig) -> Weights:
    """Drawn on the GPU: seconds instead of minutes for 8 B parameters."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def normal(rows: int, columns: int) -> torch.Tensor:
        t = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return t.normal_(0, columns**-0.5)

    def near_one(n: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(n, dtype=torch.bfloat16, device="cuda")

    layers = [
        LayerWeights(
            input_norm=near_one(c.hidden_size),
            qkv=normal(q + 2 * kv, c.hidden_size),
            o=normal(c.hidden_size, q),
            post_norm=near_one(c.hidden_size),
            gate_up=normal(2 * c.intermediate_size, c.hidden_size),
            down=normal(c.hidden_size, c.intermediate_size),
            q_norm=near_one(c.head_dim),
            k_norm=near_one(c.head_dim),
        )
        for _ in range(c.num_layers)
    ]
    head = normal(c.vocab_size, c.hidden_size)
    embed = head if c.tied_embeddings else normal(c.vocab_size, c.hidden_size)
    return Weights(embed, layers, near_one(c.hidden_size), head)


class Bench:
    """One engine and the record of its deltas: (seconds, request, tokens)."""

    def __init__(self, model: ModelConfig, options: dict[str, Any]) -> None:
        memory = torch.cuda.get_device_properties(0).total_memory
        self.model = model
        config = resolve(EngineConfig(**options), model.facts(2), DeviceFacts("cuda", 16, True, memory))
        began = time.perf_counter()
        self.runner = ModelRunner(model, random_weights(model), config)
        self.ready_s = time.perf_counter() - began
        self.fields = RootFields("bench", "none", config.dtype, config.page_size)
        self.deltas: queue.SimpleQueue[tuple[float, TokenDelta]] = queue.SimpleQueue()
        self.engine = Engine(
            config, self.runner, root=self.fields, on_deltas=self._record, on_events=lambda batch: None
        )  # fmt: skip
        self.engine.start()
        self.random = random.Random(0)
        self._count = 0

    def _record(self, deltas: list[tuple[Any, TokenDelta]]) -> None:
        now = time.perf_counter()
        for _, delta in deltas:
            self.deltas.put((now, delta))

    def prepare(self, prompt: int, tokens: int) -> Submit:
        """Made before the clock starts: drawing and hashing a prompt would hold the interpreter, and so the engine."""
        self._count += 1
        packed = pack_tokens([self.random.randrange(self.model.vocab_size) for _ in range(prompt)])
        root = self.fields.root()
        hashes = b"".join(chain(root, packed, self.engine.config.page_size))
        sampling = Sampling(temperature=0, max_tokens=tokens)
        return Submit(str(self._count), packed, prompt, root, hashes, sampling)

    def close(self) -> None:
        self.engine.stop()
        self.runner.close()

    def decode(self, batch: int, context: int, new: int) -> dict[str, float]:
        """All prompts of ``context`` tokens at once, ``new`` tokens each."""
        requests = [self.prepare(context, new) for _ in range(batch)]
        seen = dict.fromkeys((request.request_id for request in requests), 0)
        for request in requests:
            self.engine.submit(self, request)
        arrivals: list[tuple[float, str]] = []
        while any(n < new for n in seen.values()):
            now, delta = self.deltas.get(timeout=120)
            if delta.error:
                raise RuntimeError(delta.error)
            seen[delta.request_id] += len(delta.ids)
            arrivals += [(now, delta.request_id)] * len(delta.ids)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for now, name in arrivals:
            first.setdefault(name, now)
            last[name] = now
        begin, end = max(first.values()), min(last.values())
        tokens = sum(begin < now <= end for now, _ in arrivals)
        ms = (end - begin) / (tokens / batch) * 1e3
        floor = self._floor_ms(batch, context + new / 2)
        return {"ms": ms, "floor_ms": floor, "share": floor / ms, "tokens_s": batch / ms * 1e3}

    def _floor_ms(self, batch: int, context: float) -> float:
        m = self.model
        weights = m.num_weights() - (0 if m.tied_embeddings else m.vocab_size * m.hidden_size)
        kv = batch * context * m.num_layers * m.num_kv_heads * m.head_dim * 2
        return 2 * (weights + kv) / COPY_RATE * 1e3

    def closed_loop(self, requests: int, concurrency: int = 32, new: int = 128) -> dict[str, float]:
        lengths = [
            self.random.randrange(2048, 4097) if i % 25 in (7, 19) else int(math.exp(self.random.uniform(4.852, 6.238)))
            for i in range(requests)
        ]
        sent: dict[str, float] = {}
        first: dict[str, float] = {}
        previous: dict[str, float] = {}
        gaps: list[float] = []
        waiting, done, tokens = [self.prepare(length, new) for length in lengths], 0, 0
        began = time.perf_counter()
        while done < requests:
            while waiting and len(sent) - done < concurrency:
                request = waiting.pop()
                sent[request.request_id] = time.perf_counter()
                self.engine.submit(self, request)
            now, delta = self.deltas.get(timeout=120)
            if delta.error:
                raise RuntimeError(delta.error)
            name = delta.request_id
            if delta.ids and name in previous:
                gaps.append(now - previous[name])
            if delta.ids:
                first.setdefault(name, now)
                previous[name] = now
            tokens += len(delta.ids)
            done += delta.finish is not None
        seconds = time.perf_counter() - began
        ttft = sorted((first[name] - sent[name]) * 1e3 for name in sent)
        gaps.sort()
        return {
            "requests_s": requests / seconds, "tokens_s": tokens / seconds, "ttft_p50_ms": ttft[len(ttft) // 2],
            "ttft_p99_ms": ttft[int(len(ttft) * 0.99)], "gap_p50_ms": gaps[len(gaps) // 2] * 1e3,
            "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,0.6b")
    parser.add_argument("--batches", default="1,32,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--requests", type=int, default=0, help="closed loop of so many requests; 0: none")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of EngineConfig")
    args = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 8192}
    for text in args.option:
        name, value = text.split("=", 1)
        options[name] = json.loads(value) if value[:1].isdigit() else {"true": True, "false": False}.get(value, value)
    rows: dict[str, Any] = {}
    for name in args.models.split(","):
        bench = Bench(MODELS[name], options)
        print(f"{name}: ready in {bench.ready_s:.1f} s, {bench.runner.describe()['graphs']}", flush=True)
        for batch in (int(b) for b in args.batches.split(",") if b):
            runs = [bench.decode(batch, args.context, args.new) for _ in range(2)]
            row = rows[f"{name} decode b{batch}"] = min(runs, key=lambda r: r["ms"])
            step = statistics.median(list(bench.engine.step_ms)[-args.new // 2 :])
            print(
                f"{name} decode batch {batch:3d}: {row['ms']:.3f} ms a step, floor {row['floor_ms']:.3f} = "
                f"{row['share']:.1%}, {row['tokens_s']:.0f} tokens/s (loop's median {step:.3f} ms)",
                flush=True,
            )
        if args.requests:
            bench.closed_loop(64)
            rows[f"{name} closed loop"] = row = bench.closed_loop(args.requests)
            print(f"{name} closed loop:", {k: round(v, 2) for k, v in row.items()}, flush=True)
        print(name, "steps", bench.runner.describe()["steps"], bench.runner.describe()["graphs"])
        bench.close()
        del bench
        torch.cuda.empty_cache()
    print(json.dumps({"bench": "engine on a GPU", "device": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
