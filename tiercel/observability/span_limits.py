"""OpenTelemetry's limits on what a span holds (``OTEL_SPAN_*_LIMIT``, ``OTEL_ATTRIBUTE_*_LIMIT``); what they cut is counted."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, SpanLimits
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link

T = TypeVar("T", Event, Link)


class Limited:
    """Cuts what exceeds the limits of the SDK's variables, as spans that the SDK makes are cut."""

    def __init__(self) -> None:
        self._limits = SpanLimits()

    def attributes(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """What may stay of a span's attributes."""
        most, longest = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        if longest is None and (most is None or len(found) <= most):
            return found
        return BoundedAttributes(most, dict(found), max_value_len=longest)

    def events(self, found: Sequence[Event]) -> Sequence[Event]:
        """What may stay of its events: the latest."""
        return self._latest(found, self._limits.max_events)

    def links(self, found: Sequence[Link]) -> Sequence[Link]:
        """What may stay of its links: the latest."""
        return self._latest(found, self._limits.max_links)

    @staticmethod
    def _latest(found: Sequence[T], most: int | None) -> Sequence[T]:
        if most is None or len(found) <= most:
            return found
        kept: Sequence[T] = BoundedList.from_seq(most, found)
        return kept
