"""``bench gpu --http`` without a GPU: the client on a made-up server, the checkpoint that our server would read."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from cluster.bench import gpu
from cluster.bench.gpu_http import MODEL, HttpSide, VllmServer, write_checkpoint
from cluster.bench.gpu_loads import Job, Trace
from cluster.bench.shapes import Shape
from replica.weights import load

TINY = Shape(layers=5, hidden=64, heads=4, intermediate=96, kv_heads=2, head_dim=16)


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["model"] == MODEL and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
    if body["prompt"] == [0]:
        return web.json_response({"error": {"message": "no such id"}}, status=400)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    events: list[Any] = [{"choices": [{"text": " a"}]}, {"choices": [{"text": " b c"}]}]
    if body["prompt"] == [1]:
        events.append({"error": {"message": "the replica is gone"}})
    elif body["prompt"] != [2]:
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 7}}
        events.append({"choices": [], "usage": usage})
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


class _Fake(HttpSide):
    """Its server runs in the test's own loop."""

    def prepare(self, root: Path) -> None: ...

    def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
        return [], {}

    def is_ready(self) -> bool:
        return True

    async def ask(self, prompts: list[list[int]]) -> list[Trace]:
        import aiohttp

        app = web.Application()
        app.router.add_post("/v1/completions", _answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._port = runner.addresses[0][1]
        self._session = aiohttp.ClientSession()
        try:
            return [await self.run(Job(prompt, 3)) for prompt in prompts]
        finally:
            await self._session.close()
            await runner.cleanup()


def test_what_a_client_counts() -> None:
    good, refused, broken, cut = asyncio.run(_Fake(TINY, {}).ask([[5, 6], [0], [1], [2]]))
    assert good.error is None and len(good.times) == 2 and good.counts == [1, 2] and good.num_cached == 7
    assert refused.error is not None and refused.error.startswith("400") and not refused.times
    assert broken.error is not None and "gone" in broken.error
    assert cut.error == "the stream ended without usage"


def test_the_checkpoint_is_one_that_our_server_reads(tmp_path: Path) -> None:
    import torch

    write_checkpoint(TINY, tmp_path / MODEL, "cpu")
    config, weights = load(tmp_path / MODEL, torch.float32)
    assert (config.family, config.num_layers, config.qk_norm) == ("qwen3", 5, True)
    assert weights.layers[4].qkv.shape == ((4 + 2 * 2) * 16, 64) and weights.head is not weights.embed
    assert 0.05 < weights.layers[0].gate_up.std() < 0.25


def test_a_server_that_dies_says_why() -> None:
    class Dead(VllmServer):
        def prepare(self, root: Path) -> None: ...

        def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
            dump = "[2026 E 1 1] logging.cc:474: *** SIGTERM\\n" + "    @ 0x7f05 80 (unknown)\\n" * 200
            return [sys.executable, "-c", f"print('no device\\n{dump}', end='')"], dict(os.environ)

    with pytest.raises(RuntimeError, match=r"not ready: no device$"):
        asyncio.run(Dead(TINY, {}).start())


def test_a_start_that_is_given_up_ends_the_server() -> None:
    class Slow(VllmServer):
        def prepare(self, root: Path) -> None: ...

        def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
            return [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ)

    async def give_up(side: Slow) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(side.start(), 1.0)

    side = Slow(TINY, {})
    asyncio.run(give_up(side))
    assert side._process.poll() is not None


def test_a_server_that_can_not_be_described_is_ended() -> None:
    class Mute(VllmServer):
        def prepare(self, root: Path) -> None: ...

        def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
            return [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ)

        def is_ready(self) -> bool:
            return True

        def describe(self) -> dict[str, Any]:
            raise KeyError("runner")

    side = Mute(TINY, {})
    try:
        with pytest.raises(KeyError, match="runner"):
            asyncio.run(side.start())
        assert side._process.poll() is not None
    finally:
        side._process.kill()


def test_both_sides_are_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sides = []

    def fake(command: list[str], env: dict[str, str], out: Path, *_: Any) -> int:
        sides.append(command[3])
        out.write_text(json.dumps({"runs": {"S:0": {"tokens_s": 1.0, "requests_s": 1.0}}, "after": {}}))
        return 0

    monkeypatch.setattr(gpu, "_watch", fake)
    gpu.run(gpu.Workload.parse("qwen3-8b", "S:0", "vllm", tmp_path, "{}", "{}", None, True), Console(quiet=True))
    assert sides == ["vllm-http", "everwarm-http"]
