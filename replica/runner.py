"""The device behind :class:`replica.batch.Runner`: weights, KV pages, forward pass and sampler.

Steps execute in launch order. On a CPU one worker thread runs them; on a GPU the launching thread only enqueues on
the stream, and the result's copy to the host is waited for when it is asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.dispatch import SWITCHES, Dispatch, Site
from kernels.quantized_kv import stored_dtype
from replica import weights as checkpoints
from replica.batch import Batch, Move, OwnFault, Row, StepResult
from replica.config import ResolvedConfig
from replica.draft import DraftModel, load_draft
from replica.host_pages import HostPages
from replica.inputs import InputBuilder, StepInputs
from replica.kv import PagedKV, PendingSums
from replica.model import Decoder, ModelConfig, Weights
from replica.prompt_logprobs import PromptLogprobs, PromptScores
from replica.sampler import Sampled, SamplePlan, Sampler

if TYPE_CHECKING:
    from replica.graphs import Key, Kind, StepGraphs

log = logging.getLogger("everwarm.replica")


def choose_ops(model: ModelConfig, config: ResolvedConfig) -> Dispatch:
    """Which kernels run this model. Raises ValueError for switches that can't be honoured here."""
    site = Site(
        device=torch.device(config.device),
        dtype=getattr(torch, config.dtype),
        kv_dtype=stored_dtype(config.kv_cache_dtype),
        page_size=config.page_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        deterministic=config.deterministic,
        quantization=config.quantization,
        cpu_kernels=config.cpu_kernels,
    )
    return Dispatch(site, {name: getattr(config, name) for name in SWITCHES})


class _Pending:
    """One enqueued step: host tensors, and how to know that they are filled."""

    def __init__(
        self,
        batch: Batch,
        sampled: Sampled | None,
        prompt: list[PromptScores | None],
        started: float,
        faults: dict[int, str],
    ) -> None:
        self.batch, self.sampled, self.prompt, self.started = batch, sampled, prompt, started
        self.faults = faults
        """Rows that could not be sampled from: no grammar mask."""
        self.event: torch.cuda.Event | None = None

    def newest(self, slot: int) -> int:
        """The id that this step sampled last for ``slot``; waits for the step. Raises LookupError."""
        if self.event is not None:
            self.event.synchronize()
        at = 0
        for row in self.batch.rows:
            if row.slot == slot and row.num_samples and self.sampled is not None:
                ids = self.sampled.ids[at : at + row.num_samples].tolist()
                return int(ids[row.num_kept(ids) - 1])
            at += row.num_samples
        raise LookupError(f"slot {slot} was not sampled for in the step before")


class RunnerStep:
    """Implements replica.batch.Step. Filled by the worker thread (CPU) or collected on demand (GPU)."""

    def __init__(self, collect: Callable[[_Pending], StepResult]) -> None:
        self._collect = collect
        self._done = threading.Event()
        self._outcome: StepResult | BaseException | None = None
        self.pending: _Pending | None = None

    def fill(self, outcome: StepResult | BaseException) -> None:
        self._outcome = outcome
        self._done.set()

    def wait(self, timeout: float) -> bool:
        if self.pending is None or self.pending.event is None:
            return self._done.wait(timeout)
        # CUDA events have no timed wait; a sleep of 50 us costs less than a step and gives the GIL away.
        until = time.monotonic() + timeout
        while not self.pending.event.query():
            if time.monotonic() >= until:
                return False
            time.sleep(5e-5)
        return True

    def result(self) -> StepResult:
        if self.pending is not None and self.pending.event is not None and self._outcome is None:
            self.pending.event.synchronize()
            self._outcome = self._collect(self.pending)
        elif self._outcome is None:
            self._done.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class ModelRunner:
    """Implements replica.batch.Runner for one CPU or one GPU."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        config: ResolvedConfig,
        ops: Dispatch | None = None,
        draft: Decoder | None = None,
    ) -> None:
        """Takes the weights over. ``draft``: the decoder of ``speculative_model``. Raises ValueError for switches that
        can't be honoured here."""
        self.config = config
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_model_len = config.max_model_len
        self.num_pages = config.num_pages
        self._device = weights.embed.device
        self._dtype = weights.embed.dtype
        self._ops = choose_ops(model, config) if ops is None else ops
        self._decoder = Decoder(model, weights, self._ops, config.max_model_len)
        self.kv = PagedKV(model, config.num_pages, config.page_size, config.kv_cache_dtype, self._device)
        self._kv = self.kv.layers
        self._host = HostPages(self.kv, config.num_host_pages) if config.num_host_pages else None
        self._broken: BaseException | None = None
        """Why pages may hold anything."""
        self._inputs = InputBuilder(self._device, config.page_size)
        self._sampler = Sampler(model.vocab_size, config.max_batch_size, self._device, self._ops.largest)
        self._prompt = PromptLogprobs(self._decoder)
        self._draft = DraftModel.open(config, self._decoder, self.kv, self._sampler, draft)
        self._graphs: StepGraphs | None = None
        self._compiled = 0
        """Kernels compiled when ready."""
        self._no_graphs = self._capture()
        """Why steps are not replayed from CUDA graphs; empty when they are."""
        self._steps = 0
        self._before: _Pending | None = None
        """The step enqueued last."""
        self._closed = False
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        if self._device.type == "cpu":
            self._worker = threading.Thread(target=self._work, name="everwarm-runner", daemon=True)
            self._worker.start()
        for operation, choice in self._ops.choices().items():
            log.info("kernel %s: %s", operation, choice)

    @classmethod
    def open(cls, path: str | Path, config: ResolvedConfig, *, load_format: str = "auto") -> ModelRunner:
        """Loads a GGUF file or a directory of safetensors. Raises what :func:`replica.weights.load` raises."""
        ops = choose_ops(checkpoints.read_config(path), config)
        model, weights = checkpoints.load(
            path, getattr(torch, config.dtype), config.device, load_format=load_format, prepare=ops.prepare
        )
        return cls(model, weights, config, ops, load_draft(config, choose_ops, load_format))

    # --- replica.batch.Runner

    def launch(self, batch: Batch) -> RunnerStep:
        if self._closed:
            raise RuntimeError("the runner is closed")
        self._check_sound()
        step = RunnerStep(self._collect)
        if self._worker is None:
            with torch.inference_mode():
                pending = self._enqueue(batch)
                pending.event = torch.cuda.Event()
                pending.event.record()
            step.pending = pending
            return step

        # Made here, while the worker is in the step before; a draft model fills rows in first.
        inputs = self._inputs.build(batch.rows) if self._draft is None else None

        def execute() -> None:
            try:
                self._check_sound()
                step.fill(self._collect(self._enqueue(batch, inputs)))
            except BaseException as error:
                step.fill(error)

        self._queue.put(execute)
        return step

    def move(self, moves: list[Move]) -> None:
        if self._worker is None:
            self._move(moves)
        else:
            self._queue.put(lambda: self._move(moves))

    def _move(self, moves: list[Move]) -> None:
        assert self._host is not None, "there is no host tier"
        try:
            with torch.inference_mode():
                self._host.move(moves)
        except Exception as error:
            log.exception("copying pages between device and host failed")
            self._broken = error

    def checksums(self, pages: list[int]) -> PendingSums:
        sums = PendingSums()
        if self._worker is None:
            sums.enqueue(self.kv, pages)
        else:
            self._queue.put(lambda: sums.enqueue(self.kv, pages))
        return sums

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"copying pages between device and host failed: {self._broken!r}")

    def release(self, slot: int) -> None:
        if self._worker is None:
            self._sampler.release(slot)
        else:
            self._queue.put(lambda: self._sampler.release(slot))

    def describe(self) -> dict[str, Any]:
        m = self.model
        return {
            "device": str(self._device) if self._device.type == "cpu" else torch.cuda.get_device_name(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "threads": self.config.threads if self._device.type == "cpu" else None,
            "family": m.family,
            "num_layers": m.num_layers,
            "weight_bytes": sum(t.nbytes for t in self._decoder.weights.tensors()) + self._ops.quantized_bytes,
            "quantization": self.config.quantization,
            "kv_cache_dtype": self.config.kv_cache_dtype,
            "kv_bytes": self.kv.num_bytes,
            "host_bytes": self._host.num_bytes if self._host else 0,
            "num_pages": self.num_pages,
            "draft": None if self._draft is None else self._draft.describe(),
            "kernels": self._ops.choices(),
            "graphs": self._no_graphs if self._graphs is None else self._graphs.describe(),
            "steps": self._steps,
            "compiled_after_ready": self._ops.compiled - self._compiled if self._graphs is not None else None,
        }

    def close(self) -> None:
        """Ends the worker after the steps already launched. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
        else:
            torch.cuda.synchronize(self._device)
            if self._graphs is not None:
                self._graphs.release()

    def check_invariants(self) -> None:
        """Call with no step in flight."""
        self._sampler.edits.check_invariants()
        self.kv.check_invariants()
        if self._draft is not None:
            self._draft.check_invariants()

    def _capture(self) -> str:
        """Captures steps where that is possible; else returns why not."""
        if self._device.type != "cuda":
            return "CUDA graphs need a GPU"
        if (why := self._ops.capturable) is not None:
            return why
        from replica.graphs import StepGraphs  # Triton, which a CPU replica does without
        from replica.warmup import warm

        context = min(self.max_model_len, (self.num_pages - 1) * self.config.page_size)
        self._graphs = StepGraphs(
            self._decoder, self._kv, self._sampler.last, page_size=self.config.page_size, max_context=context,
            max_tokens=self.config.chunk_size, share=not self.config.deterministic,
            guesses=0 if self.config.speculative == "off" else self.config.speculative_tokens,
        )  # fmt: skip
        self._graphs.capture(("ids", "logits") if self._ops.norm_sample is not None else ("logits",))
        with torch.inference_mode():
            warm(self._decoder, self._kv, self.config.page_size, context)
            if self._draft is not None:
                warm(self._draft.decoder, self._draft.layers, self.config.page_size, context)
        self._compiled = self._ops.compiled
        return ""

    # --- one step

    def _work(self) -> None:
        # The thread count is per calling thread in OpenMP, so it is set where the work is done.
        torch.set_num_threads(self.config.threads)
        with torch.inference_mode():
            while (job := self._queue.get()) is not None:
                job()

    def _enqueue(self, batch: Batch, inputs: StepInputs | None = None) -> _Pending:
        started = time.perf_counter()
        self._steps += 1
        plan = self._sampler.plan(batch.rows)
        if self._draft is not None:
            self._draft.prepare(batch.rows)
        if self._graphs is not None and not self._prompt.wanted(batch.rows):
            kind: Kind = "ids" if self._sampler.is_plain(plan) and self._ops.norm_sample is not None else "logits"
            if (key := self._graphs.find(batch.rows, kind)) is not None:
                return self._replay(batch, plan, key, started)
        inputs = self._inputs.build(batch.rows) if inputs is None else inputs
        ids = inputs.ids
        if inputs.any_from_device:
            ids = torch.where(ids < 0, self._sampler.last_ids(inputs.slots_of_tokens), ids)
        wants_prompt = self._prompt.wanted(batch.rows)
        rows = None if wants_prompt else inputs.sample_rows
        stream = self._decoder.hidden(ids, self._kv, inputs.meta, rows)
        prompt = self._prompt.score(batch.rows, stream, inputs.meta.cu_q_host) if wants_prompt else []
        sampled, faults = None, {}
        if plan.samples:
            logits = self._decoder.logits(stream, inputs.sample_rows if wants_prompt else None)
            faults = self._make_masks(batch.rows)
            sampled = self._sampler.sample(logits, plan).to_host()
        self._before = _Pending(batch, sampled, [scores and scores.to_host() for scores in prompt], started, faults)
        return self._before

    def _replay(self, batch: Batch, plan: SamplePlan, key: Key, started: float) -> _Pending:
        assert self._graphs is not None
        out = self._graphs.run(batch.rows, key)
        sampled, faults = None, {}
        if plan.samples and key.kind == "ids":
            sampled = Sampled(out, None, None, None).to_host()
            if any(row.num_samples > 1 for row in batch.rows):
                self._sampler.advance(plan, out)
        elif plan.samples:
            faults = self._make_masks(batch.rows)
            sampled = self._sampler.sample(out, plan).to_host()
        self._before = _Pending(batch, sampled, [], started, faults)
        return self._before

    def _make_masks(self, rows: list[Row]) -> dict[int, str]:
        """Called with the forward pass enqueued: where a mask needs the ids of the step before, the device has work
        while the host waits for them. Returns the faults by row."""

        def newest(slot: int) -> int:
            if self._before is None:
                raise LookupError("there is no step before")
            return self._before.newest(slot)

        return {index: fault for index, row in enumerate(rows) if (fault := row.make_mask(newest))}

    def _collect(self, pending: _Pending) -> StepResult:
        rows, sampled = pending.batch.rows, pending.sampled
        result = StepResult([[] for _ in rows], faults=dict(pending.faults))
        if sampled is not None:
            self._read_samples(rows, sampled, result)
        if any(pending.prompt):
            result.prompt_logprobs = [scores.read() if scores else None for scores in pending.prompt]
        for index in result.faults:
            self._scrub(rows[index], result)
        result.device_ms = (time.perf_counter() - pending.started) * 1e3
        return result

    def _read_samples(self, rows: list[Row], sampled: Sampled, result: StepResult) -> None:
        ids = sampled.ids.tolist()
        sound = [token >= 0 for token in ids] if sampled.sound is None else sampled.sound.tolist()
        allowed = [True] * len(ids) if sampled.open is None else sampled.open.tolist()
        logprobs = sampled.logprobs.read() if sampled.logprobs is not None else {}
        if logprobs:
            result.logprobs = [None] * len(rows)
        at = 0
        for index, row in enumerate(rows):
            kept = range(at, at + row.num_kept(ids[at : at + row.num_samples]))
            rejected = range(kept.stop, at + row.num_samples)
            at += row.num_samples
            if index in result.faults:
                continue
            if not all(sound[i] for i in kept):
                result.faults[index] = "the model gave non-finite logits"
            elif not all(allowed[i] for i in kept):
                what = "the request's format, allowed_token_ids, bad_words and min_tokens"
                result.faults[index] = OwnFault(f"{what} together leave no token to go on with")
            else:
                result.ids[index] = ids[kept.start : kept.stop]
                if logprobs and row.sampling.logprobs is not None:
                    result.logprobs[index] = [logprobs[i] for i in kept]
                if not all(sound[i] for i in rejected):
                    self._scrub(row, result)

    def _scrub(self, row: Row, result: StepResult) -> None:
        """Attention multiplies what it masks by 0; a NaN left in a page would reach whoever gets that page next."""
        spoilt = self.kv.scrub(torch.from_numpy(np.asarray(row.pages, np.int64)).to(self._device))
        result.spoilt += row.pages[spoilt.cpu().numpy()].tolist()
