"""One round, one count: response, spans, records and Prometheus counters agree number for number, however requests end.

The counts are taken from what the engine delivered, token by token, never from one of the four.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.observability.exposed import Numbers, exposed, numbers, total
from tests.scripted import run as play_out
from tests.scripted import scripted_engine
from tiercel.core.batch import StepRecord
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.request import Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.observability.metrics import EngineView, MetricsSink
from tiercel.observability.records import RequestRecord, read_requests, read_rounds
from tiercel.observability.req_time_stats import ReqTimeStats
from tiercel.observability.trace import set_global_trace_level

K = 3
SMALL = EngineConfig(max_prefill_tokens=8, kv_tokens=64, page_size=4)
"""A pool in which several requests preempt each other, and one alone can be too large."""
PER_POS = "tiercel:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class Wish:
    prompt: int
    max_tokens: int
    abort_at: int | None = None
    ignore_eos: bool = True


@dataclass
class Run:
    """What a run said, in every way it can."""

    responses: dict[str, RequestRecord] = field(default_factory=dict)
    delivered: dict[str, list[int]] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    metrics: Numbers = field(default_factory=dict)


def ask(engine: Engine, wishes: list[Wish], seed: int) -> list[Request]:
    return [
        engine.add_request(
            str(index),
            [7 + index] * wish.prompt,
            SamplingParams(max_tokens=wish.max_tokens, temperature=0.8, seed=seed + index, ignore_eos=wish.ignore_eos),
        )
        for index, wish in enumerate(wishes)
    ]


def play(target: LoadedTarget, wishes: list[Wish], seed: int, folder: Path) -> Run:
    """Drafts of random depth, most of them what plain decoding says."""
    plain = scripted_engine(target, lambda req, depth: [], 0)
    truth = ask(plain, wishes, seed)
    play_out(plain)
    generator = random.Random(seed)

    def propose(req: Request, depth: int) -> list[int]:
        right = truth[int(req.request_id)].output_token_ids[len(req.output_token_ids) :]
        return [token if generator.random() < 0.7 else 5 for token in right[: generator.randint(0, depth)]]

    trace = TraceConfig(
        enable_trace=True, otlp_file=folder / "spans.jsonl", records_out=folder / "records", metrics=True
    )
    engine = scripted_engine(target, propose, K, SMALL, trace)
    run = Run()
    run.delivered = {req.request_id: [] for req in ask(engine, wishes, seed)}
    for step in range(400):
        for index, wish in enumerate(wishes):
            if wish.abort_at == step and (record := engine.abort(str(index))):
                run.responses[str(index)] = record
        if not engine.has_work:
            break
        take(engine, run)
    assert not engine.has_work
    engine.close()
    read_back(engine, run, folder)
    return run


def take(engine: Engine, run: Run) -> None:
    for output in engine.step():
        name = output.request.request_id
        run.delivered[name] += output.token_ids
        if output.record:
            run.responses[name] = output.record


def read_back(engine: Engine, run: Run, folder: Path) -> None:
    assert engine.pipeline.metrics
    run.metrics = exposed(engine.pipeline.metrics.store)
    run.requests = {record.request_id: record for record in read_requests(folder / "records")}
    run.steps = list(read_rounds(folder / "records")) if any((folder / "records").glob("rounds*")) else []
    for line in (folder / "spans.jsonl").read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            run.spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    def plain(value: dict[str, Any]) -> Any:
        ((kind, inner),) = value.items()
        if kind == "arrayValue":
            return [plain(v) for v in inner.get("values", [])]
        return int(inner) if kind == "intValue" else inner

    return {a["key"]: plain(a["value"]) for a in span["attributes"]}


def check(run: Run) -> None:
    assert set(run.requests) == set(run.responses) == set(run.delivered)
    roots = {attributes(s)["gen_ai.response.id"]: s for s in run.spans if s["name"].startswith("chat ")}
    assert len(roots) == sum(s["name"].startswith("chat ") for s in run.spans) == len(run.responses)
    for name, response in run.responses.items():
        assert run.requests[name] == response
        check_request(name, run, response, roots[name])
    check_metrics(run)


def check_request(name: str, run: Run, response: RequestRecord, root: dict[str, Any]) -> None:
    spec, delivered = response.spec, run.delivered[name]
    rounds = [r for s in run.steps for r in s.rounds if r.request_id == name]
    assert list(response.token_ids) == delivered
    assert response.completion_tokens == len(delivered)
    counts = {
        "num_spec_steps": len(rounds),
        "num_draft_tokens": sum(len(r.draft_token_ids) for r in rounds),
        "num_accepted_draft_tokens": sum(r.num_correct_drafts for r in rounds),
        "num_emitted_tokens": max(len(delivered) - 1, 0),
    }
    assert {key: spec[key] for key in counts} == counts
    assert spec["per_step_accepted"] == [r.num_correct_drafts for r in rounds]
    assert sum(spec["acceptance_histogram"]) == len(rounds)
    said = attributes(root)
    assert said["tiercel.spec.num_rounds"] == counts["num_spec_steps"]
    assert said["tiercel.spec.num_draft_tokens"] == counts["num_draft_tokens"]
    assert said["tiercel.spec.num_correct_drafts"] == counts["num_accepted_draft_tokens"]
    assert said["tiercel.spec.num_emitted_tokens"] == counts["num_emitted_tokens"]
    assert said["tiercel.spec.acceptance_histogram"] == spec["acceptance_histogram"]
    assert said["gen_ai.usage.output_tokens"] == len(delivered)
    assert said["finish_reason"] == response.finish_reason
    verifies = [attributes(s) for s in run.spans if s["traceId"] == root["traceId"] and s["name"] == "spec_verify"]
    assert [(v["round"], v["num_correct_drafts"], v["num_draft_tokens"], v["emitted_tokens"]) for v in verifies] == [
        (r.round, r.num_correct_drafts, len(r.draft_token_ids), r.num_emitted_tokens) for r in rounds
    ]


def check_metrics(run: Run) -> None:
    check_sums(run.metrics, list(run.responses.values()))
    found = run.metrics
    assert found["tiercel:spec_decode_stage_seconds_count"]["verify",] == sum(bool(s.rounds) for s in run.steps)
    with_first = [r for r in run.responses.values() if r.time_to_first_token_ms is not None]
    assert found["tiercel:time_to_first_token_seconds_count"] == {(): len(with_first)}
    assert found["tiercel:inter_token_latency_seconds_count"] == {
        (): sum(max(len(tokens) - 1, 0) for tokens in run.delivered.values())
    }
    assert found["tiercel:requests_running"] == found["tiercel:requests_waiting"] == {(): 0}
    assert found["tiercel:kv_slots_used"] == {(): 0}
    assert total(found, "tiercel:trace_spans_exported_total") == len(run.spans)
    assert total(found, "tiercel:trace_items_dropped_total") == 0
    assert total(found, "tiercel:trace_sink_failures_total") == 0


def check_sums(found: Numbers, ended: list[RequestRecord]) -> None:
    """Counters against what the requests' own responses add up to."""
    specs = [record.spec for record in ended]
    drafted = [d for spec in specs for d in spec["per_step_drafted"]]
    accepted = [a for spec in specs for a in spec["per_step_accepted"]]
    rounds = list(zip(drafted, accepted, strict=True))
    counters: dict[str, float] = {
        "spec_decode_num_rounds_total": sum(spec["num_spec_steps"] for spec in specs),
        "spec_decode_num_drafts_total": sum(d > 0 for d in drafted),
        "spec_decode_num_draft_tokens_total": sum(spec["num_draft_tokens"] for spec in specs),
        "spec_decode_num_accepted_tokens_total": sum(spec["num_accepted_draft_tokens"] for spec in specs),
        "spec_decode_emitted_tokens_total": sum(spec["num_emitted_tokens"] for spec in specs),
        "generation_tokens_total": sum(record.completion_tokens for record in ended),
        "prompt_tokens_total": sum(record.prompt_tokens for record in ended),
        "preemptions_total": sum(record.num_preemptions for record in ended),
        "requests_total": len(ended),
    }
    assert {name: total(found, f"tiercel:{name}") for name in counters} == counters
    reached = "tiercel:spec_decode_num_reached_tokens_per_pos_total"
    assert found[PER_POS] == {(str(i),): sum(a > i for a in accepted) for i in range(K)}
    assert found[reached] == {(str(i),): sum(d > i and a >= i for d, a in rounds) for i in range(K)}
    for record in ended:
        assert found["tiercel:requests_total"][record.finish_reason,] == sum(
            other.finish_reason == record.finish_reason for other in ended
        )
    by_position = [found[PER_POS][str(i),] for i in range(K)]
    assert all(before >= after for before, after in pairwise(by_position))


def test_every_way_to_end(toy_target: LoadedTarget, tmp_path: Path) -> None:
    wishes = [
        Wish(prompt=6, max_tokens=30, ignore_eos=False),
        Wish(prompt=4, max_tokens=30),
        Wish(prompt=20, max_tokens=12, abort_at=2),  # inside its prompt
        Wish(prompt=5, max_tokens=40, abort_at=9),  # between rounds
        Wish(prompt=5, max_tokens=40, abort_at=0),  # before its first forward
        Wish(prompt=30, max_tokens=60),  # too large for the pool
        Wish(prompt=3, max_tokens=1),
    ]
    run = play(toy_target, wishes, 1, tmp_path)
    check(run)
    reasons = {record.finish_reason for record in run.responses.values()}
    assert reasons == {"stop", "length", "abort", "error"}
    assert sum(record.num_preemptions for record in run.responses.values()) > 0
    accepted = [a for record in run.responses.values() for a in record.spec["per_step_accepted"]]
    assert min(accepted) == 0
    assert max(accepted) >= 2


WISHES = st.lists(
    st.builds(
        Wish,
        prompt=st.integers(1, 24),
        max_tokens=st.integers(1, 40),
        abort_at=st.none() | st.integers(0, 30),
        ignore_eos=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wishes=WISHES, seed=st.integers(0, 2**20))
def test_any_history(toy_target: LoadedTarget, wishes: list[Wish], seed: int) -> None:
    set_global_trace_level(0)
    with TemporaryDirectory() as folder:
        check(play(toy_target, wishes, seed, Path(folder)))


@pytest.fixture(scope="module")
def long_run(toy_target: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    wishes = [Wish(6, 30), Wish(4, 25), Wish(9, 40, abort_at=12), Wish(5, 40, abort_at=0)]
    yield play(toy_target, wishes, 5, tmp_path_factory.mktemp("long"))
    set_global_trace_level(0)


@settings(max_examples=40, deadline=None)
@given(lost=st.sets(st.integers(0, 80)))
def test_counters_are_exact_whatever_steps_were_dropped(long_run: Run, lost: set[int]) -> None:
    sink = MetricsSink("toy", EngineView("scripted", K))
    stats = ReqTimeStats("ignored", lambda mark: None)
    last = {part.request_id: s.step for s in long_run.steps for part in (*s.extends, *s.rounds)}
    ended: list[RequestRecord] = []
    for name in set(long_run.requests) - set(last):  # never came to a step
        ended.append(long_run.requests[name])
        sink.on_request(ended[-1], stats)
    for step in long_run.steps:
        if step.step not in lost:
            sink.on_step(step)
        for name in [name for name, number in last.items() if number == step.step]:
            ended.append(long_run.requests[name])
            sink.on_request(ended[-1], stats)
    check_sums(exposed(sink.store), list(long_run.requests.values()))
    waited = exposed(sink.store)["tiercel:inter_token_latency_seconds_count"][()]
    assert waited <= sum(max(record.completion_tokens - 1, 0) for record in ended)


def test_the_librarys_answers_carry_the_same_numbers(toy_target: LoadedTarget, toy_draft: Path) -> None:
    spec = SpecConfig(draft=str(toy_draft), num_steps=K, ngram_match=0)
    with LLM(target=toy_target, spec=spec, trace=TraceConfig(metrics=True)) as llm:
        outputs = llm.generate([[7, 30, 99], [5] * 9], SamplingParams(max_tokens=20, ignore_eos=True))
        found = numbers(llm.metrics_text())
    answers = [output.to_json() for output in outputs]
    specs = [answer["metrics"]["speculative_decoding"] for answer in answers]
    usage = [answer["usage"] for answer in answers]
    for counter, key in (
        ("num_rounds", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert total(found, f"tiercel:spec_decode_{counter}_total") == sum(spec[key] for spec in specs)
    assert found["tiercel:generation_tokens_total"] == {(): sum(u["completion_tokens"] for u in usage)}
    assert found["tiercel:prompt_tokens_total"] == {(): sum(u["prompt_tokens"] for u in usage)}
    assert found["tiercel:spec_decode_layer_seconds_count"].keys() == {("0",), ("1",), ("2",)}
    stage_s = {labels[0]: value for labels, value in found["tiercel:spec_decode_stage_seconds_sum"].items()}
    assert stage_s["verify"] == pytest.approx(max(spec["stage_time_ms"]["verify"] for spec in specs) / 1e3)
