"""The SDK's OTLP exporters, which know about TLS, headers, retries and their variables, fed by our encoder."""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as SdkGrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as SdkHttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from tiercel.observability.otlp_encoding import to_protobuf


class GrpcSpanExporter(SdkGrpcExporter):
    """OTLP over gRPC."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        request: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(to_protobuf(data))
        return request


class HttpSpanExporter(SdkHttpExporter):
    """OTLP over HTTP, as protobuf."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; retries and their limits are the SDK's."""
        if self._shutdown:
            return SpanExportResult.FAILURE
        with self._metrics.export_operation(len(spans)) as operation:
            sent = self._client.export(to_protobuf(spans))
            operation.error = sent.error
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE
