"""The way of a finished span to a file or a collector, without an engine."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tiercel.core.config import TraceConfig
from tiercel.core.errors import UserError
from tiercel.observability.trace import make_provider

ON = TraceConfig(enable_trace=True)


def make_spans(provider: TracerProvider, count: int) -> None:
    tracer = provider.get_tracer("test")
    for index in range(count):
        tracer.start_span(f"span {index}", start_time=1).end(2)


def spans_in(path: Path) -> list[dict[str, Any]]:
    resources = [r for line in path.read_text().splitlines() for r in json.loads(line)["resourceSpans"]]
    return [span for r in resources for scope in r["scopeSpans"] for span in scope["spans"]]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A gRPC collector: its address, and what it received."""
    received: list[ExportTraceServiceRequest] = []

    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            received.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", received
    server.stop(None).wait()


def num_received(received: list[ExportTraceServiceRequest]) -> int:
    return sum(len(scope.spans) for e in received for r in e.resource_spans for scope in r.scope_spans)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_spans_reach_a_grpc_collector(collector: tuple[str, list[ExportTraceServiceRequest]], scheme: str) -> None:
    address, received = collector
    provider = make_provider(TraceConfig(enable_trace=True, otlp_endpoint=scheme + address))
    make_spans(provider, 3)
    provider.shutdown()
    assert num_received(received) == 3


@pytest.mark.parametrize("status", [200, 400])
def test_spans_reach_a_http_collector(status: int, caplog: pytest.LogCaptureFixture) -> None:
    received: list[ExportTraceServiceRequest] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/traces"
        provider = make_provider(TraceConfig(enable_trace=True, otlp_endpoint=address, otlp_protocol="http/protobuf"))
        make_spans(provider, 3)
        provider.shutdown()
        server.shutdown()
    assert num_received(received) == 3
    (counts,) = provider.counts()
    assert (counts.exported, counts.failed) == ((3, 0) if status == 200 else (0, 3))


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_the_standard_variables_name_a_collector(
    collector: tuple[str, list[ExportTraceServiceRequest]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, received = collector
    monkeypatch.setenv(name, f"http://{address}")
    provider = make_provider(ON)
    make_spans(provider, 2)
    provider.shutdown()
    assert num_received(received) == 2
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(UserError, match=r"http/json.*grpc or http/protobuf"):
        make_provider(ON)


def test_a_disabled_sdk_makes_no_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider = make_provider(TraceConfig(enable_trace=True, otlp_file=tmp_path / "spans.jsonl"))
    make_spans(provider, 2)
    provider.shutdown()
    assert (tmp_path / "spans.jsonl").read_text() == ""


def test_an_http_endpoint_needs_a_scheme() -> None:
    config = TraceConfig(enable_trace=True, otlp_endpoint="localhost:4318", otlp_protocol="http/protobuf")
    with pytest.raises(UserError, match=r"localhost:4318.*give http://"):
        make_provider(config)


def test_spans_that_go_nowhere_are_announced(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    make_provider(TraceConfig(enable_trace=True, otlp_file=tmp_path / "spans.jsonl")).shutdown()
    assert caplog.messages == []
    make_provider(ON).shutdown()
    assert "go nowhere" in caplog.text


def test_the_file_takes_a_burst_whole_and_in_the_standards_form(tmp_path: Path) -> None:
    provider = make_provider(TraceConfig(enable_trace=True, otlp_file=tmp_path / "spans.jsonl"))
    make_spans(provider, 5000)
    provider.shutdown()
    spans = spans_in(tmp_path / "spans.jsonl")
    assert [s["name"] for s in spans] == [f"span {i}" for i in range(5000)]
    assert spans[0]["kind"] == 1  # OTLP-JSON: enums are numbers, ids are hex
    assert len(bytes.fromhex(spans[0]["traceId"])) == 16


def test_a_request_is_in_the_file_once_it_is_complete(tmp_path: Path) -> None:
    provider = make_provider(TraceConfig(enable_trace=True, otlp_file=tmp_path / "spans.jsonl"))
    make_spans(provider, 1)
    assert len(spans_in(tmp_path / "spans.jsonl")) == 1
    provider.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_dead_collector_keeps_nothing_from_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
    path = tmp_path / "spans.jsonl"
    dead = "http://127.0.0.1:9/v1/traces"
    config = TraceConfig(enable_trace=True, otlp_endpoint=dead, otlp_protocol="http/protobuf", otlp_file=path)
    provider = make_provider(config)
    child_of = provider.get_tracer("test").start_as_current_span
    with child_of("root"), child_of("child"):
        pass
    unfinished = provider.get_tracer("test").start_span("root left open")
    with child_of("another"):
        pass
    closing = threading.Thread(target=provider.shutdown)
    closing.start()
    closing.join(0.5)
    assert {s["name"] for s in spans_in(path)} == {"root", "child", "another"}
    closing.join()
    assert "3 of 3 spans were not delivered" in caplog.text
    assert unfinished.is_recording()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once_and_keeps_nothing_from_the_collector(
    collector: tuple[str, list[ExportTraceServiceRequest]], caplog: pytest.LogCaptureFixture
) -> None:
    address, received = collector
    provider = make_provider(TraceConfig(enable_trace=True, otlp_endpoint=address, otlp_file=Path("/dev/full")))
    make_spans(provider, 5)
    provider.shutdown()
    assert num_received(received) == 5
    assert caplog.text.count("No space left") == 1


class Scripted(SpanExporter):
    """Answers with what it is told, after waiting for its gate."""

    def __init__(self, result: Callable[[], SpanExportResult], gate: threading.Event) -> None:
        self.result, self.gate, self.num_spans = result, gate, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait()
        self.num_spans += len(spans)
        return self.result()

    def shutdown(self) -> None:
        pass


def test_spans_lost_on_the_way_are_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    gate = threading.Event()
    slow = Scripted(lambda: SpanExportResult.SUCCESS, gate)
    provider = make_provider(ON, [slow])
    make_spans(provider, 1000)
    gate.set()
    provider.shutdown()
    assert 64 <= slow.num_spans <= 64 + 2 * 16
    assert f"{1000 - slow.num_spans} of 1000 spans were not delivered" in caplog.text


def test_refused_spans_count_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    gate.set()
    provider = make_provider(ON, [Scripted(lambda: SpanExportResult.FAILURE, gate)])
    with caplog.at_level(logging.WARNING):
        make_spans(provider, 7)
        provider.shutdown()
    assert "7 of 7 spans were not delivered" in caplog.text
