"""Our encoder against the SDK's, on stages and on everything else that a span may hold."""

import base64
import json
import random
import timeit
from collections.abc import Sequence

import pytest
from google.protobuf.json_format import Parse
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tiercel.observability.otlp_encoding import to_json, to_protobuf

RESOURCES = (Resource({"service.name": "tiercel"}), Resource({}), Resource({"team": "é", "n": 3}, "http://schema"))
SCOPES = (InstrumentationScope("tiercel"), InstrumentationScope("other", "1", "http://scope", {"a": True}), None)
NAMES = ("spec_draft", "spec_verify", 'a "quoted"\nname é', "n" * 300)
VALUES = (
    0,
    1,
    -1,
    127,
    128,
    -(2**63),
    2**63 - 1,
    "",
    "host",
    'é"\\\u2028',
    "v" * 20_000,
    True,
    False,
    0.5,
    [1, 2],
    ["x"],
)
STATE = TraceState([("vendor", "1"), ("other", "2")])
ROUND = {"round": 3, "num_draft_tokens": 3, "emitted_tokens": 2, "tiercel.step": 9, "tiercel.clock": "host"}


def context(dice: random.Random) -> SpanContext:
    ids = dice.getrandbits(dice.choice((8, 128))) + 1, dice.getrandbits(dice.choice((8, 63))) + 1
    return SpanContext(*ids, dice.random() < 0.5, TraceFlags(1), dice.choice((None, STATE)))


def some_span(dice: random.Random) -> ReadableSpan:
    is_stage = dice.random() < 0.7
    attributes = {f"key {i}": dice.choice(VALUES) for i in range(dice.choice((0, 3)))}
    event = Event("retract", {"a": 1}, 5)
    return ReadableSpan(
        dice.choice(NAMES),
        context(dice),
        dice.choice((None, context(dice))),
        dice.choice(RESOURCES),
        dice.choice((ROUND, attributes)),
        [] if is_stage else [event],
        [Link(context(dice), dice.choice((None, None, {"a": 1}))) for _ in range(dice.choice((0, 1, 2)))],
        SpanKind.INTERNAL if is_stage else SpanKind.SERVER,
        status=Status(StatusCode.UNSET) if is_stage else Status(StatusCode.ERROR, "why"),
        start_time=dice.getrandbits(62),
        end_time=dice.getrandbits(62),
        instrumentation_scope=dice.choice(SCOPES),
    )


def flat(request: ExportTraceServiceRequest) -> list[tuple[str, str, str]]:
    """Every span with its resource and its scope; the two encoders group them in different orders."""
    found = []
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            source = f"{resource.resource} {resource.schema_url}", f"{scope.scope} {scope.schema_url}"
            found += [(*source, str(span)) for span in scope.spans]
    return sorted(found)


def check(spans: Sequence[ReadableSpan]) -> None:
    expected = flat(encode_spans(spans))
    assert flat(ExportTraceServiceRequest.FromString(to_protobuf(spans))) == expected
    line = to_json(spans)
    assert "\n" not in line
    lines = json.loads(line)
    for resource in lines["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for held in (span, *span.get("links", ())):
                    for name, size in (("traceId", 32), ("spanId", 16), ("parentSpanId", 16)):
                        if name in held:
                            assert len(held[name]) == size
                            held[name] = base64.b64encode(bytes.fromhex(held[name])).decode()
    assert flat(Parse(json.dumps(lines), ExportTraceServiceRequest())) == expected


@pytest.mark.parametrize("seed", range(30))
def test_every_span_says_what_the_sdk_would_say(seed: int) -> None:
    dice = random.Random(seed)
    check([some_span(dice) for _ in range(40)])


def test_nothing_is_nothing() -> None:
    assert to_protobuf([]) == b""
    assert json.loads(to_json([])) == {"resourceSpans": []}


def test_stages_are_encoded_at_a_fraction_of_the_sdks_price() -> None:
    dice = random.Random(0)
    parent, step = context(dice), Link(context(dice))
    spans = [
        ReadableSpan(
            "spec_verify",
            context(dice),
            parent,
            RESOURCES[0],
            ROUND,
            (),
            (step,),
            start_time=10**18,
            end_time=10**18 + 5,
        )
        for _ in range(512)
    ]

    def fastest(encode: object) -> float:
        return min(timeit.repeat(lambda: encode(spans), number=1, repeat=9))  # type: ignore[operator]

    sdk = fastest(lambda held: encode_spans(held).SerializeToString())
    ours, as_json = fastest(to_protobuf), fastest(to_json)
    assert ours < sdk / 2, (ours, sdk)
    assert as_json < sdk, (as_json, sdk)
