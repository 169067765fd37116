"""The hooks. A request's milestones, and the stage marks of its rounds; nothing here makes spans or touches files.

Names follow SGLang's ``observability/req_time_stats.py`` where it has one. Times are ``time.perf_counter_ns``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

from tiercel.observability.root_context import RootContext
from tiercel.observability.trace import get_global_trace_level, get_global_tracing_enabled

MARK_LEVEL = 2
"""Lowest trace level of a request whose stage marks travel: below it no span is made of them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One stage boundary of one or many requests: which setter was called, when, for whom."""

    method: str
    ts_ns: int
    requests: tuple["ReqTimeStats", ...]
    attrs: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class ReqTimeStats:
    """Milestones of one request, and the way to the trace pipeline.

    Milestones (queue entry, first forward, first token, completion) are kept whether tracing is on or off, because the
    response reports them; stage marks only travel to the pipeline.

    Args:
        request_id: whose.
        emit: takes a mark to the pipeline; never blocks.
        trace_level: level in force for this request; fixed at arrival, so that a span tree is never half one level.
        trace_headers: context that the caller sent, by lower-case header name (``traceparent``, ``tracestate``).
        root: who the request's root span is, where spans are made.
    """

    request_id: str
    emit: Callable[[Mark], None]
    trace_level: int = field(default_factory=get_global_trace_level)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    root: RootContext | None = None
    created_ns: int = field(default_factory=perf_counter_ns)
    wait_queue_entry_ns: int | None = None
    forward_entry_ns: int | None = None
    prefill_finished_ns: int | None = None
    completion_ns: int | None = None

    def set_wait_queue_entry_time(self, ts_ns: int | None = None) -> None:
        """The request waits for its first forward. A preempted request waits again without moving this mark."""
        self.wait_queue_entry_ns = self.wait_queue_entry_ns or ts_ns or perf_counter_ns()

    def set_forward_entry_time(self, ts_ns: int | None = None) -> None:
        """The first forward begins; the first call wins."""
        self.forward_entry_ns = self.forward_entry_ns or ts_ns or perf_counter_ns()

    def set_prefill_finished_time(self, ts_ns: int | None = None) -> None:
        """The first token is there; the first call wins."""
        self.prefill_finished_ns = self.prefill_finished_ns or ts_ns or perf_counter_ns()

    def set_completion_time(self, ts_ns: int | None = None) -> None:
        """The request has ended, for whatever reason."""
        self.completion_ns = ts_ns or perf_counter_ns()

    def set_retract_time(self, ts_ns: int | None = None) -> None:
        """The request was preempted."""
        self._mark("set_retract_time", ts_ns)

    def set_spec_draft_start_time(self, ts_ns: int | None = None) -> None:
        self._mark("set_spec_draft_start_time", ts_ns)

    def set_spec_draft_end_time(self, ts_ns: int | None = None) -> None:
        self._mark("set_spec_draft_end_time", ts_ns)

    def set_spec_verify_start_time(self, ts_ns: int | None = None) -> None:
        self._mark("set_spec_verify_start_time", ts_ns)

    def set_spec_verify_end_time(self, ts_ns: int | None = None, *, num_correct_drafts: int) -> None:
        """Verification ended with so many correct drafts (no bonus token)."""
        self._mark("set_spec_verify_end_time", ts_ns, {"num_correct_drafts": num_correct_drafts})

    def set_spec_draft_extend_start_time(self, ts_ns: int | None = None) -> None:
        self._mark("set_spec_draft_extend_start_time", ts_ns)

    def set_spec_draft_extend_end_time(self, ts_ns: int | None = None) -> None:
        self._mark("set_spec_draft_extend_end_time", ts_ns)

    def _mark(self, method: str, ts_ns: int | None, attrs: dict[str, Any] | None = None) -> None:
        if get_global_tracing_enabled() and (self.trace_level >= MARK_LEVEL or method not in STAGE_METHODS):
            self.emit(Mark(method, ts_ns or perf_counter_ns(), (self,), attrs))


class HasTimeStats(Protocol):
    """A request, as far as the hooks see it."""

    time_stats: Any


STAGE_METHODS = frozenset(name for name in vars(ReqTimeStats) if name.startswith("set_spec_"))
MILESTONE_METHODS = frozenset(name for name in vars(ReqTimeStats) if name.startswith("set_")) - STAGE_METHODS


def set_time_batch(
    reqs: Iterable[HasTimeStats],
    method_name: str,
    trace_only: bool = False,
    attrs: dict[str, Any] | None = None,
    *,
    ts_ns: int | None = None,
) -> None:
    """Mark one moment for a whole batch: one clock read, and for a stage one append, however many requests.

    Args:
        reqs: requests with ``time_stats``.
        method_name: setter of ``ReqTimeStats``.
        trace_only: do nothing when tracing is off.
        attrs: the setter's further arguments (``num_correct_drafts`` of the end of verification).
        ts_ns: the moment, where the caller has read the clock already.

    Raises:
        AttributeError: no such setter; also when tracing is off, so that a typo cannot hide.
        TypeError: ``attrs`` are not the setter's.
    """
    if method_name not in STAGE_METHODS and method_name not in MILESTONE_METHODS:
        raise AttributeError(f"ReqTimeStats has no setter {method_name!r}")
    if trace_only and not get_global_tracing_enabled():
        return
    expected = {"num_correct_drafts"} if method_name == "set_spec_verify_end_time" else set()
    if set(attrs or ()) != expected:
        raise TypeError(f"{method_name} takes {expected or 'no attributes'}, not {attrs}")
    stats = tuple(req.time_stats for req in reqs)
    if not stats:
        return
    now = ts_ns or perf_counter_ns()
    if method_name in MILESTONE_METHODS:
        for one in stats:
            getattr(one, method_name)(now)
    elif get_global_tracing_enabled() and any(one.trace_level >= MARK_LEVEL for one in stats):
        stats[0].emit(Mark(method_name, now, stats, attrs))
