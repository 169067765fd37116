"""The engine loop: schedule, one forward, hand out tokens, record."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import torch
from opentelemetry.sdk.trace.export import SpanExporter

from tiercel.core.batch import Batch, ForwardMode, GenerationBatchResult, StepRecord
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.request import FinishReason, Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.device.placement import Placement, place
from tiercel.engine.answer_text import AnswerText
from tiercel.engine.outputs import StepOutput
from tiercel.engine.sampling_checks import bad_word_ids, check_sampling
from tiercel.engine.scheduler import Scheduler
from tiercel.kvcache.manager import KvCacheManager
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.hub import resolve_model
from tiercel.models.opening import load_model, open_checkpoint
from tiercel.models.step import Target
from tiercel.observability.metrics import EngineView, Load
from tiercel.observability.pipeline import open_pipeline
from tiercel.observability.records import RequestRecord, request_record
from tiercel.observability.req_time_stats import ReqTimeStats, set_time_batch
from tiercel.speculative.base_worker import SpecWorker
from tiercel.speculative.registry import WorkerContext, check_spec, make_worker
from tiercel.speculative.target_runner import TargetRunner


@dataclass(frozen=True)
class LoadedTarget:
    """A target in memory; several engines of one process may share it, since weights never change."""

    checkpoint: Checkpoint
    model: Target
    placement: Placement


def load_target(config: EngineConfig, spec: SpecConfig) -> LoadedTarget:
    """Open the model, refuse a draft that cannot work with it, then read the weights.

    Raises:
        UserError: see ``resolve_model``, ``open_checkpoint``, ``check_spec`` and ``load_decoder``.
    """
    checkpoint = open_checkpoint(resolve_model(config.model))
    check_spec(spec, checkpoint)
    placement = place(config)
    return LoadedTarget(checkpoint, load_model(checkpoint, config, placement), placement)


class Engine:
    """Runs requests through one target and one worker. Not thread-safe: one thread calls it.

    Args:
        config: what runs.
        spec: who drafts.
        trace: what is recorded.
        target: a target that is loaded already; None loads ``config.model``.
        exporters: further span exporters.

    ``last_step`` is the record of the latest step.

    Raises:
        UserError: the model, the draft or a setting cannot work.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: SpecConfig,
        trace: TraceConfig,
        target: LoadedTarget | None = None,
        exporters: Sequence[SpanExporter] = (),
    ) -> None:
        target = target or load_target(config, spec)
        kv = KvCacheManager(config.kv_tokens, config.page_size)
        kv_dtype = target.model.kv_dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
        runner = TargetRunner(target.model, kv, target.placement, kv_dtype)
        worker = make_worker(WorkerContext(target.checkpoint, runner, config, spec))
        model_name = Path(config.model).name if "/" in config.model else config.model
        self._setup(config, target.checkpoint, worker, model_name, trace, exporters)

    def _setup(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        worker: SpecWorker,
        model_name: str,
        trace: TraceConfig,
        exporters: Sequence[SpanExporter],
    ) -> None:
        self.checkpoint, self.worker, self.kv, self.model_name = checkpoint, worker, worker.kv, model_name
        self.max_model_len = _context_limit(config, checkpoint.description.max_position)
        self.scheduler = Scheduler(config, self.kv, worker.num_steps, self._preempted, worker.num_draft_tokens)
        self.requests: dict[str, Request] = {}
        self.last_step: StepRecord | None = None
        self._deadlines: dict[str, int] = {}  # of those that have one
        view = EngineView(worker.method, worker.num_steps, worker.num_layers, self.load, worker.depths)
        self.pipeline = open_pipeline(trace, model_name, exporters, view)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def load(self) -> Load:
        """How busy the engine is; may be asked by any thread, since it only takes lengths."""
        scheduler, kv = self.scheduler, self.kv
        return Load(len(scheduler.admitted), len(scheduler.waiting), kv.num_slots_used, kv.num_slots_total)

    def check_request(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Refuse a request that cannot run; nothing is queued or recorded.

        Raises:
            UserError: an empty prompt, a token id out of range, a prompt that fills the context or the KV pool, an id in use,
                or a wish that cannot be granted.
        """
        count, vocab_size = len(prompt_token_ids), self.checkpoint.description.vocab_size
        if request_id in self.requests:
            raise UserError(f"request id {request_id!r} is in use: choose another")
        if not count or not all(type(t) is int and 0 <= t < vocab_size for t in prompt_token_ids):
            raise UserError(
                f"request {request_id}: the prompt must hold at least one token, each an integer from 0 to {vocab_size - 1}"
            )
        check_sampling(sampling, vocab_size)
        limit = min(self.max_model_len, self.kv.num_slots_total)
        if count >= limit:
            what = "context" if limit == self.max_model_len else "KV pool (kv_tokens)"
            raise UserError(
                f"request {request_id}: the prompt has {count} tokens, the {what} holds {limit}: shorten the prompt"
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        trace_headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """Queue a request. Where the context cannot hold ``max_tokens`` more, the answer ends with reason ``length`` earlier.

        Args:
            request_id: unique among those that live.
            prompt_token_ids: at least one.
            sampling: how tokens are chosen.
            trace_headers: W3C context of the caller (``traceparent``, ``tracestate``); a broken one begins a trace of its own.
            timeout_s: seconds from now after which the next step ends it, with reason ``timeout`` and the tokens it has.

        Raises:
            UserError: see ``check_request``; or the time-out is not above 0.
        """
        self.check_request(request_id, prompt_token_ids, sampling)
        if timeout_s is not None and not timeout_s > 0:
            raise UserError(f"request {request_id}: timeout_s={timeout_s} is not allowed: give seconds above 0")
        room = self.max_model_len - len(prompt_token_ids)
        most = min(sampling.max_tokens, room)
        sampling = dataclasses.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        stats = self.pipeline.new_time_stats(request_id, trace_headers)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        eos = frozenset(self.checkpoint.description.eos_token_ids)
        bad = bad_word_ids(sampling.bad_words, self.checkpoint.tokenizer)
        stop = AnswerText(self.checkpoint.tokenizer, sampling) if sampling.stop else None
        req = Request(request_id, list(prompt_token_ids), sampling, seed, eos, stats, bad, stop)
        stats.set_wait_queue_entry_time()
        self.requests[request_id] = req
        if timeout_s is not None:
            self._deadlines[request_id] = stats.created_ns + round(timeout_s * 1e9)
        self.scheduler.add(req)
        return req

    def abort(self, request_id: str) -> RequestRecord | None:
        """Withdraw a request, in whatever phase it is; None if there is no such request (it may just have finished)."""
        req = self.requests.get(request_id)
        if req is None:
            return None
        req.finish_reason = FinishReason.ABORT
        return self._finish(req)

    def trace_headers(self, req: Request) -> dict[str, str]:
        """What carries a request's trace on; see ``TracePipeline.trace_headers``."""
        return self.pipeline.trace_headers(_stats(req))

    def step(self) -> list[StepOutput]:
        """Play one step: prefill chunks, or one round.

        Whatever goes wrong inside is raised as it is, after every request has been ended: half a step cannot be resumed. A
        fault also closes the trace; an interrupt (Ctrl-C) aborts the requests, and the engine can go on with others.

        Returns:
            New tokens by request; requests that ended carry their record.
        """
        try:
            return self._step()
        except Exception as error:
            self._end_all(FinishReason.ERROR, f"the engine failed: {error!r}")
            self.pipeline.close()
            raise
        except BaseException:
            self._end_all(FinishReason.ABORT, None)
            raise

    def close(self) -> None:
        """End what still runs as aborted, then flush traces and records."""
        self._end_all(FinishReason.ABORT, None)
        self.pipeline.close()

    def _step(self) -> list[StepOutput]:
        start = perf_counter_ns()
        outputs = self._end_overdue(start)
        batch = self.scheduler.schedule()
        outputs += [StepOutput(r, [], [], self._finish(r)) for r in list(self.scheduler.admitted) if r.is_finished]
        if batch is None:
            return outputs
        if batch.mode is ForwardMode.EXTEND:
            set_time_batch(batch.reqs, "set_forward_entry_time")
        return outputs + self._take(batch, self.worker.forward_batch_generation(batch), start)

    def _take(self, batch: Batch, result: GenerationBatchResult, start: int) -> list[StepOutput]:
        record = result.record
        first = [req for req in batch.reqs if len(req.output_token_ids) == 1 and batch.mode is ForwardMode.EXTEND]
        set_time_batch(first, "set_prefill_finished_time")
        self.scheduler.update(batch)
        record.num_waiting = len(self.scheduler.waiting)
        record.kv_slots_used, record.kv_slots_total = self.kv.num_slots_used, self.kv.num_slots_total
        record.start_ns, record.end_ns = start, perf_counter_ns()
        self.worker.observe(record)
        if batch.mode is ForwardMode.DECODE:
            stage_ns = record.stage_ns
            for req in batch.reqs:
                req.spec.stage_ns.add(stage_ns)
        self.pipeline.on_step(record)
        self.last_step = record
        outputs = []
        for req, count in zip(batch.reqs, result.num_emitted, strict=True):
            tail = len(req.output_token_ids) - count
            finished = self._finish(req) if req.is_finished else None
            news = (req.output_token_ids[tail:], req.output_sources[tail:])
            outputs.append(StepOutput(req, *news, finished, req.output_logprobs[tail:]))
        return outputs

    def _end_overdue(self, now_ns: int) -> list[StepOutput]:
        outputs = []
        for request_id in [name for name, deadline in self._deadlines.items() if deadline <= now_ns]:
            req = self.requests[request_id]
            req.finish_reason = FinishReason.TIMEOUT
            outputs.append(StepOutput(req, [], [], self._finish(req)))
        return outputs

    def _finish(self, req: Request) -> RequestRecord:
        del self.requests[req.request_id]
        self._deadlines.pop(req.request_id, None)
        self.scheduler.remove(req)
        self.worker.forget(req.request_id)
        stats = _stats(req)
        stats.set_completion_time()
        record = request_record(req, stats, self.model_name, self.worker.method, self.worker.num_steps)
        self.pipeline.on_request(record, stats)
        return record

    def _preempted(self, req: Request) -> None:
        self.worker.forget(req.request_id)
        _stats(req).set_retract_time()

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for req in list(self.requests.values()):
            req.finish_reason, req.error = reason, error
            self._finish(req)


def _stats(req: Request) -> ReqTimeStats:
    stats = req.time_stats
    assert isinstance(stats, ReqTimeStats)
    return stats


def _context_limit(config: EngineConfig, max_position: int) -> int:
    if config.max_model_len is None:
        return max_position
    if config.max_model_len > max_position:
        raise UserError(
            f"max_model_len={config.max_model_len} exceeds the model's context of {max_position}: choose at most that"
        )
    return config.max_model_len
