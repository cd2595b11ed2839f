"""Structured output: validates and compiles what a client asks for into the grammar source that a replica runs.

A replica gets ``Sampling.grammar = ("llguidance", source)``: one self-contained grammar of a few KB that only the
library reads. It was compiled here first, in a process of its own and under the limits that the replica applies, so a
replica meets only grammars that compile.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from router.text.grammar_process import CompileCrash, CompileProcess, CompileTimeout, Vocabulary

log = logging.getLogger(__name__)

Kind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]
_MAX_DEPTH = 100
"""Nested arrays and objects of a schema; llguidance's JSON reader takes 128."""


class GrammarError(ValueError):
    """The client's grammar can't be used: a 400. ``path`` is a JSON pointer into its schema, when that is known."""

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(f"{message} (at {path or 'the root'} of the schema)" if path is not None else message)
        self.path = path


class GrammarBusy(Exception):
    """Too many grammars are waiting to be compiled: a 503."""


@dataclass(frozen=True)
class GrammarOptions:
    """``timeout_s``: longest compilation. ``workers``: compile processes, started when needed.
    ``memory_bytes``: what a compilation may allocate. ``max_waiting``: compilations queued or running."""

    max_source_bytes: int = 256 << 10
    max_choices: int = 10_000
    cache_bytes: int = 16 << 20
    timeout_s: float = 3.0
    workers: int = 2
    memory_bytes: int = 1 << 30
    max_waiting: int = 256


class Grammars:
    """Compiles through a pool of processes and remembers the outcome, good or bad, by content."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: GrammarOptions | None = None,
        *,
        start: Callable[[Vocabulary, int], CompileProcess] = CompileProcess,
    ) -> None:
        self.options = options or GrammarOptions()
        self._vocabulary = vocabulary
        self._start = start
        self._cache = _Cache(self.options.cache_bytes)
        self._flights: dict[bytes, asyncio.Task[Outcome]] = {}
        self._threads = ThreadPoolExecutor(self.options.workers, thread_name_prefix="grammar")
        self._idle: list[CompileProcess] = []
        self._closed = False

    async def compile(self, kind: Kind, value: Any = None) -> tuple[str, str]:
        """What to put in ``Sampling.grammar``.

        ``value``: a schema (parsed, or as JSON text) for json_schema, a list of strings for choice, else text;
        nothing for json_object. Raises GrammarError, or GrammarBusy.
        """
        text = _canonical(kind, value, self.options)
        key = blake2b(kind.encode() + b"\0" + text.encode(), digest_size=16).digest()
        outcome = self._cache.get(key)
        if outcome is None:
            # Shielded: one client that goes away must not fail the others that wait for the same grammar.
            outcome = await asyncio.shield(self._flight(key, kind, text))
        if isinstance(outcome, _Failure):
            raise GrammarError(outcome.message, outcome.path)
        return "llguidance", outcome

    def close(self) -> None:
        """Ends the processes; blocks until running compilations have ended."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._idle:
            process.close()
        self._idle.clear()

    def _flight(self, key: bytes, kind: str, text: str) -> asyncio.Task[Outcome]:
        flight = self._flights.get(key)
        if flight is None:
            if len(self._flights) >= self.options.max_waiting:
                raise GrammarBusy(f"{len(self._flights)} grammars are waiting to be compiled; try again later")
            flight = self._flights[key] = asyncio.ensure_future(self._run(key, kind, text))
        return flight

    async def _run(self, key: bytes, kind: str, text: str) -> Outcome:
        loop = asyncio.get_running_loop()
        try:
            outcome = await loop.run_in_executor(self._threads, self._compile, kind, text)
        finally:
            del self._flights[key]
        if not (isinstance(outcome, _Failure) and outcome.transient):
            self._cache.put(key, outcome)
        return outcome

    def _compile(self, kind: str, text: str) -> Outcome:
        """In a thread. There are as many threads as processes, so one is idle or may be started."""
        process = self._take()
        try:
            source, message, path = process.compile(kind, text, self.options.timeout_s)
        except CompileTimeout:
            limit = self.options.timeout_s
            return _Failure(f"this {kind} takes longer than {limit:g} s to compile; simplify it", transient=True)
        except CompileCrash:
            return _Failure(f"this {kind} needs more memory to compile than is allowed; simplify it", transient=True)
        if self._closed:
            process.close()
        else:
            self._idle.append(process)
        return source if source is not None else _Failure(f"{kind}: {message}", path)

    def _take(self) -> CompileProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.close()
        try:
            return self._start(self._vocabulary, self.options.memory_bytes)
        except (CompileTimeout, CompileCrash, OSError) as error:
            log.error("the grammar compiler does not start: %s", error)
            raise GrammarBusy("the grammar compiler does not start; try again later") from error


@dataclass(frozen=True)
class _Failure:
    message: str
    path: str | None = None
    transient: bool = False
    """A busy machine may be to blame, so it is tried again when asked again."""


Outcome = str | _Failure


class _Cache:
    """Outcomes by key, least recently used first, bounded by the bytes of their text."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Outcome] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Outcome | None:
        outcome = self._entries.get(key)
        if outcome is not None:
            self._entries.move_to_end(key)
        return outcome

    def put(self, key: bytes, outcome: Outcome) -> None:
        if key in self._entries:
            self.num_bytes -= _cost(self._entries.pop(key))
        self._entries[key] = outcome
        self.num_bytes += _cost(outcome)
        while self.num_bytes > self._max_bytes and self._entries:
            self.num_bytes -= _cost(self._entries.popitem(last=False)[1])

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(map(_cost, self._entries.values()))
        assert self.num_bytes <= self._max_bytes


def _cost(outcome: Outcome) -> int:
    # Keys, nodes and object headers of one entry come to about 300 bytes.
    return 300 + len(outcome if isinstance(outcome, str) else outcome.message)


def available() -> bool:
    """llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def _canonical(kind: str, value: Any, options: GrammarOptions) -> str:
    """The text that is compiled and hashed. Key order is kept: it is the order of the answer's keys."""
    if not available():
        raise GrammarError("structured output is not available: this router has no llguidance installed")
    if kind == "json_object":
        return ""
    if kind == "json_schema":
        text = _schema_text(value)
    elif kind == "choice":
        text = _choice_text(value, options.max_choices)
    elif not isinstance(value, str) or not value.strip():
        raise GrammarError(f"{kind} must be a non-empty string")
    else:
        text = value
    if len(text) > options.max_source_bytes:
        raise GrammarError(f"{kind} has {len(text)} characters; at most {options.max_source_bytes} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{kind} has a lone surrogate, which no text can hold: {error.reason}") from None
    return text


def _schema_text(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"json_schema is not valid JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise GrammarError(f"json_schema must be an object or a boolean, not {type(value).__name__}")
    _check_depth(value)
    if isinstance(value, dict) and "x-guidance" in value:
        raise GrammarError("x-guidance is not a JSON Schema keyword", "/x-guidance")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise GrammarError(f"json_schema is not valid JSON: {error}") from None


def _check_depth(schema: Any) -> None:
    """Iterative, so that depth itself can't hurt. Raises GrammarError."""
    level: list[Any] = [schema] if isinstance(schema, dict) else []
    depth = 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise GrammarError(f"json_schema is nested more than {_MAX_DEPTH} levels deep")
        children = [c for node in level for c in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in children if isinstance(child, dict | list)]


def _choice_text(value: Any, most: int) -> str:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(option, str) for option in value):
        raise GrammarError("choice must be a non-empty list of strings")
    if len(value) > most:
        raise GrammarError(f"choice has {len(value)} options; at most {most} are allowed")
    if "" in value:
        raise GrammarError("choice has an empty option; every option needs at least one character")
    return json.dumps(list(dict.fromkeys(value)), ensure_ascii=False)
