"""Spans of each request on the OpenTelemetry SDK, made on the exporter thread from marks and step records.

Marks (the round's hooks) give the times, the step record gives what only the whole round knows. Every request closes exactly
one root span, however it ended; a phase that was not reached has no span. One step serves many requests: it is a span of its own,
in a trace of its own, and each request's verification links to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import propagate
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from tiercel.core.batch import RequestRound, StepRecord
from tiercel.core.request import FinishReason
from tiercel.observability.records import RequestRecord
from tiercel.observability.req_time_stats import Mark, ReqTimeStats
from tiercel.observability.trace import BATCH_STEP, to_epoch_ns

STAGE_LEVELS = {
    "prefill_waiting": 1,
    "prefill_forward": 1,
    "decode_forward": 1,
    "spec_draft": 2,
    "spec_verify": 2,
    "spec_draft_extend": 3,
    "spec_draft_layer": 3,
}
"""Lowest trace level at which a stage becomes a span."""
STEP_LEVEL = STAGE_LEVELS["spec_verify"]
"""Lowest trace level of a request whose steps become spans: those that link to them."""


def headers_of(span: otel.Span) -> dict[str, str]:
    """What carries a span's context on: ``traceparent`` and ``tracestate``, or as ``OTEL_PROPAGATORS`` says."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, otel.set_span_in_context(span, Context()))
    return carrier


@dataclass(slots=True)
class _OpenRequest:
    stats: ReqTimeStats
    root: otel.Span
    decode: otel.Span | None = None
    marks: dict[str, int] = field(default_factory=dict)
    num_correct_drafts: int | None = None

    def forget_before(self, ts_ns: int) -> None:
        """Drop marks of an earlier round whose step record found the queue full: they must not end this round's stages."""
        self.marks = {name: mark for name, mark in self.marks.items() if mark >= ts_ns}


class SpanSink:
    """Builds the span tree; ``provider`` exports it.

    Args:
        provider: tracer provider, shut down by ``close``.
        model: model name in the root span's name.
        legacy_names: see ``TraceConfig.trace_legacy_names``.
    """

    def __init__(self, provider: TracerProvider, model: str, *, legacy_names: bool = False) -> None:
        self._provider, self._model, self._legacy_names = provider, model, legacy_names
        self._tracer = provider.get_tracer("tiercel")
        self._open: dict[str, _OpenRequest] = {}

    def begin(self, stats: ReqTimeStats) -> None:
        """Begin a request's root span under the caller's context, if it sent one; never under the process's own."""
        parent = propagate.extract(stats.trace_headers, Context())
        name, start = f"chat {self._model}", to_epoch_ns(stats.created_ns)
        stats.root = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=start)

    def on_mark(self, mark: Mark) -> None:
        for stats in mark.requests:
            if stats.trace_level == 0:
                continue
            request = self._request(stats)
            if mark.method == "set_retract_time":
                request.root.add_event("retract", timestamp=to_epoch_ns(mark.ts_ns))
                continue
            request.marks[mark.method.removeprefix("set_").removesuffix("_time")] = mark.ts_ns
            if mark.attrs:
                request.num_correct_drafts = mark.attrs["num_correct_drafts"]

    def on_step(self, record: StepRecord) -> None:
        traced = [(self._open[done.request_id], done) for done in record.rounds if done.request_id in self._open]
        step = None
        if any(
            req.stats.trace_level >= STEP_LEVEL and req.root.get_span_context().trace_flags.sampled for req, _ in traced
        ):
            step = self._step(record)
        for request, done in traced:
            request.forget_before(record.draft_start_ns)
            self._round(request, done, record, step)

    def on_request(self, record: RequestRecord, stats: ReqTimeStats) -> None:
        if stats.trace_level == 0:
            return
        request = self._request(stats)
        del self._open[stats.request_id]
        self._stages(request, {}, request.num_correct_drafts)  # a round that never came to its record
        end = to_epoch_ns(stats.completion_ns or stats.created_ns)
        self._prefill(request, end)
        if request.decode:
            request.decode.end(end)
        request.root.set_attributes(_root_attributes(record))
        if self._legacy_names:
            request.root.set_attributes(_legacy_attributes(record, stats))
        if record.finish_reason == FinishReason.ERROR:
            request.root.set_status(Status(StatusCode.ERROR, record.error))
        request.root.end(end)

    def close(self) -> None:
        self._provider.shutdown()

    def _request(self, stats: ReqTimeStats) -> _OpenRequest:
        request = self._open.get(stats.request_id)
        if request is None:
            if stats.root is None:  # tracing was switched on between its arrival and now
                self.begin(stats)
            request = self._open[stats.request_id] = _OpenRequest(stats, stats.root)
        return request

    def _prefill(self, request: _OpenRequest, end: int) -> None:
        stats = request.stats
        if stats.wait_queue_entry_ns:
            waited = to_epoch_ns(stats.forward_entry_ns) if stats.forward_entry_ns else end
            self._span(request, "prefill_waiting", to_epoch_ns(stats.wait_queue_entry_ns), waited, {})
        if stats.forward_entry_ns:
            done = to_epoch_ns(stats.prefill_finished_ns) if stats.prefill_finished_ns else end
            self._span(request, "prefill_forward", to_epoch_ns(stats.forward_entry_ns), done, {})

    def _step(self, record: StepRecord) -> SpanContext:
        attributes: dict[str, Any] = {
            "tiercel.step": record.step,
            "tiercel.batch_size": len(record.rounds),
            "tiercel.num_waiting": record.num_waiting,
            "tiercel.kv_slots_used": record.kv_slots_used,
            "tiercel.clock": record.clock,
            "tiercel.spec.method": record.method,
            "tiercel.spec.num_draft_tokens": sum(len(done.draft_token_ids) for done in record.rounds),
            "tiercel.spec.num_correct_drafts": sum(done.num_correct_drafts for done in record.rounds),
        }
        start, end = to_epoch_ns(record.start_ns), to_epoch_ns(record.end_ns)
        span = self._tracer.start_span(BATCH_STEP, Context(), attributes=attributes, start_time=start)
        span.end(end)
        return span.get_span_context()

    def _round(self, request: _OpenRequest, done: RequestRound, record: StepRecord, step: SpanContext | None) -> None:
        attributes = {
            "round": done.round,
            "num_draft_tokens": len(done.draft_token_ids),
            "emitted_tokens": done.num_emitted_tokens,
            "tiercel.step": record.step,
            "tiercel.batch_size": len(record.rounds),
        }
        self._decode(request, to_epoch_ns(record.draft_start_ns))
        extend_start = request.marks.get("spec_draft_extend_start")
        self._stages(request, attributes, done.num_correct_drafts, step)
        if extend_start is not None:
            for layer, end in enumerate(record.layer_end_ns):
                start = record.layer_end_ns[layer - 1] if layer else extend_start
                span = {"round": done.round, "tiercel.layer": layer}
                self._span(request, "spec_draft_layer", to_epoch_ns(start), to_epoch_ns(end), span)

    def _stages(
        self,
        request: _OpenRequest,
        attributes: dict[str, Any],
        num_correct_drafts: int | None,
        step: SpanContext | None = None,
    ) -> None:
        for stage in ("spec_draft", "spec_verify", "spec_draft_extend"):
            start, end = request.marks.pop(f"{stage}_start", None), request.marks.pop(f"{stage}_end", None)
            if start is None or end is None or end < start:  # not reached, or a mark found the queue full
                continue
            own, links = dict(attributes), []
            if stage == "spec_verify":
                links = [Link(step)] if step else []
                if num_correct_drafts is not None:
                    own |= {"num_correct_drafts": num_correct_drafts, "accepted_tokens": num_correct_drafts}
            self._span(request, stage, to_epoch_ns(start), to_epoch_ns(end), own, links)

    def _span(
        self,
        request: _OpenRequest,
        name: str,
        start: int,
        end: int,
        attributes: dict[str, Any],
        links: Sequence[Link] = (),
    ) -> None:
        if STAGE_LEVELS[name] > request.stats.trace_level:
            return
        parent = self._decode(request, start) if name.startswith("spec_") else request.root
        context = otel.set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, context, attributes=attributes, links=links, start_time=start)
        span.end(end)

    def _decode(self, request: _OpenRequest, first_round: int) -> otel.Span:
        if request.decode is None:
            begun = request.stats.prefill_finished_ns
            start = to_epoch_ns(begun) if begun else first_round
            context = otel.set_span_in_context(request.root, Context())
            request.decode = self._tracer.start_span("decode_forward", context, start_time=start)
        return request.decode


def _root_attributes(record: RequestRecord) -> dict[str, Any]:
    spec = record.spec
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tiercel",
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": record.sampling["max_tokens"],
        "gen_ai.request.temperature": record.sampling["temperature"],
        "gen_ai.request.top_p": record.sampling["top_p"],
        "gen_ai.request.top_k": record.sampling["top_k"],
        "gen_ai.request.seed": str(record.sampling["seed"]),  # may exceed OTLP's signed 64-bit integers
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "finish_reason": record.finish_reason,
        "tiercel.spec.method": record.method,
        "tiercel.spec.num_spec_tokens": record.num_steps,
        "tiercel.spec.num_rounds": spec["num_spec_steps"],
        "tiercel.spec.num_draft_tokens": spec["num_draft_tokens"],
        "tiercel.spec.num_correct_drafts": spec["num_accepted_draft_tokens"],
        "tiercel.spec.num_emitted_tokens": spec["num_emitted_tokens"],
        "tiercel.spec.acceptance_histogram": spec["acceptance_histogram"],
        "tiercel.num_preemptions": record.num_preemptions,
    }
    if record.time_to_first_token_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.time_to_first_token_ms / 1e3
    if spec["num_spec_steps"]:
        attributes["tiercel.spec.acceptance_length"] = spec["mean_acceptance_length"]
        attributes["tiercel.spec.acceptance_rate"] = spec["draft_acceptance_rate"] or 0.0
        attributes["tiercel.spec.per_position_acceptance"] = spec["per_position_acceptance"]
        correct = spec["per_step_accepted"]
        per_position = [sum(count > i for count in correct) for i in range(record.num_steps)]
        attributes["tiercel.spec.num_correct_drafts_per_position"] = per_position
    if record.finish_reason == FinishReason.ERROR:
        attributes["error.type"] = "engine_error"
    return attributes


def _legacy_attributes(record: RequestRecord, stats: ReqTimeStats) -> dict[str, Any]:
    # Names of vLLM's and SGLang's request spans; latencies in seconds, of phases that were reached.
    attributes: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.e2e": record.e2e_ms / 1e3,
    }
    queued, entered, first, end = (
        stats.wait_queue_entry_ns,
        stats.forward_entry_ns,
        stats.prefill_finished_ns,
        stats.completion_ns,
    )
    spans = {
        "time_in_queue": (queued, entered),
        "time_to_first_token": (stats.created_ns, first),
        "time_in_model_prefill": (entered, first),
        "time_in_model_decode": (first, end),
        "time_in_model_inference": (entered, end),
    }
    for name, (start, stop) in spans.items():
        if start is not None and stop is not None:
            attributes[f"gen_ai.latency.{name}"] = (stop - start) / 1e9
    return attributes
