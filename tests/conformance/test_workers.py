"""Every registered worker: hooks in order and closed, counts that add up, greedy output equal to plain decoding."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.conformance.conftest import Drafts
from tiercel.core.config import SPEC_METHODS, TREE_METHODS, EngineConfig, SpecConfig, TraceConfig
from tiercel.core.request import Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.device.parallel import TensorParallelGroup, current_tp_group
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.observability import req_time_stats
from tiercel.observability.records import read_requests, read_rounds
from tiercel.observability.req_time_stats import ReqTimeStats
from tiercel.speculative.registry import WORKERS

PROMPTS = {"a": [7, 30, 99, 12], "b": [90], "c": [5] * 30}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
TREES = [f"{method}-tree" for method in TREE_METHODS]
DRAFT_MODELS = [method for method in sorted(WORKERS) if method not in ("none", "ngram")]
BORN_IN_THE_ROUND = ("ngram", "standalone", "standalone-tree")
"""Their drafts were not begun by a draft extend."""
STAGES = [
    "set_spec_draft_start_time",
    "set_spec_draft_end_time",
    "set_spec_verify_start_time",
    "set_spec_verify_end_time",
    "set_spec_draft_extend_start_time",
    "set_spec_draft_extend_end_time",
]


@pytest.fixture(scope="module", params=["toy_modules", "toy_native"])
def toy_target(request: pytest.FixtureRequest) -> LoadedTarget:
    """Every test here runs on modules and on recorded steps."""
    target: LoadedTarget = request.getfixturevalue(request.param)
    return target


def test_every_worker_can_be_asked_for_and_no_other() -> None:
    assert set(WORKERS) == set(SPEC_METHODS)


@pytest.mark.parametrize("method", [*DRAFT_MODELS, *TREES])
def test_some_drafts_are_right_and_some_are_wrong(method: str, toy_target: LoadedTarget, drafts: Drafts) -> None:
    reqs = finish(make_engine(method, toy_target, drafts, TraceConfig()))
    rounds = [c for req in reqs.values() for c in req.spec.correct]
    assert min(rounds) == 0
    assert max(rounds) >= 2


@pytest.fixture(params=[*sorted(WORKERS), *TREES])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0, 1, 2, 3], ids="level{}".format)
def level(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def make_engine(
    method: str, target: LoadedTarget, drafts: Drafts, trace: TraceConfig, exporter: InMemorySpanExporter | None = None
) -> Engine:
    topk = 2 if method.endswith("-tree") else 1
    method = method.removesuffix("-tree")
    draft = drafts.get(method, "auto")
    spec = SpecConfig(method=method, topk=topk, draft=draft, max_verify_rows=64, min_confidence=0)
    return Engine(EngineConfig(max_prefill_tokens=16), spec, trace, target, [exporter] if exporter else [])


def finish(engine: Engine) -> dict[str, Request]:
    reqs = {name: engine.add_request(name, prompt, GREEDY) for name, prompt in PROMPTS.items()}
    while engine.has_work:
        engine.step()
    engine.close()
    return reqs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Setter calls per request, caught at the one door all marks go through."""
    seen: dict[str, list[str]] = defaultdict(list)
    real = req_time_stats.Mark

    def mark(method: str, ts_ns: int, requests: tuple[ReqTimeStats, ...], attrs: dict[str, Any] | None = None) -> Any:
        for one in requests:
            seen[one.request_id].append(method)
        return real(method, ts_ns, requests, attrs)

    monkeypatch.setattr(req_time_stats, "Mark", mark)
    return seen


def test_output_equals_plain_decoding_with_tracing_off_and_on(
    method: str, level: int, toy_target: LoadedTarget, drafts: Drafts
) -> None:
    plain = finish(make_engine("none", toy_target, drafts, TraceConfig()))
    traced = TraceConfig(enable_trace=level > 0, trace_level=level)
    reqs = finish(make_engine(method, toy_target, drafts, traced))
    assert {n: r.output_token_ids for n, r in reqs.items()} == {n: r.output_token_ids for n, r in plain.items()}
    for req in reqs.values():
        assert sum(req.spec.emitted) == len(req.output_token_ids) - 1
        assert sum(req.spec.histogram(req.spec.max_depth)) == req.spec.num_rounds
        assert all(0 <= c <= p for p, c in zip(req.spec.proposed, req.spec.correct, strict=True))


def test_hooks_come_in_order_and_every_stage_is_closed(
    method: str, toy_target: LoadedTarget, drafts: Drafts, calls: dict[str, list[str]]
) -> None:
    reqs = finish(make_engine(method, toy_target, drafts, TraceConfig(enable_trace=True)))
    for name, req in reqs.items():
        rounds = req.spec.num_rounds
        # The last round ends the request: nothing is drafted after it.
        assert calls[name] == STAGES * (rounds - 1) + STAGES[:4]


def test_with_tracing_off_no_mark_is_made(
    method: str, toy_target: LoadedTarget, drafts: Drafts, calls: dict[str, list[str]]
) -> None:
    finish(make_engine(method, toy_target, drafts, TraceConfig()))
    assert calls == {}


def spans_of(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    spans = [s for s in exporter.get_finished_spans() if s.name != "batch_step"]  # a trace of its own
    names = {s.context.trace_id: str(s.attributes["gen_ai.response.id"]) for s in spans if s.name.startswith("chat ")}
    by_request = defaultdict(list)
    for span in spans:
        by_request[names[span.context.trace_id]].append(span)
    return by_request


def test_spans_of_every_round(method: str, level: int, toy_target: LoadedTarget, drafts: Drafts) -> None:
    exporter = InMemorySpanExporter()
    traced = TraceConfig(enable_trace=level > 0, trace_level=level)
    reqs = finish(make_engine(method, toy_target, drafts, traced, exporter))
    if level == 0:
        assert exporter.get_finished_spans() == ()
        return
    for name, spans in spans_of(exporter).items():
        req, rounds = reqs[name], reqs[name].spec.num_rounds
        found = defaultdict(list)
        for span in spans:
            found[span.name.split(" ")[0]].append(span)
            assert span.start_time <= span.end_time
        assert {n: len(found[n]) for n in ("chat", "prefill_waiting", "prefill_forward", "decode_forward")} == {
            "chat": 1, "prefill_waiting": 1, "prefill_forward": 1, "decode_forward": 1,
        }  # fmt: skip
        assert len(found["spec_draft"]) == len(found["spec_verify"]) == (rounds if level >= 2 else 0)
        assert len(found["spec_draft_extend"]) == (rounds - 1 if level >= 3 else 0)
        if level >= 3 and "eagle" in method:
            assert len(found["spec_draft_layer"]) > 0
        else:
            assert found["spec_draft_layer"] == []
        verify = sorted(found["spec_verify"], key=lambda s: s.start_time)
        for attribute, expected in (
            ("num_correct_drafts", req.spec.correct),
            ("accepted_tokens", req.spec.correct),
            ("num_draft_tokens", req.spec.proposed),
            ("emitted_tokens", req.spec.emitted),
            ("round", list(range(rounds))),
        ):
            assert [s.attributes[attribute] for s in verify] == (expected if level >= 2 else [])
        root, decode = found["chat"][0], found["decode_forward"][0]
        assert root.attributes["tiercel.spec.num_correct_drafts"] == sum(req.spec.correct)
        assert root.attributes["tiercel.spec.num_emitted_tokens"] == sum(req.spec.emitted)
        for span in spans:
            if span is not root:
                parent = decode if span.name.startswith("spec_") else root
                assert span.parent.span_id == parent.context.span_id
                assert root.start_time <= span.start_time
                assert span.end_time <= root.end_time


def test_records_carry_the_same_numbers(method: str, toy_target: LoadedTarget, drafts: Drafts, tmp_path: Path) -> None:
    trace = TraceConfig(records_out=tmp_path / "records", trace_out=tmp_path / "trace.json")
    reqs = finish(make_engine(method, toy_target, drafts, trace))
    records = {r.request_id: r for r in read_requests(tmp_path / "records" / "requests.jsonl")}
    steps = list(read_rounds(tmp_path / "records" / "rounds.jsonl"))
    for name, req in reqs.items():
        assert records[name].spec == req.spec.to_metrics(records[name].num_steps, detailed=True)
        assert list(records[name].token_ids) == req.output_token_ids
        mine = [r for s in steps for r in s.rounds if r.request_id == name]
        assert [r.num_correct_drafts for r in mine] == req.spec.correct
        assert [len(r.draft_token_ids) for r in mine] == req.spec.proposed
        assert [r.num_emitted_tokens for r in mine] == req.spec.emitted
        rebuilt = []
        for done in mine:
            committed = [*done.draft_token_ids[: done.num_correct_drafts], done.bonus_token_id]
            rebuilt += committed[: done.num_emitted_tokens]
        assert [req.output_token_ids[0], *rebuilt] == req.output_token_ids
        for done in mine:
            assert (done.born_step is None) == (not done.draft_token_ids or method in BORN_IN_THE_ROUND)
    for step in steps:
        marks = [step.start_ns, step.draft_start_ns, step.draft_end_ns, step.verify_start_ns, step.verify_end_ns]
        marks += [step.draft_extend_start_ns, *step.layer_end_ns, step.draft_extend_end_ns, step.end_ns]
        assert marks == sorted(marks)
        assert sum(step.stage_ns.values()) == step.end_ns - step.start_ns
    json.loads((tmp_path / "trace.json").read_text())


def test_drafts_run_inside_the_draft_group(method: str, toy_target: LoadedTarget, drafts: Drafts) -> None:
    engine = make_engine(method, toy_target, drafts, TraceConfig())
    worker = engine.worker
    group = TensorParallelGroup()
    worker.draft_tp_group = group
    inside: dict[str, list[bool]] = defaultdict(list)

    def watched(name: str) -> None:
        real = getattr(worker, name)

        def call(*args: Any) -> Any:
            inside[name].append(current_tp_group() is group)
            return real(*args)

        setattr(worker, name, call)

    for name in ("draft", "draft_extend", "verify"):
        watched(name)
    finish(engine)
    assert all(inside["draft"])
    assert all(inside["draft_extend"])
    assert not any(inside["verify"])
    assert inside["draft"]
    assert inside["verify"]
