"""llama.cpp as a peer: its ``xllamacpp`` wheel, in a process of its own, on the same GGUF file.

The wheel is built for AVX2, without AVX-512 and VNNI, and computes on the file's 4-bit blocks; what it says of its
build goes into the figures. If it is not installed beside us, it is for this run, into a temporary environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.bench.sides import Room

WHEEL = "xllamacpp==2026.10.11549"
CHILD = Path(__file__).with_name("llama_cpp_child.py")
SPARE = 16
"""Tokens of context per sequence beyond what is asked."""


class XLlamaCpp:
    """Implements cluster.bench.sides.Side; its rates are llama.cpp's own timings. It gives text, so no ids."""

    name = "xllamacpp"

    def __init__(self, path: Path, room: Room) -> None:
        """Raises ValueError without a GGUF file, RuntimeError when the wheel can't be had or does not start."""
        if path.suffix != ".gguf":
            raise ValueError(f"peer: xllamacpp reads GGUF files only, this is {path.name}")
        self._stack = ExitStack()
        try:
            scratch = Path(self._stack.enter_context(TemporaryDirectory(prefix="everwarm-peer-")))
            given = {"model": str(path), "parallel": room.largest, "context": room.longest + SPARE}
            self._child = subprocess.Popen(
                [_python(scratch), str(CHILD), json.dumps(given | {"threads": room.threads})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HOME": str(scratch)},
                text=True,
            )
            self._stack.callback(self._end)
            self._about = self._read()
        except BaseException:
            self._stack.close()
            raise

    def run(self, asked: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        if count > 1:  # its prompt cache holds them then
            self._ask(asked, 1)
        timings = self._ask(asked, count)
        if count == 1:
            return 1e3 * timings[0]["prompt_n"] / timings[0]["prompt_ms"], []
        return sum(1e3 * t["predicted_n"] / t["predicted_ms"] for t in timings), []

    def describe(self) -> dict[str, Any]:
        return self._about

    def close(self) -> None:
        self._stack.close()

    def _ask(self, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
        self._child.stdin.flush()
        timings: list[dict[str, Any]] = self._read()["timings"]
        return timings

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"xllamacpp ended with exit code {self._child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"xllamacpp: {answer['error']}")
        return answer

    def _end(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


def _python(scratch: Path) -> str:
    """An interpreter that has the wheel."""
    if importlib.util.find_spec("xllamacpp"):
        return sys.executable
    home = scratch / "venv"
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "--quiet"]
    for command in ([sys.executable, "-m", "venv", "--without-pip", str(home)], [*pip, WHEEL]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"peer: {WHEEL} can't be installed: {done.stderr.strip()[-500:]}")
    return str(home / "bin" / "python")
