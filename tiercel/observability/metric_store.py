"""Numbers of the metric families, and their exposition: a collector for ``prometheus_client``.

Its own metric classes take one lock per number and cannot give a scrape that fits together. Here a step's numbers go in under one
lock, so every scrape shows whole steps.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from tiercel.observability.metric_table import FAMILIES, Family, Kind

Labels = tuple[str, ...]
"""Label values, in the order of ``Family.labels``."""
Reading = tuple[Family, Labels, float]
"""A number that somebody else keeps, read when it is asked for."""


class _Histogram:
    """Observations by bucket, not yet added up; the last bucket has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts under their ``le`` labels, and the sum."""
        labels = [str(bound) for bound in self.bounds] + ["+Inf"]
        return list(zip(labels, map(float, accumulate(self.counts)), strict=True)), self.sum


class MetricStore(Collector):
    """Counters and histograms of one model.

    Args:
        model: value of the label ``model_name``.
        vllm_names: export families that vLLM has too under its names as well, with its labels.
        families: what there is.

    ``lock`` is held around whatever belongs together. ``readers`` are asked at every scrape, on the scraper's thread.
    """

    def __init__(self, model: str, *, vllm_names: bool = False, families: Sequence[Family] = FAMILIES) -> None:
        self.lock = Lock()
        self.readers: list[Callable[[], Iterable[Reading]]] = []
        self.registry = CollectorRegistry()
        self._model, self._vllm_names, self._families = model, vllm_names, families
        self._numbers: dict[Family, dict[Labels, float]] = {f: {} for f in families if f.kind is not Kind.HISTOGRAM}
        self._histograms: dict[Family, dict[Labels, _Histogram]] = {f: {} for f in families if f.kind is Kind.HISTOGRAM}
        for family in families:
            if not family.labels:
                self.declare(family, ())
        self.registry.register(self)

    def declare(self, family: Family, labels: Labels) -> None:
        """Have a series from the start, at 0."""
        if family.kind is Kind.HISTOGRAM:
            self._histograms[family].setdefault(labels, _Histogram(family.buckets))
        else:
            self._numbers[family].setdefault(labels, 0)

    def add(self, family: Family, amount: float = 1, labels: Labels = ()) -> None:
        """Count up; ``lock`` is held.

        Raises:
            ValueError: ``amount`` is negative.
            KeyError: the series was never declared: labels stay bounded.
        """
        if amount < 0:
            raise ValueError(f"{family.name} cannot count down by {amount}")
        self._numbers[family][labels] += amount

    def observe(self, family: Family, seconds: float, labels: Labels = (), *, times: int = 1) -> None:
        """Put a time into its histogram, so many times; ``lock`` is held.

        Raises:
            KeyError: the series was never declared.
        """
        self._histograms[family][labels].observe(seconds, times)

    def collect(self) -> Iterator[Metric]:
        """All families, as ``prometheus_client`` wants them."""
        with self.lock:
            numbers = {family: dict(series) for family, series in self._numbers.items()}
            histograms = {f: {k: h.snapshot() for k, h in series.items()} for f, series in self._histograms.items()}
        for read in self.readers:
            for family, labels, value in read():
                numbers[family][labels] = value
        for family in self._families:
            yield self._metric(family, family.name, ("model_name", *family.labels), (), numbers, histograms)
            if self._vllm_names and family.vllm:
                names = ("model_name", "engine", *(family.vllm_labels or family.labels))
                yield self._metric(family, family.vllm, names, ("0",), numbers, histograms)

    def _metric(
        self,
        family: Family,
        name: str,
        names: Labels,
        fixed: Labels,
        numbers: dict[Family, dict[Labels, float]],
        histograms: dict[Family, dict[Labels, tuple[list[tuple[str, float]], float]]],
    ) -> Metric:
        before = (self._model, *fixed)
        if family.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, family.help, labels=names)
            for labels, (buckets, total) in histograms[family].items():
                histogram.add_metric((*before, *labels), buckets, total)
            return histogram
        simple = (CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily)(
            name, family.help, labels=names
        )
        for labels, value in numbers[family].items():
            simple.add_metric((*before, *labels), value)
        return simple

    def exposition(self) -> tuple[bytes, str]:
        """What ``/metrics`` answers, whatever the scraper prefers: Prometheus' text format, which all of them read.

        ``prometheus_client`` 0.26 writes OpenMetrics with ``_`` in place of the ``:`` of sample names (client_python#1177).

        Returns:
            The body, and its content type.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
