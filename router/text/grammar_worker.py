"""The compile process: ``python -m router.text.grammar_worker``, frames on standard input and output.

A frame is a little-endian u32 length and a msgpack value. First comes the setup, ``[tokens, eos ids, special ids,
vocab size, memory limit]``, answered by ``true``; then any number of ``[kind, text]``, each answered by
``[source, null, null]`` or ``[null, message, path]``. A grammar that eats all memory, or a bug in native code, ends
this process and not the router; one that takes too long is ended by the router killing it.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgpack

from router.sampling import GRAMMAR_LIMITS
from router.text.grammar_source import SourceError, json_source, lark_source

_LENGTH = struct.Struct("<I")
_MAX_LOCATE_S = 0.25
_PROBE_STEPS = 16
_NOISE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_EMPTY = "NoExtension"


def write_frame(stream: BinaryIO, value: Any) -> None:
    body = msgpack.packb(value, use_bin_type=True)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """Raises EOFError when the other end is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    body = stream.read(_LENGTH.unpack(head)[0])
    return msgpack.unpackb(body, raw=False, strict_map_key=False)


class Compiler:
    """Says whether a grammar compiles for one vocabulary, and if not, why and where."""

    def __init__(self, tokens: list[bytes], eos_ids: list[int], special_ids: list[int], vocab_size: int) -> None:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

        class Vocabulary:
            eos_token_id = eos_ids[0]
            bos_token_id = None
            special_token_ids = special_ids

            def __call__(self, _: Any) -> list[int]:
                return []

        Vocabulary.tokens = [*tokens, *[b""] * vocab_size][:vocab_size]  # type: ignore[attr-defined]
        self._tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary()), n_vocab=vocab_size, eos_token=eos_ids)
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = LLMatcher
        self._eos_ids = frozenset(eos_ids)

    def compile(self, kind: str, text: str) -> tuple[str | None, str | None, str | None]:
        """(source, None, None), or (None, message, JSON pointer of the schema part at fault if it is known)."""
        try:
            source = lark_source(kind, text)
        except SourceError as error:
            return None, str(error), None
        problem = self._problem(source)
        if problem is None:
            return source, None, None
        schema = json.loads(text) if kind == "json_schema" else None
        return None, problem, self._locate(schema, problem) if isinstance(schema, dict) else None

    def _problem(self, source: str) -> str | None:
        matcher = self._matcher(self._tokenizer, source, limits=self._limits, log_level=0)
        # A few masks find what compiling doesn't: a grammar that matches nothing, or one too wide to run.
        for _ in range(_PROBE_STEPS):
            if matcher.is_stopped():
                break
            first = _first_id(matcher.compute_bitmask())
            if first is None or first in self._eos_ids:
                break
            matcher.consume_token(first)
        return _readable(matcher.get_error()) if matcher.is_error() else None

    def _locate(self, schema: dict[str, Any], problem: str) -> str:
        """Pointer of the innermost subschema that alone fails with the same message."""
        deadline = time.perf_counter() + _MAX_LOCATE_S
        shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
        path, node = "", schema
        while True:
            for step, child in _subschemas(node):
                if time.perf_counter() > deadline:
                    return path
                if isinstance(child, dict) and self._problem(json_source({**shared, **child})) == problem:
                    path, node = path + step, child
                    break
            else:
                return path


def _first_id(mask: bytes) -> int | None:
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1 if bits else None


def _subschemas(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(node.get(key), dict):
            for name, child in node[key].items():
                yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", child
    for key in ("items", "additionalProperties", "additionalItems"):
        if isinstance(node.get(key), dict):
            yield f"/{key}", node[key]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        if isinstance(node.get(key), list):
            for index, child in enumerate(node[key]):
                yield f"/{key}/{index}", child


def _readable(error: str) -> str:
    """llguidance's message without its position, excerpt of our source and parser dump."""
    text = re.split(r"\n\s*\d+ \| |\n<", error, maxsplit=1)[0].strip()
    text = _NOISE.sub("", text)
    if text.startswith(_EMPTY):
        return "it matches no text at all"
    return text or "it does not compile"


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        tokens, eos_ids, special_ids, vocab_size, memory_bytes = read_frame(source)
        compiler = Compiler(tokens, eos_ids, special_ids, vocab_size)
        _limit_memory(memory_bytes)
        write_frame(sink, True)
        while True:
            kind, text = read_frame(source)
            write_frame(sink, compiler.compile(kind, text))


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))


if __name__ == "__main__":
    main()
