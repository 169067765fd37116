"""Spans and Perfetto slices from made-up marks and step records, complete or full of holes."""

import json
import random
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tiercel.core.batch import ForwardMode, RequestRound, StepRecord
from tiercel.core.config import TraceConfig
from tiercel.core.request import FinishReason, Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.observability.perfetto import PerfettoSink
from tiercel.observability.pipeline import Item
from tiercel.observability.records import request_record
from tiercel.observability.req_time_stats import Mark, ReqTimeStats
from tiercel.observability.spans import SpanSink
from tiercel.observability.trace import EPOCH_OFFSET_NS, make_provider

ROUND_NS = 1000
BOUNDARIES = ("draft_start", "draft_end", "verify_start", "verify_end", "draft_extend_start", "draft_extend_end")
STAGES = ("spec_draft", "spec_verify", "spec_draft_extend")


def one_round(stats: ReqTimeStats, number: int) -> list[Item]:
    """Marks and step record of a round that begins at ``(number + 1) * ROUND_NS``."""
    begin = (number + 1) * ROUND_NS
    times = {f"{name}_ns": begin + 100 * index for index, name in enumerate(BOUNDARIES, start=1)}
    done = RequestRound(stats.request_id, number, 5 + number, (8,), (0,), number - 1, 1, 9, 2)
    step = StepRecord(number, ForwardMode.DECODE, "made-up", start_ns=begin, end_ns=begin + 900, rounds=[done], **times)
    step.layer_end_ns = [step.draft_extend_start_ns + 50]
    marks = []
    for name in BOUNDARIES:
        attrs = {"num_correct_drafts": 1} if name == "verify_end" else None
        marks.append(Mark(f"set_spec_{name}_time", times[f"{name}_ns"], (stats,), attrs))
    return [*marks, step]


def new_stats(request_id: str = "a") -> ReqTimeStats:
    stats = ReqTimeStats(request_id, lambda mark: None, trace_level=3)
    stats.created_ns, stats.wait_queue_entry_ns, stats.forward_entry_ns, stats.prefill_finished_ns = 1, 1, 2, 3
    return stats


def ended(stats: ReqTimeStats, completion_ns: int, reason: FinishReason = FinishReason.LENGTH) -> Request:
    stats.completion_ns = completion_ns
    req = Request(stats.request_id, [1, 2], SamplingParams(), 0, frozenset(), stats)
    req.finish_reason = reason
    return req


def spans_of(items: list[Item], stats: ReqTimeStats, completion_ns: int) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    sink = SpanSink(make_provider(TraceConfig(enable_trace=True), [exporter]), "made-up")
    for item in items:
        if isinstance(item, Mark):
            sink.on_mark(item)
        elif isinstance(item, StepRecord):
            sink.on_step(item)
    sink.on_request(request_record(ended(stats, completion_ns), stats, "made-up", "made-up", 1), stats)
    sink.close()
    return list(exporter.get_finished_spans())


def test_a_whole_round_makes_its_stages() -> None:
    stats = new_stats()
    spans = {s.name: s for s in spans_of(one_round(stats, 0), stats, 5000)}
    assert set(STAGES) | {"spec_draft_layer"} <= set(spans)
    assert [spans[s].end_time - spans[s].start_time for s in STAGES] == [100, 100, 100]
    assert spans["spec_verify"].attributes["num_correct_drafts"] == 1


@pytest.mark.parametrize("seed", range(40))
def test_what_the_full_queue_dropped_never_bends_what_is_left(seed: int) -> None:
    stats, dice = new_stats(), random.Random(seed)
    items = [item for number in range(6) for item in one_round(stats, number) if dice.random() < 0.6]
    end = 7 * ROUND_NS
    spans = spans_of(items, stats, end)
    (root,) = [s for s in spans if s.name.startswith("chat ")]
    assert root.end_time == end + EPOCH_OFFSET_NS
    with_record = {item.step for item in items if isinstance(item, StepRecord)}
    for span in spans:
        assert span.start_time <= span.end_time
        if span.name in STAGES and "round" in span.attributes:
            assert span.attributes["round"] in with_record
            assert span.end_time - span.start_time == 100
            assert (span.start_time - EPOCH_OFFSET_NS) // ROUND_NS == span.attributes["round"] + 1


def test_nothing_is_kept_of_requests_that_ended() -> None:
    sink = SpanSink(make_provider(TraceConfig(enable_trace=True), [InMemorySpanExporter()]), "made-up")
    for number in range(500):
        stats = new_stats(str(number))
        for item in one_round(stats, 0)[: number % 8]:
            if isinstance(item, Mark):
                sink.on_mark(item)
            elif isinstance(item, StepRecord):
                sink.on_step(item)
        req = ended(stats, 5000, FinishReason.ABORT if number % 2 else FinishReason.STOP)
        sink.on_request(request_record(req, stats, "made-up", "made-up", 1), stats)
    assert sink._open == {}
    sink.close()


def test_a_step_that_was_dropped_costs_its_arrow_alone(tmp_path: Path) -> None:
    stats = new_stats()
    sink = PerfettoSink(tmp_path / "trace.json")
    for number in (0, 1, 3, 4):  # step 2 found the queue full
        (step,) = [item for item in one_round(stats, number) if isinstance(item, StepRecord)]
        sink.on_step(step)
    sink.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [e["id"] for e in events if e["ph"] == "s"] == ["1/0", "1/3"]
    assert sum(e["name"].startswith("round ") for e in events) == 4
    assert sum(e["name"] == "KV slots used" for e in events) == 4
