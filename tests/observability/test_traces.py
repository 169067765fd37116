"""Request traces through the whole engine: every end, every collector."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.scripted import scripted_engine
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.observability.trace import set_global_trace_level

PROMPT = [7, 30, 99, 12, 200, 45, 8, 61]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
ON = TraceConfig(enable_trace=True)


def engine_with(target: LoadedTarget, exporter: InMemorySpanExporter, trace: TraceConfig = ON) -> Engine:
    config = EngineConfig(max_prefill_tokens=4, kv_tokens=64, page_size=4)
    return Engine(config, SpecConfig(method="none"), trace, target, [exporter])


def finished(engine: Engine, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    engine.close()
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("reason", ["abort", "timeout", "error"])
@pytest.mark.parametrize("steps_before", range(6))
def test_an_early_end_in_any_phase_closes_one_root(toy_target: LoadedTarget, steps_before: int, reason: str) -> None:
    exporter = InMemorySpanExporter()
    engine = engine_with(toy_target, exporter)
    engine.add_request("a", PROMPT, GREEDY, timeout_s=1000)
    for _ in range(steps_before):
        engine.step()
    if reason == "abort":
        engine.abort("a")
    elif reason == "timeout":
        engine._deadlines["a"] = 1
        (output,) = engine.step()
        assert output.record is not None
        assert output.record.finish_reason == "timeout"
        assert engine.has_work is False
    else:
        engine.scheduler.schedule = lambda: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            engine.step()
    spans = finished(engine, exporter)
    (root,) = [s for s in spans if s.name.startswith("chat ")]
    assert root.attributes["finish_reason"] == reason
    assert all(s.context.trace_id == root.context.trace_id for s in spans if s.name != "batch_step")
    spans = [s for s in spans if s.name != "batch_step"]
    reached = {s.name for s in spans} - {root.name}
    phases = ["prefill_waiting", "prefill_forward", "decode_forward"]
    expected = phases[: 1 + (steps_before >= 1) + (steps_before >= 3)]
    assert reached & set(phases) == set(expected)
    for span in spans:
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time


def test_a_failed_request_closes_its_root_with_an_error(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = engine_with(toy_target, exporter)
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    engine.worker.target.storages[0].keys.fill_(float("nan"))
    while engine.has_work:
        engine.step()
    (root,) = [s for s in finished(engine, exporter) if s.name.startswith("chat ")]
    assert root.attributes["finish_reason"] == "error"
    assert root.status.is_ok is False
    assert "NaN" in root.status.description


def test_preemption_keeps_one_root_and_one_first_token(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = engine_with(toy_target, exporter)
    wish = SamplingParams(max_tokens=40, ignore_eos=True)
    reqs = [engine.add_request(str(i), PROMPT, wish) for i in range(3)]
    while engine.has_work:
        engine.step()
    assert sum(r.num_preemptions for r in reqs) > 0
    spans = finished(engine, exporter)
    roots = [s for s in spans if s.name.startswith("chat ")]
    assert len(roots) == 3
    assert Counter(s.name for s in spans)["prefill_forward"] == 3
    assert sum(len(r.events) for r in roots) == sum(r.num_preemptions for r in reqs)


def test_the_callers_context_and_sampling_flag_are_kept(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = engine_with(toy_target, exporter)
    for i, flag in enumerate(("01", "00")):
        engine.add_request(
            str(i), PROMPT, GREEDY, trace_headers={"Traceparent": f"00-{i + 1:032x}-{i + 7:016x}-{flag}"}
        )
    engine.add_request("bad", PROMPT, GREEDY, trace_headers={"traceparent": "nonsense"})
    while engine.has_work:
        engine.step()
    spans = finished(engine, exporter)
    roots = {s.attributes["gen_ai.response.id"]: s for s in spans if s.name.startswith("chat ")}
    assert set(roots) == {"0", "bad"}
    assert (roots["0"].context.trace_id, roots["0"].parent.span_id) == (1, 7)
    assert roots["bad"].parent is None
    assert {s.context.trace_id for s in spans if s.name != "batch_step"} == {1, roots["bad"].context.trace_id}


def test_a_level_changed_at_run_time_counts_for_new_requests(toy_target: LoadedTarget) -> None:
    exporter = InMemorySpanExporter()
    engine = engine_with(toy_target, exporter)
    engine.add_request("full", PROMPT, GREEDY)
    set_global_trace_level(1)
    engine.add_request("coarse", PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
    spans = finished(engine, exporter)
    roots = {s.attributes["gen_ai.response.id"]: s.context.trace_id for s in spans if s.name.startswith("chat ")}
    names = {n: {s.name for s in spans if s.context.trace_id == t} for n, t in roots.items()}
    assert "spec_verify" in names["full"]
    assert "spec_verify" not in names["coarse"]
    assert "decode_forward" in names["coarse"]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


def names_in(exports: list[ExportTraceServiceRequest]) -> Counter[str]:
    scopes = [scope for e in exports for r in e.resource_spans for scope in r.scope_spans]
    return Counter(span.name for scope in scopes for span in scope.spans)


def test_spans_reach_a_collector_over_http(
    toy_target: LoadedTarget, collector: tuple[str, list[ExportTraceServiceRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, received = collector
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    trace = TraceConfig(enable_trace=True, otlp_endpoint=endpoint, otlp_protocol="http/protobuf")
    engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3, trace=trace)
    req = engine.add_request("a", PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
    engine.close()
    names = names_in(received)
    assert names["spec_verify"] == req.spec.num_rounds
    assert sum(count for name, count in names.items() if name.startswith("chat ")) == 1
    resource = {a.key: a.value.string_value for a in received[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "my-service"


def test_the_otlp_file_holds_one_export_a_line(toy_target: LoadedTarget, tmp_path: Path) -> None:
    trace = TraceConfig(enable_trace=True, otlp_file=tmp_path / "spans.jsonl")
    engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3, trace=trace)
    req = engine.add_request("a", PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
    engine.close()
    spans = []
    for line in (tmp_path / "spans.jsonl").read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            spans += [s for scope in resource["scopeSpans"] for s in scope["spans"]]
    assert sum(s["name"] == "spec_verify" for s in spans) == req.spec.num_rounds
    assert {len(s["traceId"]) for s in spans} == {32}
    assert all(int(s["spanId"], 16) for s in spans)


@pytest.mark.filterwarnings("ignore")
def test_a_dead_collector_changes_nothing_and_close_returns_in_time(toy_target: LoadedTarget) -> None:
    trace = TraceConfig(enable_trace=True, otlp_endpoint="http://127.0.0.1:9/v1/traces", otlp_protocol="http/protobuf")
    engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3, trace=trace)
    req = engine.add_request("a", PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
    assert len(req.output_token_ids) == 10
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 4
