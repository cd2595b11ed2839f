"""The sides of ``bench gpu --http``: each engine behind its own server, the same client for both.

    python -m cluster.bench.gpu_http qwen3-8b FOLDER

writes the checkpoint that our server reads: random weights, drawn on the GPU in a process that is gone when the server
starts. The peer draws its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.bench.gpu_loads import Job, Trace
from cluster.bench.shapes import SHAPES, Shape

MODEL = "bench"
READY_S = 500.0
STOP_S = 60.0
SHARD_LAYERS = 4
STACK_DUMP = re.compile(r"logging\.cc:\d+: |^ {4}@ ")
"""Ray's, of the processes that it ends: longer than what was the matter."""


class HttpSide(ABC):
    """A server as a child process and a client of its ``/v1/completions``. Subclasses say how it starts."""

    def __init__(self, shape: Shape, options: dict[str, Any]) -> None:
        self._shape, self._options = shape, options
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> dict[str, Any]:
        """Raises RuntimeError, with the end of its log, when the server does not get ready."""
        import aiohttp

        from cluster.environment import free_ports

        self._folder = tempfile.TemporaryDirectory()
        root = Path(self._folder.name)
        self._port = free_ports(1)[0]
        began = time.perf_counter()
        await asyncio.to_thread(self.prepare, root)
        prepared = time.perf_counter() - began
        self._log = root / "server.log"
        command, env = self.command(root)
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # it only forks
                command, env=env, stdout=sink, stderr=sink, start_new_session=True
            )
        try:
            await asyncio.to_thread(self._await_ready)
            found = await asyncio.to_thread(self.describe)
        except BaseException:  # cancelled: nobody would end it later
            self._end()
            raise
        timeout = aiohttp.ClientTimeout(total=600)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return {"server": command[1:], "of_ready_s_for_writing_weights": round(prepared, 1), **found}

    @abstractmethod
    def prepare(self, root: Path) -> None:
        """Writes what the server will read."""

    @abstractmethod
    def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
        """Command line and environment."""

    @abstractmethod
    def is_ready(self) -> bool: ...

    def describe(self) -> dict[str, Any]:
        """What is worth knowing of the running server."""
        return {}

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError, ValueError, KeyError):
                if self.is_ready():
                    return
            time.sleep(0.25)
        lines = self._log.read_text(errors="replace").splitlines()
        text = "\n".join(line for line in lines if not STACK_DUMP.search(line))[-4000:]
        raise RuntimeError(f"the server is not ready: {text}")

    def _end(self) -> None:
        """Idempotent. Its group with it: an engine that is a process of its own."""
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def run(self, job: Job) -> Trace:
        body = {
            "model": MODEL, "prompt": job.prompt, "max_tokens": job.tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        trace, usage = Trace(time.perf_counter(), len(job.prompt)), {}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                trace.error = f"{response.status}: {(await response.text())[:300]}"
                return trace
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if b'"choices":[]' in line.replace(b" ", b""):
                    usage = json.loads(line[6:])["usage"]
                elif b'"error"' in line[:20]:
                    trace.error = line.decode(errors="replace")[:300]
                else:
                    trace.times.append(now)
                    trace.counts.append(1)
        if usage and trace.counts:  # a chunk may carry several tokens, and one may carry none
            trace.counts[-1] += usage["completion_tokens"] - trace.num_tokens
            trace.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        elif trace.error is None:
            trace.error = "the stream ended without usage"
        return trace

    async def stop(self) -> dict[str, Any]:
        try:
            await self._session.close()
            return await asyncio.to_thread(self.describe)
        finally:
            await asyncio.to_thread(self._end)
            self._folder.cleanup()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=5) as reply:
            return json.loads(reply.read() or b"null")


class EverwarmServer(HttpSide):
    """``everwarm serve`` with one replica: router, token plane, engine, and HAProxy where it is installed."""

    def prepare(self, root: Path) -> None:
        name = next(name for name, shape in SHAPES.items() if shape == self._shape)
        command = [sys.executable, "-m", "cluster.bench.gpu_http", name, str(root / MODEL)]
        subprocess.run(command, check=True)

    def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
        options = {"max_model_len": 8192, **self._options}
        (root / "home").mkdir()
        entry = [sys.executable, "-c", "from cluster.cli import main; main()"]
        pairs = [f"model={root / MODEL}", f"served_model_name={MODEL}", "replicas=1"]
        pairs += [f"{name}={value}" for name, value in options.items()]
        # Compiled kernels outlive the folder that the server has for a home.
        kernels = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        env = dict(os.environ, HOME=str(root / "home"), TRITON_CACHE_DIR=kernels)
        return [*entry, "serve", *pairs, "--host", "127.0.0.1", "--port", str(self._port)], env

    def is_ready(self) -> bool:
        self._get("/ready")
        return any(engine["state"] == "open" for engine in self._get("/v1/engine")["data"])

    def describe(self) -> dict[str, Any]:
        info = self._get("/v1/engine")["data"][0]
        runner = info.get("runner") or {}
        shown = ("device", "graphs", "compiled_after_ready")
        return {"steps": info.get("steps"), **{name: runner.get(name) for name in shown}}


class VllmServer(HttpSide):
    """vLLM's own OpenAI server with its defaults."""

    def prepare(self, root: Path) -> None:
        from cluster.bench.gpu_sides import write_model_folder

        (root / MODEL).mkdir()
        write_model_folder(self._shape, root / MODEL)

    def command(self, root: Path) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(root / MODEL)]
        command += ["--served-model-name", MODEL, "--load-format", "dummy", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        for name, value in self._options.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return command, dict(os.environ)

    def is_ready(self) -> bool:
        with urllib.request.urlopen(self.url + "/health", timeout=2) as reply:
            return bool(reply.status == 200)


def write_checkpoint(shape: Shape, folder: Path, device: str = "cuda") -> None:
    """config.json, a tokenizer of made-up words and random weights under the names of a Qwen3 checkpoint."""
    from safetensors.torch import save_file

    from cluster.bench.gpu_sides import write_model_folder
    from cluster.bench.random_engine import model_config, random_weights

    folder.mkdir(parents=True)
    write_model_folder(shape, folder)
    config = model_config(shape)
    weights = random_weights(config, device)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    outer = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not shape.tied:
        outer["lm_head.weight"] = weights.head
    where: dict[str, str] = {}

    def save(tensors: dict[str, Any]) -> None:
        file = f"model-{len(set(where.values())):05d}.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
        where.update(dict.fromkeys(tensors, file))

    save(outer)
    for first in range(0, len(weights.layers), SHARD_LAYERS):
        shard: dict[str, Any] = {}
        for number, layer in enumerate(weights.layers[first : first + SHARD_LAYERS], first):
            parts = {
                "input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm,
                "self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm,
                **dict(zip(
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv.split([q, kv, kv]),
                    strict=True,
                )),
                "self_attn.o_proj": layer.o,
                **dict(zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.chunk(2), strict=True)),
                "mlp.down_proj": layer.down,
            }  # fmt: skip
            shard |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in parts.items()}
        save(shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


if __name__ == "__main__":
    write_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2]))
