"""``everwarm verify``: every combination of exact options against plain transformers, on any model that we serve.

A case is one engine with one combination. All its requests run at once; each must give the greedy tokens of
transformers in float32 (or, drawn with a seed, those that transformers' logits and the noise of that seed give) and
log-probabilities within a tolerance. Where transformers itself was undecided between two tokens, either passes, is
counted as a tie, and the rest of that sequence is not compared. Options that lose precision are measured, not judged.

An engine in float32 is held to a fixed tolerance; one in a smaller dtype to what transformers in that dtype loses
against itself in float32, on this very model.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cluster.bench.peer import as_transformers
from cluster.bench.progress import Announce, steps
from cluster.checkpoint import locate
from cluster.verify_cases import Case, Plan, covering, every, name_of, options_of, plan_for, sensible
from cluster.verify_faults import FAULTS
from cluster.verify_lossy import Loss, measure
from cluster.verify_reference import Asked, Expected, expect, own_gaps, workload
from cluster.verify_sampling import Effect, effects, masks_for
from kernels.dispatch import Dispatch
from replica import weights
from replica.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from replica.llm import LLM, Output
from replica.model import ModelConfig, Weights
from replica.runner import ModelRunner, choose_ops

ALLOWED = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
"""Dtypes by device."""
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
"""Largest difference of log-probabilities in float32, by device."""


@dataclass(frozen=True)
class Limits:
    """Of differences of log-probabilities from float32: the largest, and the mean of a case. ``undecided``: where
    transformers' choice won by no more, another token is no difference."""

    worst: float
    mean: float
    undecided: float


def limits_within(worst: float, mean: float) -> Limits:
    """In a dtype in which transformers itself differs from float32 by so much. The mean is what finds faults: it is of
    thousands of values, and equal to a few percent for two sound implementations; single unlikely tokens stray."""
    return Limits(4 * worst, 1.5 * mean, 2 * worst)


COUNT = 20
"""Tokens per request: more than a page, so that every request takes a new one while it decodes."""
TOP = 5
SAMPLED = 5
"""The request whose sampling options are varied: a long prompt."""
UNITS = {
    "worst": "largest difference of log-probabilities, chosen token and the 5 likeliest",
    "mean": "mean of these differences",
    "own_worst": "the same of transformers in that dtype against itself in float32",
    "ties": "sequences cut where transformers was undecided and another token came",
    "kl": "nats, of the 64 likeliest tokens and all others together, transformers' context given",
    "agreement": "share of positions whose likeliest token is transformers', transformers' context given",
}


@dataclass(frozen=True)
class Difference:
    """Where a case first left the reference."""

    case: str
    request: int | None
    """None: all of them."""
    position: int | None
    """Of the output, from 0."""
    what: str

    def __str__(self) -> str:
        where = "" if self.request is None else f"request {self.request}, output token {self.position}: "
        return f"differs: {self.case}: {where}{self.what}"


@dataclass
class Verdict:
    """What a case showed. ``counters``: the engine's own."""

    case: str
    tokens: int = 0
    values: int = 0
    """Log-probabilities compared."""
    worst: float = 0.0
    mean: float = 0.0
    ties: int = 0
    difference: Difference | None = None
    counters: dict[str, int] = field(default_factory=dict)


class Unverifiable(ValueError):
    """The device or dtype can't be verified, with the reason."""


class Bench:
    """One model: its reference and its engines. Weights are read once per kind, shared by the cases, and in memory
    one kind at a time."""

    def __init__(self, path: Path, device: str, dtype: str, fault: str | None) -> None:
        self.path, self.device, self.dtype, self._fault = path, device, dtype, fault
        self.model: ModelConfig = weights.read_config(path)
        self.facts = self.model.facts(torch.finfo(getattr(torch, dtype)).bits // 8)
        self.asked = workload(self.model.vocab_size, COUNT)
        self.longest = max(len(a.prompt) for a in self.asked) + COUNT
        if self.longest > self.model.max_position:
            raise Unverifiable(f"model: its {self.model.max_position} positions are fewer than {self.longest}")
        self.expected: list[Expected] = []
        self.own: tuple[float, float] | None = None
        """What transformers loses in ``dtype``: the largest and the mean difference. None: nothing, in float32."""
        self._loaded: dict[tuple[str, ...], tuple[Weights, Dispatch]] = {}

    def refer(self) -> None:
        """Fills ``expected`` and ``own``; transformers' models are gone afterwards. Raises Unverifiable where nothing
        could be told from what they give."""
        peer = as_transformers(self.path, torch.float32).to(self.device)
        self.expected = [expect(peer, asked) for asked in self.asked]
        if self.dtype != "float32":
            del peer
            gc.collect()
            peer = as_transformers(self.path, getattr(torch, self.dtype)).to(self.device)
            gaps = torch.cat([own_gaps(peer, a, e, TOP) for a, e in zip(self.asked, self.expected, strict=True)])
            self.own = float(gaps.max()), float(gaps.mean())
            if not math.isfinite(self.own[0]):
                raise Unverifiable(f"dtype: transformers' own log-probabilities in {self.dtype} are not all finite")
        del peer
        gc.collect()

    @property
    def limits(self) -> Limits:
        tolerance = TOLERANCE[self.device]
        return Limits(tolerance, tolerance, 2 * tolerance) if self.own is None else limits_within(*self.own)

    @contextmanager
    def engine(self, options: dict[str, Any], masks: Any = None) -> Iterator[LLM]:
        """An engine with these EngineConfig fields. Raises ValueError for what can't be resolved."""
        config = EngineConfig(dtype=self.dtype, device=self.device, **options)
        cores = torch.get_num_threads()
        resolved = resolve(config, self.facts, DeviceFacts(self.device, cores))  # type: ignore[arg-type]
        runner = self._runner(resolved)
        if self._fault is not None:
            FAULTS[self._fault](runner)
        with LLM(resolved, runner, masks=masks) as llm:
            yield llm
            llm.engine.check_invariants()

    def _runner(self, config: ResolvedConfig) -> ModelRunner:
        key = (config.kv_cache_dtype, config.quantization, config.cpu_kernels)
        if key not in self._loaded:
            self._loaded.clear()
            ops = choose_ops(self.model, config)
            dtype = getattr(torch, config.dtype)
            self._loaded[key] = (weights.load(self.path, dtype, config.device, prepare=ops.prepare)[1], ops)
        loaded, ops = self._loaded[key]
        return ModelRunner(self.model, loaded, config, ops)


def run(
    model: str | None,
    console: Console,
    *,
    quick: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    fault: str | None = None,
) -> dict[str, Any]:
    """``console`` gets the progress. Raises UnknownModel, CheckpointError, or ValueError for what can't be verified."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype not in ALLOWED[device]:
        raise Unverifiable(f"dtype: {dtype!r} on {device}; allowed there: {', '.join(ALLOWED[device])}")
    if fault is not None and fault not in FAULTS:
        raise Unverifiable(f"inject: {fault!r}; allowed are {', '.join(FAULTS)}")
    checkpoint = locate(model, weights=True)
    bench = Bench(checkpoint.path, device, dtype, fault)
    plan = _without_refused(bench, plan_for(bench.facts, device))
    cases = covering(plan.axes) if quick else every(plan.axes)
    num_lossy = sum(len(values) for values in plan.lossy.values())
    with steps(len(cases) + num_lossy + 3, console) as announce:
        announce(f"transformers on {len(bench.asked)} requests")
        bench.refer()
        verdicts = []
        for case in cases:
            verdicts.append(_judge(bench, case, plan, announce))
            if (found := verdicts[-1].difference) is not None:  # at once: a large model takes long to the end
                console.print(str(found), style="red", markup=False, highlight=False, soft_wrap=True)
        seen, losses = [], []
        if fault is None:
            announce("sampling options")
            masks = masks_for(bench.model.vocab_size)
            with bench.engine(options_of(cases[0], bench.longest, bench.facts, bench.dtype), masks) as llm:
                seen = effects(llm, list(bench.asked[SAMPLED].prompt), with_grammar=masks is not None)
            losses = list(_losses(bench, plan, announce))
    return _figures(checkpoint.name, bench, plan, verdicts, seen, losses, quick)


def _without_refused(bench: Bench, plan: Plan) -> Plan:
    """Drops values that this model or device can't run with; the engine's own words say why."""
    axes: dict[str, tuple[Any, ...]] = {}
    left_out = dict(plan.left_out)
    default = {name: values[0] for name, values in plan.axes.items()}
    for name, values in plan.axes.items():
        kept = [values[0]]
        for value in values[1:]:
            case = default | {name: value}
            if not sensible(case):
                case |= {"prefix_caching": False, "host_cache": False}
            try:
                with bench.engine(options_of(case, bench.longest, bench.facts, bench.dtype)):
                    kept.append(value)
            except ValueError as error:
                left_out[f"{name}={value}"] = str(error)
        axes[name] = tuple(kept)
    return Plan(axes, plan.lossy, left_out)


def _judge(bench: Bench, case: Case, plan: Plan, announce: Announce) -> Verdict:
    verdict = Verdict(name_of(case, plan.axes))
    announce(verdict.case)
    limits = bench.limits
    with bench.engine(options_of(case, bench.longest, bench.facts, bench.dtype)) as llm:
        asked = [a.prompt for a in bench.asked], [a.sampling(logprobs=TOP) for a in bench.asked]
        outputs = llm.generate(*asked)
        # Asked again, prompts find their pages on the host, whatever the timing was: they must come back as they were.
        again = llm.generate(*asked) if case["host_cache"] and case["pool"] == "tiny" else []
        info = llm.engine.info()
    counters = info["counters"] | {"pages_restored": (info["pages"]["host"] or {}).get("restored", 0)}
    verdict.counters = {name: counters[name] for name in COUNTED if name in counters}
    repeated = Verdict(verdict.case)
    for seen, run in ((verdict, outputs), (repeated, again)) if again else ((verdict, outputs),):
        for index, (expected, output) in enumerate(zip(bench.expected, run, strict=True)):
            difference = _compare(seen, index, expected, output, limits)
            seen.difference = seen.difference or difference
        if seen.mean > limits.mean and seen.difference is None:
            what = f"log-probabilities are off by {seen.mean:.6f} on average; allowed are {limits.mean:.6f}"
            seen.difference = Difference(verdict.case, None, None, what)
    verdict.difference = verdict.difference or repeated.difference
    return verdict


COUNTED = ("preemptions", "prefix_hits", "pages_restored", "drafted_tokens", "accepted_tokens")


def _compare(verdict: Verdict, index: int, expected: Expected, out: Output, limits: Limits) -> Difference | None:
    """Adds what was compared to ``verdict``; the first difference of this request, if any."""

    def differs(position: int, what: str) -> Difference:
        return Difference(verdict.case, index, position, what)

    if out.error or out.logprobs is None:
        return differs(len(out.ids), f"the request ended with {out.error or 'no log-probabilities'}")
    for k, (want, row) in enumerate(zip(expected.ids, expected.logprobs, strict=True)):
        if k >= len(out.ids):
            return differs(k, f"the output ends after {k} tokens, of {len(expected.ids)}")
        got, seen = out.ids[k], out.logprobs[k]
        if got != want and expected.margin[k] > limits.undecided:
            return differs(k, f"token {got} instead of {want}, which won by {expected.margin[k]:.6f}")
        for token, value in ((got, seen.token), *seen.top):
            gap = abs(value - float(row[token]))
            verdict.worst = max(verdict.worst, gap)
            if not gap <= limits.worst:
                return differs(k, f"log-probability of token {token} is {value:.6f}, not {float(row[token]):.6f}")
            verdict.values += 1
            verdict.mean += (gap - verdict.mean) / verdict.values
        if got != want:
            verdict.ties += 1
            return None
        verdict.tokens += 1
    if len(out.ids) != len(expected.ids):
        return differs(len(expected.ids), f"{len(out.ids)} tokens instead of {len(expected.ids)}")
    return None


def _losses(bench: Bench, plan: Plan, announce: Announce) -> Iterator[Loss]:
    """Of the default first, as a control, then of each lossy option alone."""
    greedy = [i for i, asked in enumerate(bench.asked) if asked.seed is None and not asked.only]
    asked: list[Asked] = [bench.asked[i] for i in greedy]
    expected = [bench.expected[i] for i in greedy]
    base = options_of({name: values[0] for name, values in plan.axes.items()}, bench.longest, bench.facts, bench.dtype)
    for name, value in [("", ""), *((n, v) for n, values in plan.lossy.items() for v in values)]:
        what = f"{name}={value}" if name else "default"
        announce(f"lossy options: {what}")
        chosen = {**base, name: value} if name else base

        def engine(chosen: dict[str, Any] = chosen, **more: Any) -> AbstractContextManager[LLM]:
            return bench.engine(chosen | more)

        try:
            yield measure(what, engine, asked, expected)
        except ValueError as error:
            yield Loss(what, refused=str(error))


def _figures(
    model: str, bench: Bench, plan: Plan, verdicts: list[Verdict], seen: list[Effect], losses: list[Loss], quick: bool
) -> dict[str, Any]:
    first = next((v.difference for v in verdicts if v.difference is not None), None)
    figures: dict[str, Any] = {
        "model": model,
        "device": bench.device,
        "dtype": bench.dtype,
        "tolerance": bench.limits.worst,
        "own_worst": bench.own[0] if bench.own else 0.0,
        "own_mean": bench.own[1] if bench.own else 0.0,
        "cases": "pairs" if quick else "all",
        "num_cases": len(verdicts),
        "num_failed": sum(v.difference is not None for v in verdicts),
        "first_difference": asdict(first) if first else None,
        "requests": len(bench.asked),
        "axes": {name: [str(value) for value in values] for name, values in plan.axes.items()},
        "left_out": dict(plan.left_out),
        "verdicts": [asdict(v) for v in verdicts],
        "sampling": [asdict(effect) for effect in seen],
        "lossy": [asdict(loss) for loss in losses],
    }
    return figures | {"unproven": unproven(figures)}


def unproven(figures: dict[str, Any]) -> list[str]:
    """What the run had to show besides equality and did not."""
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in figures["verdicts"]:
        words = dict(part.split("=", 1) for part in verdict["case"].split(" ") if "=" in part)
        total[words.get("speculative", "off")].update(verdict["counters"])
    missing = [
        f"speculative={way}: nothing was drafted"
        for way in figures["axes"].get("speculative", ())
        if way != "off" and not total[way]["drafted_tokens"]
    ]
    for name in ("preemptions", "prefix_hits", "pages_restored"):
        if not sum(counts[name] for counts in total.values()):
            missing.append(f"{name} is 0 in all cases")
    idle = [effect for effect in figures["sampling"] if not effect["changed"]]
    return missing + [f"sampling option {effect['option']} changed nothing: {effect['how']}" for effect in idle]


def holds(figures: dict[str, Any]) -> bool:
    """All exact options agree, and what had to happen meanwhile did."""
    return figures["num_failed"] == 0 and not figures["unproven"]


__all__ = ["UNITS", "Unverifiable", "holds", "run"]
