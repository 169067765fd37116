"""Spans of each request, made on the exporter thread from marks and step records.

Marks (the round's hooks) give the times, the step record gives what only the whole round knows. Every request closes exactly
one root span, however it ended; a phase that was not reached has no span. One step serves many requests: it is a span of its own,
in a trace of its own, and each request's verification links to it. Whether a trace is sampled is decided once, at its root.

A span is made when it is over, whole: the SDK's way of opening it first and changing it under a lock costs several times more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tiercel.core.batch import RequestRound, StepRecord
from tiercel.core.request import FinishReason
from tiercel.observability.records import RequestRecord
from tiercel.observability.req_time_stats import Mark, ReqTimeStats
from tiercel.observability.root_context import RootContext, RootContexts, root_name
from tiercel.observability.span_limits import Limited
from tiercel.observability.trace import BATCH_STEP, CountingProvider, to_epoch_ns

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


SCOPE = InstrumentationScope("tiercel")
UNSET = Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_STAGES = tuple((s, f"{s}_start", f"{s}_end") for s in ("spec_draft", "spec_verify", "spec_draft_extend"))
_MARK_NAMES = {f"set_{mark}_time": mark for _, begun, ended in _STAGES for mark in (begun, ended)}


@dataclass(slots=True)
class _OpenRequest:
    stats: ReqTimeStats
    root: RootContext
    decode: SpanContext
    decode_start: int | None = None
    marks: dict[str, int] = field(default_factory=dict)
    num_correct_drafts: int | None = None
    events: list[Event] = field(default_factory=list)

    def forget_before(self, ts_ns: int) -> None:
        """Drop marks of an earlier round whose step record found the queue full: they must not end this round's stages."""
        if any(mark < ts_ns for mark in self.marks.values()):
            self.marks = {name: mark for name, mark in self.marks.items() if mark >= ts_ns}


class SpanSink:
    """Builds the span tree; ``provider`` exports it.

    Args:
        provider: takes the finished spans, shut down by ``close``.
        model: model name in the root span's name.
        roots: contexts for requests that arrived while tracing was off; None makes them of ``provider``.
        legacy_names: see ``TraceConfig.trace_legacy_names``.
    """

    def __init__(
        self, provider: CountingProvider, model: str, roots: RootContexts | None = None, *, legacy_names: bool = False
    ) -> None:
        self._provider, self._root_name, self._legacy_names = provider, root_name(model), legacy_names
        self._roots = roots or RootContexts(provider, model)
        self._new_span_id, self._new_trace_id = (
            provider.id_generator.generate_span_id,
            provider.id_generator.generate_trace_id,
        )
        self._limited = Limited()
        self._open: dict[str, _OpenRequest] = {}

    def on_mark(self, mark: Mark) -> None:
        for stats in mark.requests:
            request = self._request(stats)
            if request is None:
                continue
            if mark.method == "set_retract_time":
                request.events.append(Event("retract", timestamp=to_epoch_ns(mark.ts_ns)))
                continue
            request.marks[_MARK_NAMES[mark.method]] = mark.ts_ns
            if mark.attrs:
                request.num_correct_drafts = mark.attrs["num_correct_drafts"]

    def on_step(self, record: StepRecord) -> None:
        traced = [(request, done) for done in record.rounds if (request := self._open.get(done.request_id))]
        links: Sequence[Link] = ()
        if any(request.stats.trace_level >= STEP_LEVEL for request, _ in traced):
            links = (Link(self._step(record)),)
        for request, done in traced:
            request.forget_before(record.draft_start_ns)
            self._round(request, done, record, links)

    def on_request(self, record: RequestRecord, stats: ReqTimeStats) -> None:
        request = self._request(stats)
        if request is None:
            return
        del self._open[stats.request_id]
        self._stages(request, {}, request.num_correct_drafts)  # a round that never came to its record
        end = to_epoch_ns(stats.completion_ns or stats.created_ns)
        self._prefill(request, end)
        root = request.root
        if record.spec["num_spec_steps"]:
            self._begin_decode(request, end)  # below MARK_LEVEL no round has told of itself
        if request.decode_start is not None:
            self._take("decode_forward", request.decode, root.context, request.decode_start, end)
        attributes = _root_attributes(record)
        if self._legacy_names:
            attributes |= _legacy_attributes(record, stats)
        failed = record.finish_reason == FinishReason.ERROR
        self._take(
            self._root_name,
            root.context,
            root.parent,
            to_epoch_ns(stats.created_ns),
            end,
            attributes,
            events=self._limited.events(request.events),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, record.error) if failed else UNSET,
        )

    def close(self) -> None:
        self._provider.shutdown()

    def _request(self, stats: ReqTimeStats) -> _OpenRequest | None:
        """What is known of a request; None where it has no spans."""
        if stats.trace_level == 0:
            return None
        request = self._open.get(stats.request_id)
        if request is None:
            if stats.root is None:
                stats.root = self._roots.begin(stats.trace_headers)
            if not stats.root.is_sampled:
                return None
            decode = self._child(stats.root.context)
            request = self._open[stats.request_id] = _OpenRequest(stats, stats.root, decode)
        return request

    def _prefill(self, request: _OpenRequest, end: int) -> None:
        stats = request.stats
        if stats.wait_queue_entry_ns:
            waited = to_epoch_ns(stats.forward_entry_ns) if stats.forward_entry_ns else end
            self._span(request, "prefill_waiting", to_epoch_ns(stats.wait_queue_entry_ns), waited)
        if stats.forward_entry_ns:
            done = to_epoch_ns(stats.prefill_finished_ns) if stats.prefill_finished_ns else end
            self._span(request, "prefill_forward", to_epoch_ns(stats.forward_entry_ns), done)

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
        context = SpanContext(self._new_trace_id(), self._new_span_id(), False, _SAMPLED)
        self._take(BATCH_STEP, context, None, to_epoch_ns(record.start_ns), to_epoch_ns(record.end_ns), attributes)
        return context

    def _round(self, request: _OpenRequest, done: RequestRound, record: StepRecord, links: Sequence[Link]) -> None:
        attributes = {
            "round": done.round,
            "num_draft_tokens": len(done.draft_token_ids),
            "emitted_tokens": done.num_emitted_tokens,
            "tiercel.step": record.step,
            "tiercel.batch_size": len(record.rounds),
        }
        self._begin_decode(request, to_epoch_ns(record.draft_start_ns))
        extend_start = request.marks.get("spec_draft_extend_start")
        self._stages(request, attributes, done.num_correct_drafts, links)
        if extend_start is not None and request.stats.trace_level >= STAGE_LEVELS["spec_draft_layer"]:
            for layer, end in enumerate(record.layer_end_ns):
                start = record.layer_end_ns[layer - 1] if layer else extend_start
                attributes = {"round": done.round, "tiercel.layer": layer}
                self._span(request, "spec_draft_layer", to_epoch_ns(start), to_epoch_ns(end), attributes)

    def _stages(
        self,
        request: _OpenRequest,
        attributes: dict[str, Any],
        num_correct_drafts: int | None,
        links: Sequence[Link] = (),
    ) -> None:
        marks = request.marks
        for stage, begun, ended in _STAGES:
            start, end = marks.pop(begun, None), marks.pop(ended, None)
            if start is None or end is None or end < start:  # not reached, or a mark found the queue full
                continue
            if stage != "spec_verify":
                self._span(request, stage, to_epoch_ns(start), to_epoch_ns(end), attributes)
                continue
            own = attributes
            if num_correct_drafts is not None:
                own = attributes | {"num_correct_drafts": num_correct_drafts, "accepted_tokens": num_correct_drafts}
            self._span(request, stage, to_epoch_ns(start), to_epoch_ns(end), own, links)

    def _span(
        self,
        request: _OpenRequest,
        name: str,
        start: int,
        end: int,
        attributes: dict[str, Any] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        if STAGE_LEVELS[name] > request.stats.trace_level:
            return
        parent = request.root.context
        if name.startswith("spec_"):
            self._begin_decode(request, start)
            parent = request.decode
        self._take(name, self._child(parent), parent, start, end, attributes, self._limited.links(links))

    def _begin_decode(self, request: _OpenRequest, first_round: int) -> None:
        if request.decode_start is None:
            begun = request.stats.prefill_finished_ns
            request.decode_start = to_epoch_ns(begun) if begun else first_round

    def _child(self, parent: SpanContext) -> SpanContext:
        return SpanContext(parent.trace_id, self._new_span_id(), False, _SAMPLED, parent.trace_state)

    def _take(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: int,
        end: int,
        attributes: dict[str, Any] | None = None,
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = UNSET,
    ) -> None:
        self._provider.take(
            ReadableSpan(
                name,
                context,
                parent,
                self._provider.resource,
                self._limited.attributes(attributes or {}),
                events,
                links,
                kind,
                status=status,
                start_time=start,
                end_time=end,
                instrumentation_scope=SCOPE,
            )
        )


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
