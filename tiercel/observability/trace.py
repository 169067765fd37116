"""Tracing's switch, its clock, and the OpenTelemetry provider with its exporters."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tiercel.core.config import TraceConfig
from tiercel.core.errors import UserError
from tiercel.observability.otlp_encoding import to_json

logger = logging.getLogger(__name__)

SPAN_QUEUE_SIZE = 16384
"""Spans that may wait for a collector. The SDK's 2048 are fewer than a second of full detail at batch 16."""
SPANS_PER_LINE = 512
"""Spans of one line of the OTLP file at most."""

BATCH_STEP = "batch_step"
"""Name of the spans that are not a request's: one for each step, which its requests link to."""

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


def make_provider(config: TraceConfig, extra: Sequence[SpanExporter] = ()) -> "CountingProvider":
    """A tracer provider with the exporters that ``config`` asks for.

    ``OTEL_*`` variables are honoured by the SDK (resource, sampler, limits, queue, exporter headers and time-outs), and so are
    ``OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT`` and ``…PROTOCOL`` where ``config`` names no endpoint.

    Raises:
        UserError: the OTLP file cannot be written, or the endpoint or protocol cannot be used.
    """
    resource = Resource({SERVICE_NAME: "tiercel"}).merge(OTELResourceDetector().detect())
    network = _otlp_exporter(config)
    processors: list[DirectProcessor | CountingBatchProcessor] = []
    if config.otlp_file:
        # First, because processors are shut down in this order: a dead collector must not keep spans from the file.
        processors.append(DirectProcessor(OtlpJsonFileExporter(config.otlp_file)))
    processors += [CountingBatchProcessor(exporter) for exporter in ([*extra, network] if network else extra)]
    if not processors:
        logger.warning(
            "tracing is on, but its spans go nowhere: give --otlp-traces-endpoint, --otlp-file or %s",
            OTEL_EXPORTER_OTLP_ENDPOINT,
        )
    return CountingProvider(resource, processors)


def _otlp_exporter(config: TraceConfig) -> SpanExporter | None:
    endpoint, protocol = config.otlp_endpoint, config.otlp_protocol
    if endpoint is None:
        # The exporters read the variables themselves: the general address is a base, the traces' own is whole.
        if not (os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) or os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)):
            return None
        general = os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL) or protocol
        protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or general
    if protocol == "grpc":
        from tiercel.observability.otlp_exporters import GrpcSpanExporter

        # An address without a scheme is a collector next door, as everywhere in this protocol's tools: no TLS.
        insecure = None if endpoint is None else not endpoint.startswith("https://")
        return GrpcSpanExporter(endpoint=endpoint, insecure=insecure)
    if protocol != "http/protobuf":
        raise UserError(f"{OTEL_EXPORTER_OTLP_PROTOCOL}={protocol!r} is unknown: choose grpc or http/protobuf")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise UserError(f"the OTLP endpoint {endpoint!r} is no http address: give http://HOST:4318/v1/traces")
    from tiercel.observability.otlp_exporters import HttpSpanExporter

    return HttpSpanExporter(endpoint=endpoint)


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """What became of the spans that ended, for one exporter (its class name); the rest is on its way.

    ``failed`` ones it could not deliver; ``dropped`` ones never reached it. None of the numbers ever falls.
    """

    exporter: str
    exported: int
    failed: int
    dropped: int


class CountingProvider(TracerProvider):
    """A tracer provider that knows what became of its spans."""

    def __init__(self, resource: Resource, processors: "Sequence[DirectProcessor | CountingBatchProcessor]") -> None:
        super().__init__(resource=resource, shutdown_on_exit=False)
        self._counted = tuple(processors)
        for processor in processors:
            self.add_span_processor(processor)

    def take(self, span: ReadableSpan) -> None:
        """Hand a span that was made whole, and is wanted, to every exporter."""
        for processor in self._counted:
            processor.on_end(span)

    def counts(self) -> list[SpanCounts]:
        """One for each exporter."""
        return [processor.counts for processor in self._counted]


class DirectProcessor(SpanProcessor):
    """Hands spans to an exporter on the thread that ends them, so that none can be lost between the two.

    A line is written when a request is complete, or before it holds more than ``SPANS_PER_LINE`` spans.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = _CountingExporter(exporter)
        self._spans: list[ReadableSpan] = []

    @property
    def counts(self) -> SpanCounts:
        return self._exporter.counts(dropped=0)

    def on_end(self, span: ReadableSpan) -> None:
        if not span.context.trace_flags.sampled:
            return
        self._spans.append(span)
        is_root = span.parent is None or span.parent.is_remote
        if (is_root and span.name != BATCH_STEP) or len(self._spans) >= SPANS_PER_LINE:
            self.force_flush()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        spans, self._spans = self._spans, []
        if spans:
            self._exporter.export(spans)
        return True

    def shutdown(self) -> None:
        self.force_flush()
        self._exporter.shutdown()


class CountingBatchProcessor(BatchSpanProcessor):
    """The SDK's batching thread for exporters that may block. It drops spans when its queue is full; here they are counted."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._counting = _CountingExporter(exporter)
        self._num_ended = self._num_dropped = 0
        own = OTEL_BSP_MAX_QUEUE_SIZE not in os.environ
        self._room = SPAN_QUEUE_SIZE if own else self._default_max_queue_size()  # type: ignore[no-untyped-call]
        super().__init__(self._counting, max_queue_size=self._room)

    @property
    def counts(self) -> SpanCounts:
        return self._counting.counts(self._num_dropped)

    @property
    def undelivered(self) -> int:
        """Spans that no export has delivered: dropped, refused, or still waiting."""
        return self._num_ended - self._counting.num_exported

    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled:
            self._num_ended += 1
            # The SDK drops the oldest where the queue is full, and says so to its log alone. A batch that it has just taken
            # out counts as waiting for some microseconds, so this may be a few spans early, never many.
            waiting = self._num_ended - self._num_dropped - self._counting.num_taken
            self._num_dropped += waiting > self._room
        super().on_end(span)

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[no-untyped-call]  # so the SDK has it
        self._room, self._num_dropped = 0, max(self._num_dropped, self._num_ended - self._counting.num_taken)
        if self.undelivered:
            logger.warning("tracing: %d of %d spans were not delivered", self.undelivered, self._num_ended)


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_taken = self.num_exported = self.num_failed = 0

    def counts(self, dropped: int) -> SpanCounts:
        return SpanCounts(type(self._exporter).__name__, self.num_exported, self.num_failed, dropped)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_exported += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtlpJsonFileExporter(SpanExporter):
    """Writes OTLP-JSON lines: one ``ExportTraceServiceRequest`` a line (OpenTelemetry file exporter format, ids in hex).

    A write that fails is reported, and ends the file: what came before it stays readable.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write the OTLP file {path}: {error.strerror}") from error
        self._path, self._has_failed = path, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._has_failed:
            return SpanExportResult.FAILURE
        try:
            self._file.write(to_json(spans).encode() + b"\n")
        except OSError as error:
            self._has_failed = True
            logger.error("cannot write the OTLP file %s any further: %s", self._path, error.strerror)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()
