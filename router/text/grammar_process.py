"""The router's end of one compile process; see :mod:`router.text.grammar_worker`. All calls block: use a thread."""

from __future__ import annotations

import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
_START_S = 60.0


class CompileTimeout(Exception):
    """No answer in time; the process is gone."""


class CompileCrash(Exception):
    """The process ended without an answer."""


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar needs to know of a tokenizer: the bytes of each id, and which ids end a text or are control
    tokens. ``size`` is the model's number of ids, which may differ from ``len(tokens)``."""

    tokens: Sequence[bytes]
    size: int
    eos_ids: tuple[int, ...]
    special_ids: tuple[int, ...] = ()


class CompileProcess:
    """Starts in the constructor. Raises CompileTimeout or CompileCrash when it does not come up."""

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # Not multiprocessing: a spawned child would import the __main__ of whatever hosts the router.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "router.text.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            # Ctrl-C is for the router; this process ends when its input does.
            start_new_session=True,
        )
        setup = [list(vocabulary.tokens), list(vocabulary.eos_ids), list(vocabulary.special_ids), vocabulary.size]
        self._ask([*setup, memory_bytes], _START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compile(self, kind: str, text: str, timeout_s: float) -> tuple[str | None, str | None, str | None]:
        """(source, None, None) or (None, message, path). After an exception the process is gone."""
        source, message, path = self._ask([kind, text], timeout_s)
        return source, message, path

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _ask(self, value: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        body = msgpack.packb(value, use_bin_type=True)
        try:
            stdin = self._process.stdin
            assert stdin is not None
            stdin.write(_LENGTH.pack(len(body)) + body)
            stdin.flush()
            length = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
            return msgpack.unpackb(self._read(length, deadline), raw=False)
        except BrokenPipeError:
            self.close()
            raise CompileCrash(f"the compile process ended with code {self._process.returncode}") from None
        except BaseException:
            self.close()
            raise

    def _read(self, size: int, deadline: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        parts = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while len(parts) < size:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise CompileTimeout
                chunk = os.read(stdout.fileno(), size - len(parts))
                if not chunk:
                    raise BrokenPipeError
                parts += chunk
        return bytes(parts)
