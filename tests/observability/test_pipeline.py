import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.scripted import scripted_engine
from tiercel.core.batch import ForwardMode, StepRecord
from tiercel.core.config import TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget
from tiercel.observability.perfetto import PerfettoSink
from tiercel.observability.pipeline import TracePipeline, open_pipeline
from tiercel.observability.records import RecordsSink, read_requests, read_rounds
from tiercel.observability.trace import get_global_trace_level


class Listening:
    """A sink that may be slow, or broken."""

    def __init__(self, gate: threading.Event | None = None, error: Exception | None = None) -> None:
        self.gate, self.error = gate, error
        self.steps: list[int] = []
        self.ends: list[Any] = []
        self.closed = False

    def on_step(self, record: StepRecord) -> None:
        if self.gate:
            self.gate.wait()
        if self.error:
            raise self.error
        self.steps.append(record.step)

    def on_request(self, record: Any, stats: Any) -> None:
        self.ends.append(record)

    def close(self) -> None:
        self.closed = True


def step(number: int) -> StepRecord:
    return StepRecord(number, ForwardMode.DECODE, "none")


def test_a_slow_sink_never_blocks_the_engine_and_drops_are_counted() -> None:
    gate = threading.Event()
    sink = Listening(gate)
    pipeline = TracePipeline([sink], capacity=10)
    start = time.perf_counter()
    for number in range(1000):
        pipeline.on_step(step(number))
    for name in "abc":
        pipeline.on_request(name, None)  # type: ignore[arg-type]
    assert time.perf_counter() - start < 0.5
    gate.set()
    assert pipeline.close()
    assert sink.ends == ["a", "b", "c"]
    assert len(sink.steps) + pipeline.dropped["step"] == 1000
    assert pipeline.dropped["step"] > 900
    assert sink.closed


def test_a_broken_sink_is_counted_logged_once_and_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = Listening(error=RuntimeError("disk full")), Listening()
    pipeline = TracePipeline([broken, healthy])
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            pipeline.on_step(step(number))
        pipeline.close()
    assert healthy.steps == [0, 1, 2, 3, 4]
    assert pipeline.failed == {"Listening.step": 5}
    assert len([r for r in caplog.records if "failed" in r.message]) == 1


def test_a_stuck_sink_does_not_hold_up_the_end() -> None:
    gate = threading.Event()
    pipeline = TracePipeline([Listening(gate)])
    pipeline.on_step(step(0))
    start = time.monotonic()
    assert pipeline.close(timeout_s=0.2) is False
    assert time.monotonic() - start < 1
    gate.set()


def test_what_comes_after_the_end_is_counted() -> None:
    pipeline = TracePipeline([Listening()])
    assert pipeline.close()
    pipeline.on_step(step(0))
    pipeline.on_request("late", None)  # type: ignore[arg-type]
    assert pipeline.dropped == {"step": 1, "request": 1}
    assert pipeline.close()


def test_an_untraced_pipeline_leaves_the_level_of_a_traced_one_alone() -> None:
    traced = open_pipeline(TraceConfig(enable_trace=True, trace_level=2), "made-up", [InMemorySpanExporter()])
    untraced = open_pipeline(TraceConfig(), "made-up")
    assert get_global_trace_level() == 2
    assert traced.close()
    assert untraced.close()


def test_a_pipeline_that_cannot_open_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TraceConfig(
        enable_trace=True,
        otlp_file=tmp_path / "file" / "spans.jsonl",
        records_out=tmp_path / "records",
        trace_out=tmp_path / "trace.json",
    )
    with pytest.raises(UserError, match="OTLP file"):  # a file left open would warn, and warnings fail tests
        open_pipeline(config, "made-up")
    assert get_global_trace_level() == 0
    assert json.loads((tmp_path / "trace.json").read_text())


def test_without_sinks_there_is_no_thread() -> None:
    before = threading.active_count()
    pipeline = TracePipeline()
    pipeline.on_step(step(0))
    assert threading.active_count() == before
    assert pipeline.close()


@pytest.fixture
def run_files(toy_target: LoadedTarget, tmp_path: Path) -> Path:
    trace = TraceConfig(trace_out=tmp_path / "trace.json", records_out=tmp_path / "records")
    engine = scripted_engine(toy_target, lambda r, d: r.token_ids[-1:] * d, 3, trace=trace)
    for name, count in (("a", 9), ("b", 4), ("c", 1)):
        engine.add_request(name, [7, 30, 99, 12], SamplingParams(max_tokens=count, ignore_eos=True))
    while engine.has_work:
        engine.step()
    engine.add_request("a", [5], SamplingParams(max_tokens=3, ignore_eos=True))  # the same id once more
    while engine.has_work:
        engine.step()
    engine.close()
    return tmp_path


def test_the_perfetto_file_nests_and_its_arrows_pair_up(run_files: Path) -> None:
    events = json.loads((run_files / "trace.json").read_text())
    slices: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(slices) == 5  # the engine and four requests
    for spans in slices.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)
    starts = [e["id"] for e in events if e["ph"] == "s"]
    ends = [e["id"] for e in events if e["ph"] == "f"]
    assert starts == ends
    assert len(set(starts)) == len(starts) > 0
    names = {e["name"] for e in events}
    assert {"draft", "verify", "target", "queue", "finish", "KV slots used", "acceptance rate"} <= names


def test_records_read_back_and_wrong_files_are_named(run_files: Path, tmp_path: Path) -> None:
    requests = list(read_requests(run_files / "records" / "requests.jsonl"))
    assert [r.completion_tokens for r in sorted(requests, key=lambda r: r.completion_tokens)] == [1, 3, 4, 9]
    rounds = list(read_rounds(run_files / "records" / "rounds.jsonl"))
    assert sum(r.num_emitted_tokens for s in rounds for r in s.rounds) == 1 * 0 + 2 + 3 + 8
    wrong = tmp_path / "wrong.jsonl"
    for text, named in (("{", ":1"), ("[1]", ":1"), ('{"schema_version": 99}', "99"), ('{"schema_version": 1}', ":1")):
        wrong.write_text(text + "\n")
        with pytest.raises(UserError, match=named):
            list(read_requests(wrong))
        with pytest.raises(UserError, match=named):
            list(read_rounds(wrong))
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        list(read_requests(tmp_path / "nowhere.jsonl"))


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="records"):
        RecordsSink(tmp_path / "file" / "records")
    with pytest.raises(UserError, match="trace file"):
        PerfettoSink(tmp_path / "file" / "trace.json")
