from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.observability import req_time_stats
from tiercel.observability.req_time_stats import Mark, ReqTimeStats, set_time_batch
from tiercel.observability.trace import set_global_trace_level


def reqs(count: int) -> tuple[list[Any], list[Mark]]:
    marks: list[Mark] = []
    return [SimpleNamespace(time_stats=ReqTimeStats(str(i), marks.append)) for i in range(count)], marks


def test_one_clock_read_and_one_append_for_a_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_global_trace_level(3)
    batch, marks = reqs(50)
    reads = iter([111])
    monkeypatch.setattr(req_time_stats, "perf_counter_ns", lambda: next(reads))
    set_time_batch(batch, "set_spec_draft_start_time", trace_only=True)
    assert [(m.method, m.ts_ns, len(m.requests)) for m in marks] == [("set_spec_draft_start_time", 111, 50)]


def test_tracing_off_reads_no_clock_and_appends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, marks = reqs(3)
    monkeypatch.setattr(req_time_stats, "perf_counter_ns", lambda: pytest.fail("no clock read"))
    set_time_batch(batch, "set_spec_verify_start_time", trace_only=True)
    batch[0].time_stats.set_spec_verify_end_time(num_correct_drafts=2)
    assert marks == []


@pytest.mark.parametrize("level", [0, 3])
def test_a_misspelt_setter_is_loud_with_tracing_off_and_on(level: int) -> None:
    set_global_trace_level(level)
    with pytest.raises(AttributeError, match="set_spec_draft_begin_time"):
        set_time_batch(reqs(1)[0], "set_spec_draft_begin_time", trace_only=True)


def test_milestones_are_kept_whether_tracing_is_on_or_off_and_the_first_wins() -> None:
    batch, marks = reqs(2)
    for ts in (5, 9):
        set_time_batch(batch, "set_forward_entry_time", ts_ns=ts)
        set_time_batch(batch, "set_prefill_finished_time", ts_ns=ts + 1)
    assert [(r.time_stats.forward_entry_ns, r.time_stats.prefill_finished_ns) for r in batch] == [(5, 6), (5, 6)]
    assert marks == []


def test_correct_drafts_travel_with_the_mark() -> None:
    set_global_trace_level(2)
    batch, marks = reqs(1)
    batch[0].time_stats.set_spec_verify_end_time(7, num_correct_drafts=2)
    assert (marks[0].ts_ns, marks[0].attrs) == (7, {"num_correct_drafts": 2})


def test_an_empty_batch_marks_nothing() -> None:
    set_global_trace_level(3)
    set_time_batch([], "set_spec_draft_start_time")


def test_attributes_that_the_setter_does_not_take_are_loud() -> None:
    set_global_trace_level(3)
    batch, marks = reqs(2)
    set_time_batch(batch, "set_spec_verify_end_time", attrs={"num_correct_drafts": 1})
    assert [m.attrs for m in marks] == [{"num_correct_drafts": 1}]
    for method, attrs in (
        ("set_spec_verify_end_time", None),
        ("set_spec_verify_end_time", {"correct": 1}),
        ("set_forward_entry_time", {"num_correct_drafts": 1}),
    ):
        with pytest.raises(TypeError, match=method):
            set_time_batch(batch, method, attrs=attrs)
