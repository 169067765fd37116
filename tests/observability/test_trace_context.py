"""Contexts in and out, links between traces, names, and what the SDK's variables do."""

import socket
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.observability.test_spans import ended, one_round
from tests.observability.test_traces import GREEDY, ON, PROMPT
from tests.scripted import scripted_engine
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.request import FinishReason, Request
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.observability.pipeline import open_pipeline
from tiercel.observability.records import request_record
from tiercel.observability.trace import CountingBatchProcessor, set_global_trace_level


def traced(target: LoadedTarget, exporter: SpanExporter, trace: TraceConfig = ON) -> Engine:
    return Engine(EngineConfig(), SpecConfig(method="none"), trace, target, [exporter])


def drive(engine: Engine, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    while engine.has_work:
        engine.step()
    engine.close()
    return list(exporter.get_finished_spans())


def roots_of(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    return {str(s.attributes["gen_ai.response.id"]): s for s in spans if s.name.startswith("chat ")}


def header(trace_id: int, span_id: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-{flags}"}


def test_many_callers_at_once_are_never_mixed_up(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = traced(toy_target, exporter)
    ambient = TracerProvider().get_tracer("somebody").start_span("ambient")
    token = otel_context.attach(otel.set_span_in_context(ambient))
    try:
        for i in range(32):
            engine.add_request(str(i), PROMPT, GREEDY, header(i + 1, i + 100))
        engine.add_request("alone", PROMPT, GREEDY)
        spans = drive(engine, exporter)
    finally:
        otel_context.detach(token)
    roots = roots_of(spans)
    assert roots["alone"].parent is None
    own = {str(i): i + 1 for i in range(32)}
    assert {name: roots[name].context.trace_id for name in own} == own
    assert all(roots[str(i)].parent.span_id == i + 100 for i in range(32))  # type: ignore[union-attr]
    parents = {s.context.span_id: s for s in spans}
    for span in spans:
        if span.parent and span.parent.span_id in parents:
            assert span.context.trace_id == parents[span.parent.span_id].context.trace_id
    assert ambient.get_span_context().trace_id not in {s.context.trace_id for s in spans}
    assert all(root.context.trace_id.bit_length() > 64 for name, root in roots.items() if name == "alone")


def test_the_context_goes_out_with_the_callers_flag(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    callers = [header(7, 8, "01") | {"TraceState": "vendor=1"}, header(9, 10, "00"), None]
    with LLM(engine=EngineConfig(), spec=SpecConfig(method="none"), target=toy_target) as off:
        outputs = off.generate([PROMPT, PROMPT], GREEDY, trace_headers=[header(7, 8, "00"), None])
        assert [o.trace_headers for o in outputs] == [header(7, 8, "00"), {}]
    llm = LLM(engine=EngineConfig(), spec=SpecConfig(method="none"), target=toy_target, trace=ON)
    llm.engine.close()
    llm.engine.pipeline = open_pipeline(ON, "toy", [exporter])
    outputs = llm.generate([PROMPT] * 3, GREEDY, trace_headers=callers)
    llm.close()
    roots = roots_of(list(exporter.get_finished_spans()))
    sampled, unsampled, fresh = (dict(o.trace_headers) for o in outputs)
    root = roots["req-0"].context
    assert sampled == {"traceparent": f"00-{7:032x}-{root.span_id:016x}-01", "tracestate": "vendor=1"}
    assert unsampled["traceparent"].startswith(f"00-{9:032x}-")
    assert unsampled["traceparent"].endswith("-00")
    assert "req-1" not in roots
    fresh_root = roots["req-2"].context
    assert (
        fresh["traceparent"] == f"00-{fresh_root.trace_id:032x}-{fresh_root.span_id:016x}-{fresh_root.trace_flags:02x}"
    )
    assert fresh_root.trace_flags.sampled
    assert outputs[0].to_json()["metrics"]["trace_headers"] == sampled


def test_every_round_links_to_the_step_it_shared(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3, trace=ON, exporters=[exporter])
    reqs = [engine.add_request(str(i), PROMPT, GREEDY) for i in range(3)]
    spans = drive(engine, exporter)
    steps = {s.context.span_id: s for s in spans if s.name == "batch_step"}
    assert all(step.parent is None for step in steps.values())
    verified = [s for s in spans if s.name == "spec_verify"]
    assert len(verified) == sum(req.spec.num_rounds for req in reqs)
    served: Counter[int] = Counter()
    for span in verified:
        (link,) = span.links
        step = steps[link.context.span_id]
        assert step.attributes["tiercel.step"] == span.attributes["tiercel.step"]
        assert step.start_time <= span.start_time <= span.end_time <= step.end_time
        served[link.context.span_id] += 1
    assert served == {span_id: step.attributes["tiercel.batch_size"] for span_id, step in steps.items()}


def test_a_level_is_switched_at_run_time_and_nothing_stays_open(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = traced(toy_target, exporter)
    engine.add_request("full", PROMPT, GREEDY)
    engine.step()
    engine.step()
    engine.pipeline.set_trace_level(0)
    engine.add_request("none", PROMPT, GREEDY)
    engine.step()
    engine.pipeline.set_trace_level(2)
    engine.add_request("middle", PROMPT, GREEDY)
    with pytest.raises(UserError, match="trace level 4"):
        engine.pipeline.set_trace_level(4)
    spans = drive(engine, exporter)
    roots = roots_of(spans)
    assert set(roots) == {"full", "middle"}
    assert all(s.end_time is not None for s in spans)
    names = {s.name for s in spans if s.context.trace_id == roots["middle"].context.trace_id}
    assert "spec_verify" in names
    assert "spec_draft_extend" not in names


def test_a_level_without_tracing_is_refused(toy_target: LoadedTarget) -> None:
    with LLM(engine=EngineConfig(), spec=SpecConfig(method="none"), target=toy_target) as llm:
        llm.set_trace_level(0)
        with pytest.raises(UserError, match="--enable-trace"):
            llm.set_trace_level(2)


def test_older_names_are_there_when_asked_for(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = traced(toy_target, exporter, TraceConfig(enable_trace=True, trace_legacy_names=True))
    engine.add_request("a", PROMPT, GREEDY)
    engine.add_request("early", PROMPT, GREEDY)
    engine.abort("early")
    roots = roots_of(drive(engine, exporter))
    found = roots["a"].attributes
    assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.usage.output_tokens"] == 10
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    whole = (roots["a"].end_time - roots["a"].start_time) / 1e9  # type: ignore[operator]
    assert sum(found[f"gen_ai.latency.{part}"] for part in parts) == pytest.approx(whole, abs=1e-3)
    assert found["gen_ai.latency.e2e"] == pytest.approx(whole, abs=1e-6)
    assert not any("latency" in name and "e2e" not in name for name in roots["early"].attributes)
    with pytest.raises(UserError, match="--enable-trace"):
        TraceConfig(trace_legacy_names=True)


def test_the_root_has_counts_by_position(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    answer = (
        LLM(engine=EngineConfig(), spec=SpecConfig(method="none"), target=toy_target)
        .generate([PROMPT], GREEDY)[0]
        .token_ids
    )

    def half_right(req: Request, depth: int) -> list[int]:
        done = len(req.output_token_ids)
        return (answer[done : done + 1 + done % 2] + [1] * depth)[:depth]

    engine = scripted_engine(toy_target, half_right, 3, trace=ON, exporters=[exporter])
    req = engine.add_request("a", PROMPT, GREEDY)
    found = roots_of(drive(engine, exporter))["a"].attributes
    correct = found["tiercel.spec.num_correct_drafts_per_position"]
    assert len(correct) == 3
    assert sum(correct) == found["tiercel.spec.num_correct_drafts"] == sum(req.spec.correct) > 0
    assert all(before >= after for before, after in pairwise(correct))
    shares = [count / req.spec.num_rounds for count in correct]
    assert list(found["tiercel.spec.per_position_acceptance"]) == pytest.approx(shares)


def test_a_long_answer_keeps_every_round(toy_target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    exporter = InMemorySpanExporter()
    engine = traced(toy_target, exporter)
    req = engine.add_request("a", PROMPT, type(GREEDY)(max_tokens=300, ignore_eos=True))
    spans = drive(engine, exporter)
    assert [s.attributes["round"] for s in spans if s.name == "spec_verify"] == list(range(req.spec.num_rounds))


def test_the_sdks_limits_cut_and_say_so(toy_target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "4")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "0")
    exporter = InMemorySpanExporter()
    engine = traced(toy_target, exporter)
    engine.add_request("a", PROMPT, GREEDY, header(7, 8) | {"tracestate": "vendor=1"})
    spans = drive(engine, exporter)
    assert all(len(s.attributes) <= 4 for s in spans)
    (root,) = [s for s in spans if s.name.startswith("chat ")]
    assert root.dropped_attributes > 10
    assert all(len(v) <= 3 for s in spans for v in s.attributes.values() if isinstance(v, str))
    verified = [s for s in spans if s.name == "spec_verify"]
    assert [(len(s.links), s.dropped_links) for s in verified] == [(0, 1)] * len(verified)
    assert all(s.context.trace_state.get("vendor") == "1" for s in spans if s.name != "batch_step")


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=drafts"}, True),
    ],
)
def test_the_sdks_variables_count(
    toy_target: LoadedTarget, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kept: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    exporter = InMemorySpanExporter()
    engine = traced(toy_target, exporter)
    engine.add_request("a", PROMPT, GREEDY)
    spans = drive(engine, exporter)
    assert bool(spans) == kept
    assert all(s.resource.attributes["team"] == "drafts" for s in spans)


def test_batches_are_as_the_sdks_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    sizes: list[int] = []

    class Sizes(SpanExporter):
        def export(self, spans):  # type: ignore[no-untyped-def]
            sizes.append(len(spans))
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(CountingBatchProcessor(Sizes()))
    for number in range(12):
        provider.get_tracer("x").start_span(str(number)).end()
    provider.shutdown()
    assert sum(sizes) == 12
    assert max(sizes) == 5


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield listening.getsockname()[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_never_answers_changes_nothing(
    toy_target: LoadedTarget, black_hole: int, protocol: str
) -> None:
    def slowest_step(trace: TraceConfig) -> tuple[float, list[int], float]:
        engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3, trace=trace)
        req = engine.add_request("a", PROMPT, type(GREEDY)(max_tokens=100, ignore_eos=True))
        times = []
        while engine.has_work:
            begun = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun)
        begun = time.monotonic()
        engine.close()
        set_global_trace_level(0)
        return sorted(times)[-2], req.output_token_ids, time.monotonic() - begun

    path = "/v1/traces" if protocol != "grpc" else ""
    address = f"http://127.0.0.1:{black_hole}{path}"
    _, plain, _ = slowest_step(TraceConfig())
    slowest, tokens, closing = slowest_step(
        TraceConfig(enable_trace=True, otlp_endpoint=address, otlp_protocol=protocol)
    )
    assert tokens == plain
    assert slowest < 0.5  # a step takes a few milliseconds; waiting for the collector would take its time-out
    assert closing < 3.5


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    class Gone(SpanExporter):
        def export(self, spans):  # type: ignore[no-untyped-def]
            return SpanExportResult.SUCCESS

    pipeline = open_pipeline(ON, "toy", [Gone()])

    def some_requests(first: int) -> int:
        for number in range(first, first + 5000):
            stats = pipeline.new_time_stats(str(number))
            stats.set_wait_queue_entry_time()
            if number % 2:
                stats.set_forward_entry_time()
                stats.set_prefill_finished_time()
                for item in one_round(stats, 0)[: number % 8]:
                    pipeline._put(item, "made-up", always=True)
            reason = FinishReason.STOP if number % 2 else FinishReason.ABORT
            req = ended(stats, time.perf_counter_ns(), reason)
            pipeline.on_request(request_record(req, stats, "toy", "made-up", 1), stats)
            if number % 500 == 0:
                assert pipeline.drain(30)
        assert pipeline.drain(30)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first, second = some_requests(0), some_requests(5000)
    finally:
        tracemalloc.stop()
    assert pipeline.spans is not None
    assert pipeline.spans._open == {}
    assert second - first < 2e6
    pipeline.close()
