"""Tracing's switch, its clock, and the OpenTelemetry provider with its exporters."""

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tiercel.core.config import TraceConfig
from tiercel.core.errors import UserError

_level = 0

EPOCH_OFFSET_NS = time.time_ns() - time.perf_counter_ns()
"""Added to ``perf_counter_ns`` it gives Unix time; read once, so that every span of a process is on one clock."""


def get_global_trace_level() -> int:
    """Level for requests that arrive now: 0 off, 1 important stages, 2 draft and verify, 3 everything."""
    return _level


def get_global_tracing_enabled() -> bool:
    """Whether spans are made at all."""
    return _level > 0


def set_global_trace_level(level: int) -> None:
    """Switch tracing for requests that arrive from now on.

    Raises:
        UserError: no such level.
    """
    global _level
    if level not in (0, 1, 2, 3):
        raise UserError(f"trace level {level!r} is unknown: choose 0 (off) to 3 (everything)")
    _level = level


def to_epoch_ns(perf_ns: int) -> int:
    """Unix time in nanoseconds of a ``perf_counter_ns`` reading."""
    return perf_ns + EPOCH_OFFSET_NS


def make_provider(config: TraceConfig, extra: Sequence[SpanExporter] = ()) -> TracerProvider:
    """A tracer provider with the exporters that ``config`` asks for, each behind the SDK's batching thread.

    ``OTEL_*`` variables are honoured by the SDK (resource, sampler, limits, exporter headers and time-outs).

    Raises:
        UserError: the OTLP file cannot be written.
    """
    resource = Resource({SERVICE_NAME: "tiercel"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporters = list(extra)
    if config.otlp_endpoint:
        exporters.append(_otlp_exporter(config.otlp_endpoint, config.otlp_protocol))
    if config.otlp_file:
        exporters.append(OtlpJsonFileExporter(config.otlp_file))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _otlp_exporter(endpoint: str, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)


class OtlpJsonFileExporter(SpanExporter):
    """Writes OTLP-JSON lines: one ``ExportTraceServiceRequest`` a line (OpenTelemetry file exporter format, ids in hex)."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the OTLP file {path}: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._file.write(json.dumps(_hex_ids(MessageToDict(encode_spans(spans)))) + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def _hex_ids(value: Any) -> Any:
    # protobuf's JSON writes bytes in base64; OTLP-JSON wants trace and span ids in hex.
    if isinstance(value, list):
        return [_hex_ids(v) for v in value]
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {k: base64.b64decode(v).hex() if k in ids else _hex_ids(v) for k, v in value.items()}
    return value
