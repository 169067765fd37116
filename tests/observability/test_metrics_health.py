"""What the trace pipeline says of itself on /metrics: drops, failures, spans."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.observability.exposed import Numbers, exposed
from tiercel.core.batch import ForwardMode, StepRecord
from tiercel.core.config import TraceConfig
from tiercel.observability.metric_table import FAMILIES
from tiercel.observability.metrics import EngineView
from tiercel.observability.pipeline import TracePipeline, open_pipeline
from tiercel.observability.records import RequestRecord
from tiercel.observability.trace import CountingProvider, SpanCounts, make_provider

METRICS = TraceConfig(metrics=True)
BOTH = TraceConfig(metrics=True, enable_trace=True, trace_level=1)


class Exporter(SpanExporter):
    """Answers what it is told to, once it is let."""

    def __init__(self, answer: Callable[[], SpanExportResult] = lambda: SpanExportResult.SUCCESS) -> None:
        self.answer, self.gate = answer, threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait(10)
        return self.answer()


def broken() -> SpanExportResult:
    raise RuntimeError("no route")


def make_spans(provider: CountingProvider, count: int) -> None:
    tracer = provider.get_tracer("test")
    for index in range(count):
        tracer.start_span(f"span {index}", start_time=1).end(2)


def step(number: int) -> StepRecord:
    return StepRecord(number, ForwardMode.EXTEND, "none")


def health(pipeline: TracePipeline) -> Numbers:
    assert pipeline.metrics
    found = exposed(pipeline.metrics.store)
    return {name.removeprefix("tiercel:trace_"): series for name, series in found.items() if "trace_" in name}


def test_health_is_there_at_0_from_the_start() -> None:
    exporter = Exporter()
    pipeline = open_pipeline(BOTH, "made-up", [exporter], EngineView())
    found = health(pipeline)
    assert set(found) == {f.name.removeprefix("tiercel:trace_") for f in FAMILIES if "trace_" in f.name}
    assert {value for series in found.values() for value in series.values()} == {0}
    assert found["spans_exported_total"] == {("Exporter",): 0}
    assert set(found["items_dropped_total"]) == {("mark",), ("step",), ("request",)}
    assert set(found["sink_failures_total"]) == {  # call, then sink: labels in the order of their names
        *((call, "MetricsSink") for call in ("step", "request", "close")),
        *((call, "SpanSink") for call in ("step", "request", "close", "mark")),
    }
    exporter.gate.set()
    assert pipeline.close()


def test_drops_and_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = open_pipeline(METRICS, "made-up")
    assert pipeline.metrics
    gate, entered = threading.Event(), threading.Event()

    def stuck(record: StepRecord) -> None:
        entered.set()
        gate.wait(10)
        raise RuntimeError("made to fail")

    monkeypatch.setattr(pipeline.metrics, "on_step", stuck)
    monkeypatch.setattr(pipeline, "_capacity", 3)
    pipeline.on_step(step(0))
    assert entered.wait(10)
    for number in range(10):
        pipeline.on_step(step(number))
    waiting = health(pipeline)
    assert waiting["items_dropped_total"]["step",] == pipeline.dropped["step"] == 7
    assert waiting["queue_items"] == {(): 3}
    gate.set()
    assert pipeline.drain()
    done = health(pipeline)
    assert done["queue_items"] == {(): 0}
    assert done["sink_failures_total"]["step", "MetricsSink"] == 4
    assert pipeline.close()
    pipeline.on_step(step(99))
    assert health(pipeline)["items_dropped_total"]["step",] == 8
    assert pipeline.drain(), "nothing is left to wait for"


def test_drain_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = open_pipeline(METRICS, "made-up")
    assert pipeline.metrics
    gate = threading.Event()
    monkeypatch.setattr(pipeline.metrics, "on_step", lambda record: gate.wait(10))
    pipeline.on_step(step(0))
    assert not pipeline.drain(timeout_s=0.05)
    gate.set()
    assert pipeline.close()


@pytest.mark.parametrize(
    ("answer", "exported", "failed"),
    [
        (lambda: SpanExportResult.SUCCESS, 7, 0),
        (lambda: SpanExportResult.FAILURE, 0, 7),
        pytest.param(broken, 0, 7, id="raises"),
    ],
)
def test_what_became_of_spans(answer: Callable[[], SpanExportResult], exported: int, failed: int) -> None:
    exporter = Exporter(answer)
    provider = make_provider(TraceConfig(enable_trace=True), [exporter])
    make_spans(provider, 7)
    assert provider.counts() == [SpanCounts("Exporter", 0, 0, 0)]
    exporter.gate.set()
    provider.shutdown()
    assert provider.counts() == [SpanCounts("Exporter", exported, failed, 0)]
    make_spans(provider, 2)  # after the end
    assert provider.counts() == [SpanCounts("Exporter", exported, failed, 2)]


@pytest.mark.filterwarnings("ignore")
def test_spans_that_find_the_queue_full_are_counted_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    exporter = Exporter()
    provider = make_provider(TraceConfig(enable_trace=True), [exporter])
    seen = []
    for _ in range(10):
        make_spans(provider, 10)
        (counts,) = provider.counts()
        seen.append(counts.dropped)
    assert seen == sorted(seen), "a counter never falls"
    assert 75 <= seen[-1] <= 80  # 20 wait, 5 at most are with the exporter, 100 have ended
    exporter.gate.set()
    provider.shutdown()
    (counts,) = provider.counts()
    assert counts.exported + counts.dropped == 100
    assert counts.dropped >= seen[-1]


def test_spans_without_a_sampling_flag_count_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = Exporter()
    exporter.gate.set()
    provider = make_provider(TraceConfig(enable_trace=True), [exporter])
    make_spans(provider, 3)
    provider.shutdown()
    assert provider.counts() == [SpanCounts("Exporter", 0, 0, 0)]


def test_two_exporters_of_one_kind_share_a_series(tmp_path: Any) -> None:
    exporters = [Exporter(), Exporter(lambda: SpanExportResult.FAILURE)]
    for exporter in exporters:
        exporter.gate.set()
    trace = TraceConfig(metrics=True, enable_trace=True, trace_level=1, otlp_file=tmp_path / "spans.jsonl")
    pipeline = open_pipeline(trace, "made-up", exporters)
    stats = pipeline.new_time_stats("a")
    stats.set_wait_queue_entry_time()
    stats.set_completion_time()
    pipeline.on_request(aborted(), stats)
    assert pipeline.close()
    found = health(pipeline)
    assert found["spans_exported_total"] == {("Exporter",): 2, ("OtlpJsonFileExporter",): 2}
    assert found["spans_failed_total"] == {("Exporter",): 2, ("OtlpJsonFileExporter",): 0}
    assert found["spans_dropped_total"] == {("Exporter",): 0, ("OtlpJsonFileExporter",): 0}


def aborted() -> RequestRecord:
    spec = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "num_emitted_tokens": 0}
    spec |= {"acceptance_histogram": [], "per_step_drafted": [], "per_step_accepted": []}  # type: ignore[dict-item]
    sampling = {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 1}
    return RequestRecord(
        "a", "made-up", "none", 0, sampling, 0.0, 4, 0, "abort", None, None, None, 9.0, 0, (), (), spec
    )
