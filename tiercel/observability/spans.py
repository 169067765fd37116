"""Spans of each request on the OpenTelemetry SDK, made on the exporter thread from marks and step records.

Marks (the round's hooks) give the times, the step record gives what only the whole round knows. Every request closes exactly
one root span, however it ended; a phase that was not reached has no span.
"""

from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tiercel.core.batch import RequestRound, StepRecord
from tiercel.core.request import FinishReason
from tiercel.observability.records import RequestRecord
from tiercel.observability.req_time_stats import Mark, ReqTimeStats
from tiercel.observability.trace import to_epoch_ns

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
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("tiercel")
        self._open: dict[str, _OpenRequest] = {}

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
        for done in record.rounds:
            request = self._open.get(done.request_id)
            if request is not None:
                request.forget_before(record.draft_start_ns)
                self._round(request, done, record)

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
        if record.finish_reason == FinishReason.ERROR:
            request.root.set_status(Status(StatusCode.ERROR, record.error))
        request.root.end(end)

    def close(self) -> None:
        self._provider.shutdown()

    def _request(self, stats: ReqTimeStats) -> _OpenRequest:
        request = self._open.get(stats.request_id)
        if request is None:
            carrier = {"traceparent": stats.traceparent} if stats.traceparent else {}
            parent = TraceContextTextMapPropagator().extract(carrier, Context())
            root = self._tracer.start_span(
                f"chat {self._model}", parent, SpanKind.SERVER, start_time=to_epoch_ns(stats.created_ns)
            )
            request = self._open[stats.request_id] = _OpenRequest(stats, root)
        return request

    def _prefill(self, request: _OpenRequest, end: int) -> None:
        stats = request.stats
        if stats.wait_queue_entry_ns:
            waited = to_epoch_ns(stats.forward_entry_ns) if stats.forward_entry_ns else end
            self._span(request, "prefill_waiting", to_epoch_ns(stats.wait_queue_entry_ns), waited, {})
        if stats.forward_entry_ns:
            done = to_epoch_ns(stats.prefill_finished_ns) if stats.prefill_finished_ns else end
            self._span(request, "prefill_forward", to_epoch_ns(stats.forward_entry_ns), done, {})

    def _round(self, request: _OpenRequest, done: RequestRound, record: StepRecord) -> None:
        attributes = {
            "round": done.round,
            "num_draft_tokens": len(done.draft_token_ids),
            "emitted_tokens": done.num_emitted_tokens,
            "tiercel.step": record.step,
            "tiercel.batch_size": len(record.rounds),
        }
        self._decode(request, to_epoch_ns(record.draft_start_ns))
        extend_start = request.marks.get("spec_draft_extend_start")
        self._stages(request, attributes, done.num_correct_drafts)
        if extend_start is not None:
            for layer, end in enumerate(record.layer_end_ns):
                start = record.layer_end_ns[layer - 1] if layer else extend_start
                span = {"round": done.round, "tiercel.layer": layer}
                self._span(request, "spec_draft_layer", to_epoch_ns(start), to_epoch_ns(end), span)

    def _stages(self, request: _OpenRequest, attributes: dict[str, Any], num_correct_drafts: int | None) -> None:
        for stage in ("spec_draft", "spec_verify", "spec_draft_extend"):
            start, end = request.marks.pop(f"{stage}_start", None), request.marks.pop(f"{stage}_end", None)
            if start is None or end is None or end < start:  # not reached, or a mark found the queue full
                continue
            own = dict(attributes)
            if stage == "spec_verify" and num_correct_drafts is not None:
                own |= {"num_correct_drafts": num_correct_drafts, "accepted_tokens": num_correct_drafts}
            self._span(request, stage, to_epoch_ns(start), to_epoch_ns(end), own)

    def _span(self, request: _OpenRequest, name: str, start: int, end: int, attributes: dict[str, Any]) -> None:
        if STAGE_LEVELS[name] > request.stats.trace_level:
            return
        parent = self._decode(request, start) if name.startswith("spec_") else request.root
        span = self._tracer.start_span(name, otel.set_span_in_context(parent), attributes=attributes, start_time=start)
        span.end(end)

    def _decode(self, request: _OpenRequest, first_round: int) -> otel.Span:
        if request.decode is None:
            begun = request.stats.prefill_finished_ns
            start = to_epoch_ns(begun) if begun else first_round
            context = otel.set_span_in_context(request.root)
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
        attributes["tiercel.spec.per_position_acceptance"] = spec["per_position_acceptance"]
    if record.finish_reason == FinishReason.ERROR:
        attributes["error.type"] = "engine_error"
    return attributes
