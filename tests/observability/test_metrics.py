"""Prometheus metrics from hand-made steps, and the port that shows them."""

import re
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from tests.observability.exposed import Numbers, exposed, families, numbers, total
from tests.scripted import run, scripted_engine
from tiercel.core.batch import ForwardMode, RequestExtend, RequestRound, StepRecord
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.depths import Depth, DepthTable
from tiercel.core.errors import UserError
from tiercel.core.request import SOURCE_NGRAM
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.observability.metric_store import MetricStore
from tiercel.observability.metric_table import FAMILIES, Family, Kind, markdown_table
from tiercel.observability.metrics import EngineView, Load, MetricsSink
from tiercel.observability.records import RequestRecord
from tiercel.observability.req_time_stats import ReqTimeStats

MS = 10**6
DOCS = Path(__file__).parents[2] / "docs"
DEPTHS = DepthTable("made-up rule", (Depth(2, 2), Depth(4, 1, lookup=False)))
VIEW = EngineView("multi-layer-eagle", num_steps=3, num_layers=2, load=lambda: Load(2, 1, 48, 64), depths=DEPTHS)
IGNORED = ReqTimeStats("ignored", lambda mark: None)


def extend(number: int, end_ms: int, name: str = "a", prompt: int = 4, token: int | None = 9) -> StepRecord:
    part = RequestExtend(name, 0, prompt, token)
    return StepRecord(number, ForwardMode.EXTEND, "none", start_ns=0, end_ns=end_ms * MS, extends=[part])


def decode(number: int, end_ms: int, *parts: RequestRound) -> StepRecord:
    """A step of 10 ms: 1 draft, 5 verify, 3 draft extend (layers of 1 and 2), 1 other."""
    start = (end_ms - 10) * MS
    return StepRecord(
        number,
        ForwardMode.DECODE,
        "multi-layer-eagle",
        start_ns=start,
        draft_start_ns=start,
        draft_end_ns=start + MS,
        verify_start_ns=start + MS,
        verify_end_ns=start + 6 * MS,
        draft_extend_start_ns=start + 6 * MS,
        draft_extend_end_ns=start + 9 * MS,
        end_ns=start + 10 * MS,
        layer_end_ns=[start + 7 * MS, start + 9 * MS],
        rounds=list(parts),
    )


def part(number: int, context: int, proposed: int, correct: int, emitted: int, name: str = "a") -> RequestRound:
    drafts = tuple(range(proposed))
    return RequestRound(name, number, context, drafts, drafts, number if proposed else None, correct, 7, emitted)


def ended(
    name: str = "a", *, prompt: int = 4, completion: int, drafted: list[int], accepted: list[int]
) -> RequestRecord:
    spec = {
        "num_spec_steps": len(drafted),
        "num_emitted_tokens": max(completion - 1, 0),
        "per_step_drafted": drafted,
        "per_step_accepted": accepted,
    }
    tokens = (1,) * completion
    return RequestRecord(
        *(name, "made-up", "scripted", 3, {}, 0.0, prompt, completion, "length", None),
        *(2.0, 20.0 if completion else None, 90.0, 1, tokens, tokens, spec),
    )


def test_a_run_counted_by_hand() -> None:
    sink = MetricsSink("made-up", VIEW)
    sink.on_step(extend(0, 20))
    sink.on_step(decode(1, 32, part(0, 5, 3, 2, 3)))  # 3 tokens in 12 ms
    sink.on_step(decode(2, 42, part(1, 8, 3, 0, 1)))  # 1 token in 10 ms
    sink.on_step(decode(3, 52, part(2, 9, 0, 0, 1)))  # plain
    running = exposed(sink.store)
    assert running["tiercel:generation_tokens_total"] == {(): 6}, "long answers show before they end"
    sink.on_request(ended(completion=6, drafted=[3, 3, 0], accepted=[2, 0, 0]), IGNORED)
    found = exposed(sink.store)
    expected: Numbers = {
        "spec_decode_num_rounds_total": {(): 3},
        "spec_decode_num_drafts_total": {(): 2},
        "spec_decode_num_draft_tokens_total": {(): 6},
        "spec_decode_num_accepted_tokens_total": {(): 2},
        "spec_decode_num_accepted_tokens_per_pos_total": {("0",): 1, ("1",): 1, ("2",): 0},
        "spec_decode_num_reached_tokens_per_pos_total": {("0",): 2, ("1",): 1, ("2",): 1},
        "spec_decode_emitted_tokens_total": {(): 5},
        "prompt_tokens_total": {(): 4},
        "generation_tokens_total": {(): 6},
        "preemptions_total": {(): 1},
        "requests_total": {("stop",): 0, ("length",): 1, ("abort",): 0, ("timeout",): 0, ("error",): 0},
        "requests_running": {(): 2},
        "requests_waiting": {(): 1},
        "kv_slots": {(): 64},
        "kv_slots_used": {(): 48},
        "kv_usage_ratio": {(): 0.75},
        "engine_info": {("multi-layer-eagle", "3"): 1},
        "spec_decode_stage_seconds_count": {("draft",): 3, ("verify",): 3, ("draft_extend",): 3, ("other",): 3},
        "spec_decode_layer_seconds_count": {("0",): 3, ("1",): 3},
        "prefill_step_seconds_sum": {(): 0.02},
        "time_to_first_token_seconds_sum": {(): 0.02},
        "request_queue_time_seconds_sum": {(): 0.002},
        "e2e_request_latency_seconds_sum": {(): 0.09},
    }
    for name, series in expected.items():
        assert found[f"tiercel:{name}"] == series, name
    sums = found["tiercel:spec_decode_stage_seconds_sum"]
    in_ms = {labels: round(value * 1e3, 9) for labels, value in sums.items()}
    assert in_ms == {("draft",): 3, ("verify",): 15, ("draft_extend",): 9, ("other",): 3}
    layers = found["tiercel:spec_decode_layer_seconds_sum"]
    assert {labels: round(value * 1e3, 9) for labels, value in layers.items()} == {("0",): 3, ("1",): 6}


def test_depths_and_drafters_are_shown() -> None:
    sink = MetricsSink("made-up", VIEW)
    by_lookup = replace(part(1, 8, 3, 1, 2), draft_layers=(SOURCE_NGRAM,) * 3, born_step=None)
    sink.on_step(decode(1, 32, part(0, 5, 2, 2, 3), replace(by_lookup, request_id="b")))
    sink.on_step(decode(2, 42, by_lookup, part(2, 10, 0, 0, 1, "b")))
    found = exposed(sink.store)
    for counter, values in (
        ("rounds", (1, 2, 1, 0)),
        ("draft_tokens", (2, 6, 0, 0)),
        ("accepted_tokens", (2, 2, 0, 0)),
    ):
        names = [("layers",), ("lookup",), ("plain",), ("unknown",)]
        assert found[f"tiercel:spec_decode_drafter_{counter}_total"] == dict(zip(names, values, strict=True))
    # labels in the order of their names: lookup, requests, source; with more requests than the table knows layers are left out
    assert found["tiercel:spec_decode_depth_steps"] == {
        ("true", "2", "made-up rule"): 2,
        ("false", "4", "made-up rule"): 1,
        ("false", "more", "made-up rule"): 0,
    }
    sink.on_request(ended("c", completion=4, drafted=[3], accepted=[2]), IGNORED)
    assert exposed(sink.store)["tiercel:spec_decode_drafter_accepted_tokens_total"]["unknown",] == 2


def test_inter_token_latency_is_per_token() -> None:
    sink = MetricsSink("made-up", VIEW)
    sink.on_step(extend(0, 20))
    sink.on_step(decode(1, 32, part(0, 5, 3, 2, 3)))
    sink.on_step(decode(2, 42, part(1, 8, 3, 0, 1)))
    found = exposed(sink.store)
    bucket = found["tiercel:inter_token_latency_seconds_bucket"]
    assert bucket["0.0025",] == 0
    assert bucket["0.005",] == 3  # three tokens of 4 ms
    assert bucket["0.0075",] == 3
    assert bucket["0.01",] == bucket["+Inf",] == 4  # and one of 10 ms: a bound belongs to its bucket
    assert found["tiercel:inter_token_latency_seconds_sum"][()] == pytest.approx(0.022)


def test_tokens_of_a_dropped_step_share_the_time_up_to_the_next_one() -> None:
    sink = MetricsSink("made-up", VIEW)
    sink.on_step(extend(0, 20))
    sink.on_step(decode(3, 50, part(2, 8, 3, 1, 2)))  # two rounds with 3 tokens are missing before
    found = exposed(sink.store)
    assert found["tiercel:inter_token_latency_seconds_count"] == {(): 5}
    assert found["tiercel:inter_token_latency_seconds_sum"][()] == pytest.approx(0.03)
    assert found["tiercel:spec_decode_num_rounds_total"] == {(): 1}
    sink.on_request(ended(completion=6, drafted=[3, 2, 3], accepted=[1, 0, 1]), IGNORED)
    made_up = exposed(sink.store)
    assert made_up["tiercel:spec_decode_num_rounds_total"] == {(): 3}
    assert made_up["tiercel:spec_decode_num_draft_tokens_total"] == {(): 8}
    assert made_up["tiercel:spec_decode_num_accepted_tokens_total"] == {(): 2}
    assert made_up["tiercel:generation_tokens_total"] == {(): 6}
    assert made_up["tiercel:inter_token_latency_seconds_count"] == {(): 5}, "times are not made up"


def test_phases_that_were_not_reached_have_no_times(toy_target: LoadedTarget) -> None:
    config = EngineConfig(max_prefill_tokens=4, kv_tokens=64, page_size=4)
    begin = time.perf_counter()
    engine = scripted_engine(toy_target, lambda r, d: r.token_ids[-1:] * d, 3, config, TraceConfig(metrics=True))
    for steps in range(6):  # withdrawn before the first forward, inside the prompt, between rounds
        engine.add_request("a", [7] * 8, SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        engine.abort("a")
    engine.close()
    wall = time.perf_counter() - begin
    assert engine.pipeline.metrics
    found = exposed(engine.pipeline.metrics.store)
    assert found["tiercel:requests_total"]["abort",] == 6
    counts = {"e2e_request_latency": 6, "request_queue_time": 5, "time_to_first_token": 4}
    for name, count in counts.items():
        assert found[f"tiercel:{name}_seconds_count"] == {(): count}
        assert 0 <= found[f"tiercel:{name}_seconds_sum"][()] <= wall
    assert found["tiercel:prompt_tokens_total"] == {(): 6 * 8}


def test_labels_stay_bounded_and_nothing_is_kept_of_ended_requests() -> None:
    sink = MetricsSink("made-up", VIEW)
    before = {name: len(series) for name, series in exposed(sink.store).items()}
    for number in range(500):
        name = f"req-{number}"
        if number % 3:
            sink.on_step(extend(0, 20, name))
            sink.on_step(decode(1, 32, part(0, 5, 3, number % 4, 1, name)))
        completion, rounds = (2, 1) if number % 3 else (0, 0)
        sink.on_request(
            ended(name, completion=completion, drafted=[3] * rounds, accepted=[number % 4] * rounds), IGNORED
        )
    assert {name: len(series) for name, series in exposed(sink.store).items()} == before
    assert sink._open == {}
    with pytest.raises(KeyError):
        sink.store.add(FAMILIES[5], labels=("3",))  # a position that the engine does not have
    with pytest.raises(ValueError, match="count down"):
        sink.store.add(FAMILIES[1], -1)


def test_every_scrape_shows_whole_steps() -> None:
    sink = MetricsSink("made-up", EngineView(num_steps=3, num_layers=2))
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            sink.on_step(decode(number, 32, part(number, 5 + 3 * number, 3, 2, 3)))
            number += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(30):
            found = numbers(sink.store.exposition()[0].decode())
            rounds = total(found, "tiercel:spec_decode_num_rounds_total")
            assert total(found, "tiercel:spec_decode_num_draft_tokens_total") == 3 * rounds
            assert total(found, "tiercel:spec_decode_num_accepted_tokens_per_pos_total") == 2 * rounds
            assert found.get("tiercel:spec_decode_stage_seconds_count", {})["other",] == rounds
    finally:
        stop.set()
        thread.join()


def sample_names(family: Family, name: str) -> set[str]:
    return {f"{name}_{end}" for end in ("bucket", "sum", "count")} if family.kind is Kind.HISTOGRAM else {name}


def test_everything_is_there_at_0_before_the_first_request() -> None:
    store = MetricsSink("made-up", VIEW, vllm_names=True).store
    found = exposed(store)
    for family in FAMILIES:
        if family.name.startswith("tiercel:trace_"):  # the pipeline's own, tested with it
            continue
        for name in (family.name, *([family.vllm] if family.vllm else [])):
            assert sample_names(family, name) <= set(found), name
    for name in ("accepted", "reached"):
        assert found[f"tiercel:spec_decode_num_{name}_tokens_per_pos_total"] == {("0",): 0, ("1",): 0, ("2",): 0}
    counters = {f.name for f in FAMILIES if f.kind is Kind.COUNTER}
    assert {v for name in counters & set(found) for v in found[name].values()} == {0}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_names_follow_the_rules_of_prometheus(family: Family) -> None:
    """The checks of ``promtool check metrics``, but for the colon, which sets namespaces apart as vLLM and SGLang do."""
    assert re.fullmatch(r"tiercel:[a-z][a-z0-9_]*", family.name)
    assert family.help
    assert family.help.endswith(".")
    assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
    assert not re.search(
        r"_(ms|msec|milliseconds?|micros|us|ns|minutes?|percent|gauge|counter|histogram)(_|$)", family.name
    )
    assert not family.name.endswith(("_bucket", "_count", "_sum"))
    if family.kind is Kind.HISTOGRAM:
        assert family.name.endswith("_seconds")
        assert list(family.buckets) == sorted(set(family.buckets))
        assert family.buckets[0] <= 0.001
    else:
        assert not family.buckets
    for label in family.labels:
        assert re.fullmatch(r"[a-z][a-z_]*", label)
        assert label not in ("le", "quantile", "job", "instance", "model_name")
    assert len(family.vllm_labels or family.labels) == len(family.labels)
    assert family.vllm is None or family.vllm.endswith("_total") == (family.kind is Kind.COUNTER)


def test_names_are_unique_and_the_types_are_exported() -> None:
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)
    parsed: dict[str, Metric] = {}
    for metric in families(MetricsSink("made-up", VIEW).store.exposition()[0].decode()):
        parsed[metric.name] = metric
    for family in FAMILIES:
        metric = parsed[family.name.removesuffix("_total")]
        assert (metric.type, metric.documentation) == (family.kind, family.help)
        for sample in metric.samples:
            assert set(sample.labels) - {"le"} == {"model_name", *family.labels}


def test_the_documentation_shows_the_table() -> None:
    assert markdown_table() in (DOCS / "metrics.md").read_text()


def test_vllm_names_carry_the_same_numbers_and_only_on_demand() -> None:
    def count(*, vllm_names: bool) -> MetricStore:
        sink = MetricsSink("made-up", VIEW, vllm_names=vllm_names)
        sink.on_step(extend(0, 20))
        sink.on_step(decode(1, 32, part(0, 5, 3, 2, 3)))
        sink.on_request(ended(completion=4, drafted=[3], accepted=[2]), IGNORED)
        return sink.store

    assert not any(name.startswith("vllm:") for name in exposed(count(vllm_names=False)))
    store = count(vllm_names=True)
    found = exposed(store)
    for family in FAMILIES:
        if family.vllm:
            for own, theirs in zip(
                sorted(sample_names(family, family.name)), sorted(sample_names(family, family.vllm)), strict=True
            ):
                assert found[own] == found[theirs]
    samples = [s for f in families(store.exposition()[0].decode()) for s in f.samples if s.name.startswith("vllm:")]
    assert {(s.labels["model_name"], s.labels["engine"]) for s in samples} == {("made-up", "0")}
    (reason,) = {k for s in samples if s.name == "vllm:request_success_total" for k in s.labels} - {
        "model_name",
        "engine",
    }
    assert reason == "finished_reason"
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == {("0",): 1, ("1",): 1, ("2",): 0}


def test_the_port_shows_the_metrics_until_the_end(toy_target: LoadedTarget) -> None:
    engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3, trace=TraceConfig(metrics_port=0))
    engine.add_request("a", [7, 30], SamplingParams(max_tokens=9, ignore_eos=True))
    run(engine)
    assert engine.pipeline.drain()
    assert engine.pipeline.metrics
    port = engine.pipeline.metrics.port
    # What Prometheus 2 asks with. The colons must come through: client_python#1177.
    wishes = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=wishes)) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        found = numbers(answer.read().decode())
    assert found["tiercel:generation_tokens_total"] == {(): 9}
    assert found["tiercel:requests_running"] == {(): 0}
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(str(port))))
    assert exposed(engine.pipeline.metrics.store)["tiercel:generation_tokens_total"] == {(): 9}


def test_a_port_in_use_is_one_clear_line(toy_target: LoadedTarget) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port} .*choose another") as raised:
            scripted_engine(toy_target, lambda r, d: [], 0, trace=TraceConfig(metrics_port=port))
    assert "\n" not in str(raised.value)


def test_a_port_is_given_back_when_something_else_cannot_open(toy_target: LoadedTarget, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trace = TraceConfig(metrics_port=port, enable_trace=True, otlp_file=tmp_path / "file" / "spans.jsonl")
    with pytest.raises(UserError, match="OTLP file"):
        scripted_engine(toy_target, lambda r, d: [], 0, trace=trace)
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"metrics_port": 70000}, "metrics_port=70000"),
        ({"metrics_port": -1}, "metrics_port=-1"),
        ({"metrics_vllm_names": True}, "metrics are off"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        TraceConfig(**settings)  # type: ignore[arg-type]


def test_metrics_are_off_unless_asked_for(toy_target: LoadedTarget) -> None:
    with LLM(target=toy_target, spec=SpecConfig(method="none")) as llm:
        assert llm.engine.pipeline.metrics is None
        with pytest.raises(UserError, match=r"TraceConfig\(metrics=True\)"):
            llm.metrics_text()
