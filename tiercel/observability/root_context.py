"""A request's root span before it exists: ids, parent and sampling, decided at arrival, because callers pass them on."""

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import propagate
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind


def root_name(model: str) -> str:
    """Name of the root spans of a model's requests."""
    return f"chat {model}"


@dataclass(frozen=True, slots=True)
class RootContext:
    """Who a request's root span is, and whose child."""

    context: SpanContext
    parent: SpanContext | None

    @property
    def is_sampled(self) -> bool:
        """Whether its trace is wanted: what the caller's flag or the sampler said."""
        return bool(self.context.trace_flags.sampled)

    def headers(self) -> dict[str, str]:
        """What carries the context on: ``traceparent`` and ``tracestate``, or as ``OTEL_PROPAGATORS`` says."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, otel.set_span_in_context(NonRecordingSpan(self.context), Context()))
        return carrier


class RootContexts:
    """Gives arriving requests their contexts; ids and sampling are the SDK's, as its variables say.

    Args:
        provider: whose sampler and ids.
        model: model name, for samplers that look at span names.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer, self._name = provider.get_tracer("tiercel"), root_name(model)

    def begin(self, headers: Mapping[str, str]) -> RootContext:
        """A request arrived with ``headers``: its context is under the caller's if it sent one, never under the process's own."""
        parent = propagate.extract(headers, Context())
        of = otel.get_current_span(parent).get_span_context()
        span = self._tracer.start_span(self._name, parent, SpanKind.SERVER)
        return RootContext(span.get_span_context(), of if of.is_valid else None)
