"""Finished spans as OTLP: the protobuf request that collectors take, and the JSON line of the file.

The SDK's encoder makes an object for every field. Nearly all spans here are stages: a name, ids, two times, a link, and a few
numbers that the step's other requests have too. Those are put together from parts that are kept; any other span takes the SDK's
way. Format: opentelemetry-proto ``trace/v1/trace.proto`` and its JSON mapping (ids in hex, enums and flags as numbers).
"""

import base64
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from struct import Struct
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

Source = ResourceSpans
"""The resource and the scope of some spans, without the spans."""

_REMOTE_FLAGS = {False: 0x100, True: 0x300}  # SpanFlags: it is known whether the other context is remote; and it is
_TIMES = Struct("<BQBQ")  # field 7 and field 8, fixed64
_FLAGS = Struct("<I")
_SMALL = {int, str}


def to_protobuf(spans: Sequence[ReadableSpan]) -> bytes:
    """A serialised ``ExportTraceServiceRequest``."""
    request = []
    for source, run in _by_source(spans):
        (scope,) = source.scope_spans
        body = scope.SerializeToString() + b"".join([_field(b"\x12", _protobuf_span(span)) for span in run])
        resource = ResourceSpans(resource=source.resource, schema_url=source.schema_url).SerializeToString()
        request.append(_field(b"\x0a", resource + _field(b"\x12", body)))
    return b"".join(request)


def to_json(spans: Sequence[ReadableSpan]) -> str:
    """An ``ExportTraceServiceRequest`` in one line, without its line break."""
    request = []
    for source, run in _by_source(spans):
        resource = _as_dict(source)
        (scope,) = resource.pop("scopeSpans")
        listed = ",".join([_json_span(span) for span in run])
        inner = f'{json.dumps(scope)[:-1]}, "spans": [{listed}]}}'
        request.append(f'{json.dumps(resource)[:-1]}, "scopeSpans": [{inner}]}}')
    return f'{{"resourceSpans": [{", ".join(request)}]}}'


def _by_source(spans: Sequence[ReadableSpan]) -> Iterator[tuple[Source, list[ReadableSpan]]]:
    for _, group in groupby(spans, lambda span: (span.resource, span.instrumentation_scope)):
        run = list(group)
        (source,) = encode_spans(run[:1]).resource_spans
        source.scope_spans[0].ClearField("spans")
        yield source, run


def _is_stage(span: ReadableSpan) -> bool:
    return (
        span.kind is SpanKind.INTERNAL
        and span.status.status_code is StatusCode.UNSET
        and not (span.events or span.dropped_attributes or span.dropped_links or span.dropped_events)
        and not any(link.attributes or link.dropped_attributes for link in span.links)
        and _SMALL.issuperset(map(type, (span.attributes or {}).values()))
    )


def _protobuf_span(span: ReadableSpan) -> bytes:
    if not _is_stage(span):
        return bytes(_sdk_span(span).SerializeToString())
    context, parent = span.context, span.parent
    parts = [_protobuf_ids(context.trace_id, context.span_id)]
    if context.trace_state:
        parts.append(_field(b"\x1a", context.trace_state.to_header().encode()))
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
    parts += (_protobuf_name(span.name), _TIMES.pack(0x39, span.start_time, 0x41, span.end_time))
    parts += [_protobuf_attribute(key, value) for key, value in (span.attributes or {}).items()]
    parts += [_protobuf_link(*_ids(link.context)) for link in span.links]
    flags = _REMOTE_FLAGS[parent is not None and parent.is_remote]
    parts += (b"\x7a\x00\x85\x01", _FLAGS.pack(flags))  # an unset status, as the SDK sends it
    return b"".join(parts)


def _ids(context: SpanContext) -> tuple[int, int, bool]:
    return context.trace_id, context.span_id, context.is_remote  # a context cannot be hashed


def _protobuf_ids(trace_id: int, span_id: int) -> bytes:
    return b"\x0a\x10" + trace_id.to_bytes(16, "big") + b"\x12\x08" + span_id.to_bytes(8, "big")


@lru_cache(256)
def _protobuf_link(trace_id: int, span_id: int, is_remote: bool) -> bytes:
    return _field(b"\x6a", _protobuf_ids(trace_id, span_id) + b"\x35" + _FLAGS.pack(_REMOTE_FLAGS[is_remote]))


@lru_cache(256)
def _protobuf_name(name: str) -> bytes:
    return _field(b"\x2a", name.encode()) + b"\x30\x01"  # and the kind: internal


@lru_cache(4096, typed=True)
def _protobuf_attribute(key: str, value: int | str) -> bytes:
    return _field(b"\x4a", _key_value(key, value).SerializeToString())


def _field(tag: bytes, value: bytes) -> bytes:
    """A length-delimited field."""
    length, head = len(value), bytearray(tag)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + value


def _json_span(span: ReadableSpan) -> str:
    if not _is_stage(span):
        return json.dumps(_as_dict(_sdk_span(span)))
    context, parent = span.context, span.parent
    state = f'"traceState": {json.dumps(context.trace_state.to_header())}, ' if context.trace_state else ""
    of = "" if parent is None else f'"parentSpanId": "{parent.span_id:016x}", '
    attributes = ", ".join([_json_attribute(key, value) for key, value in (span.attributes or {}).items()])
    links = ", ".join([_json_link(*_ids(link.context)) for link in span.links])
    return (
        f'{{"traceId": "{context.trace_id:032x}", "spanId": "{context.span_id:016x}", {state}{of}'
        f'"name": {_json_name(span.name)}, "kind": 1, '
        f'"startTimeUnixNano": "{span.start_time}", "endTimeUnixNano": "{span.end_time}", '
        + (f'"attributes": [{attributes}], ' if attributes else "")
        + (f'"links": [{links}], ' if links else "")
        + f'"status": {{}}, "flags": {_REMOTE_FLAGS[parent is not None and parent.is_remote]}}}'
    )


@lru_cache(256)
def _json_link(trace_id: int, span_id: int, is_remote: bool) -> str:
    return f'{{"traceId": "{trace_id:032x}", "spanId": "{span_id:016x}", "flags": {_REMOTE_FLAGS[is_remote]}}}'


@lru_cache(256)
def _json_name(name: str) -> str:
    return json.dumps(name)


@lru_cache(4096, typed=True)
def _json_attribute(key: str, value: int | str) -> str:
    return json.dumps(_as_dict(_key_value(key, value)))


def _key_value(key: str, value: int | str) -> KeyValue:
    held = AnyValue(string_value=value) if isinstance(value, str) else AnyValue(int_value=value)
    return KeyValue(key=key, value=held)


def _sdk_span(span: ReadableSpan) -> Span:
    found: Span = encode_spans([span]).resource_spans[0].scope_spans[0].spans[0]
    return found


def _as_dict(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = _hex_ids(MessageToDict(message, use_integers_for_enums=True))
    return found


def _hex_ids(value: Any) -> Any:
    # protobuf's JSON writes bytes in base64; OTLP-JSON wants trace and span ids in hex.
    if isinstance(value, list):
        return [_hex_ids(v) for v in value]
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {k: base64.b64decode(v).hex() if k in ids else _hex_ids(v) for k, v in value.items()}
    return value
