"""From the engine thread to spans and files: a bounded queue, one exporter thread, sinks.

The engine thread only appends plain objects. When the queue is full an item is dropped and counted by kind; the end of a
request is never dropped. A sink that fails is counted and logged once, and the others go on.

What the engine calls, in a request's order::

    pipeline = open_pipeline(config, model)
    stats = pipeline.new_time_stats(request_id, headers)      # at arrival
    stats.set_wait_queue_entry_time()
    set_time_batch(reqs, "set_forward_entry_time")            # before an extend step; the first call counts
    pipeline.on_step(record)                                  # after each step, before the ends it brings
    stats.set_retract_time()                                  # on preemption
    stats.set_completion_time()
    pipeline.on_request(request_record(...), stats)           # exactly once
    pipeline.close()
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from opentelemetry.sdk.trace.export import SpanExporter

from tiercel.core.batch import StepRecord
from tiercel.core.config import TraceConfig
from tiercel.core.errors import UserError
from tiercel.observability import metric_table as table
from tiercel.observability.metric_store import Reading
from tiercel.observability.metric_table import Family
from tiercel.observability.metrics import EngineView, MetricsSink
from tiercel.observability.perfetto import PerfettoSink
from tiercel.observability.records import RecordsSink, RequestRecord
from tiercel.observability.req_time_stats import Mark, ReqTimeStats
from tiercel.observability.root_context import RootContexts
from tiercel.observability.spans import SpanSink
from tiercel.observability.trace import CountingProvider, make_provider, set_global_trace_level

logger = logging.getLogger(__name__)

CAPACITY = 65536
CLOSE_TIMEOUT_S = 3.0


class Sink(Protocol):
    """Consumes what the engine recorded, on the exporter thread, in order."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_request(self, record: RequestRecord, stats: ReqTimeStats) -> None: ...

    def close(self) -> None: ...


class MarkSink(Sink, Protocol):
    """A sink that wants the hooks' marks too."""

    def on_mark(self, mark: Mark) -> None: ...


Item = Mark | StepRecord | tuple[RequestRecord, ReqTimeStats] | threading.Event
"""An event is set when its turn comes."""


class TracePipeline:
    """Takes marks, step records and finished requests from the engine thread to the sinks.

    Args:
        sinks: consumers of records.
        mark_sinks: consumers that want marks as well.
        capacity: items that may wait.

    ``dropped`` counts items that found the queue full, ``failed`` exceptions, both by kind. ``metrics`` is the sink that
    counts for Prometheus, ``spans`` the one that makes spans,
    ``roots`` gives their requests contexts, where there are such.
    """

    def __init__(
        self, sinks: Sequence[Sink] = (), mark_sinks: Sequence[MarkSink] = (), capacity: int = CAPACITY
    ) -> None:
        self._sinks: list[Sink] = [*sinks, *mark_sinks]
        self._mark_sinks = list(mark_sinks)
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._wake, self._closing = threading.Event(), False
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.metrics: MetricsSink | None = None
        self.spans: SpanSink | None = None
        self.roots: RootContexts | None = None
        self._thread: threading.Thread | None = None
        if self._sinks:
            self._thread = threading.Thread(target=self._run, name="tiercel-trace", daemon=True)
            self._thread.start()

    def new_time_stats(self, request_id: str, trace_headers: Mapping[str, str] | None = None) -> ReqTimeStats:
        """The hooks of a request that arrives now.

        Who its root span will be is decided here, on the caller's thread: whoever calls on with the request needs its ids
        (``trace_headers``). Everything else about spans is made on the exporter thread.
        """
        headers = {name.lower(): value for name, value in (trace_headers or {}).items()}
        stats = ReqTimeStats(request_id, self.on_mark, trace_headers=headers)
        if self.roots and stats.trace_level:
            stats.root = self.roots.begin(stats.trace_headers)
        return stats

    def trace_headers(self, stats: ReqTimeStats) -> dict[str, str]:
        """The context to send on with calls made for a request: its root span's, else what came in."""
        return dict(stats.trace_headers) if stats.root is None else stats.root.headers()

    def set_trace_level(self, level: int) -> None:
        """Switch tracing for requests that arrive from now on; at 0, those under way get no further stages either.

        Raises:
            UserError: no such level, or tracing was not enabled at start, so that there is nowhere to send spans.
        """
        if self.spans is None and level:
            raise UserError(f"trace level {level} needs tracing enabled at start: add --enable-trace")
        set_global_trace_level(level)

    def on_mark(self, mark: Mark) -> None:
        """Take a stage mark."""
        if self._mark_sinks:
            self._put(mark, "mark")

    def on_step(self, record: StepRecord) -> None:
        """Take a finished engine step."""
        self._put(record, "step")

    def on_request(self, record: RequestRecord, stats: ReqTimeStats) -> None:
        """Take the end of a request, however full the queue is."""
        self._put((record, stats), "request", always=True)

    def drain(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until the sinks have what was taken so far.

        Returns:
            Whether they had it in time.
        """
        if self._thread is None:
            return True
        if self._closing:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        done = threading.Event()
        self._put(done, "drain", always=True)
        return done.wait(timeout_s)

    def readings(self) -> Iterator[Reading]:
        """How the pipeline itself fares."""
        for kind in table.ITEM_KINDS:
            yield table.ITEMS_DROPPED, (kind,), self.dropped[kind]
        yield table.QUEUE_ITEMS, (), len(self._items)
        for sink in self._sinks:
            for call in ("step", "request", "close", *(["mark"] if sink in self._mark_sinks else [])):
                name = type(sink).__name__
                yield table.SINK_FAILURES, (name, call), self.failed[f"{name}.{call}"]

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Flush and close every sink, waiting at most ``timeout_s``.

        Returns:
            Whether everything was flushed in time.
        """
        if self._thread is None:
            return True
        if self.dropped:
            logger.warning("trace pipeline: dropped %s for want of room", dict(self.dropped))
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("trace pipeline: not flushed within %.1f s; %d items left", timeout_s, len(self._items))
            return False
        return True

    def _put(self, item: Item, kind: str, *, always: bool = False) -> None:
        if self._thread is None:
            return
        if self._closing or (len(self._items) >= self._capacity and not always):
            self.dropped[kind] += 1
            return
        self._items.append(item)
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._items:
                self._deliver(self._items.popleft())
            if self._closing and not self._items:
                break
        for sink in self._sinks:
            self._guarded(sink, "close", sink.close)

    def _deliver(self, item: Item) -> None:
        if isinstance(item, Mark):
            for mark_sink in self._mark_sinks:
                self._guarded(mark_sink, "mark", mark_sink.on_mark, item)
        elif isinstance(item, StepRecord):
            for sink in self._sinks:
                self._guarded(sink, "step", sink.on_step, item)
        elif isinstance(item, threading.Event):
            item.set()
        else:
            for sink in self._sinks:
                self._guarded(sink, "request", sink.on_request, *item)

    def _guarded(self, sink: Sink, kind: str, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            key = f"{type(sink).__name__}.{kind}"
            self.failed[key] += 1
            if self.failed[key] == 1:
                logger.exception("trace pipeline: %s failed; further failures are only counted", key)


def open_pipeline(
    config: TraceConfig,
    model: str,
    exporters: Sequence[SpanExporter] = (),
    engine: EngineView = EngineView(),
) -> TracePipeline:
    """The pipeline that ``config`` asks for. With tracing on it sets the process's trace level.

    Args:
        config: what is recorded, and where it goes.
        model: model name for the spans.
        exporters: further span exporters.
        engine: what the metrics show of it.

    Raises:
        UserError: a file cannot be written, or an endpoint or port cannot be used.
    """
    sinks: list[Sink] = []
    mark_sinks: list[MarkSink] = []
    metrics: MetricsSink | None = None
    provider: CountingProvider | None = None
    spans: SpanSink | None = None
    roots: RootContexts | None = None
    with ExitStack() as opened:
        if config.records_out:
            max_bytes = config.records_max_mb * 10**6 if config.records_max_mb else None
            sinks.append(RecordsSink(config.records_out, max_bytes))
            opened.callback(sinks[-1].close)
        if config.trace_out:
            sinks.append(PerfettoSink(config.trace_out))
            opened.callback(sinks[-1].close)
        if config.counts_metrics:
            metrics = MetricsSink(model, engine, vllm_names=config.metrics_vllm_names, port=config.metrics_port)
            sinks.append(metrics)
            opened.callback(metrics.close)
        if config.enable_trace:
            provider = make_provider(config, exporters)
            roots = RootContexts(provider, model)
            spans = SpanSink(provider, model, roots, legacy_names=config.trace_legacy_names)
            mark_sinks.append(spans)
            set_global_trace_level(config.trace_level)
        opened.pop_all()  # all are open: from here on the pipeline closes them
    pipeline = TracePipeline(sinks, mark_sinks)
    pipeline.spans, pipeline.roots = spans, roots
    if metrics:
        pipeline.metrics = metrics
        metrics.store.readers.append(pipeline.readings)
        if provider:
            metrics.store.readers.append(partial(_span_readings, provider))
    return pipeline


def _span_readings(provider: CountingProvider) -> Iterator[Reading]:
    numbers: Counter[tuple[Family, str]] = Counter()
    for counts in provider.counts():
        numbers[table.SPANS_EXPORTED, counts.exporter] += counts.exported
        numbers[table.SPANS_FAILED, counts.exporter] += counts.failed
        numbers[table.SPANS_DROPPED, counts.exporter] += counts.dropped
    for (family, exporter), number in numbers.items():
        yield family, (exporter,), number
