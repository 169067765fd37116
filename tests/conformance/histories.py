"""Histories of requests played through an engine, and what must hold of everything that it says about them.

The counts are taken from what the engine delivered, token by token, never from one of its own reports.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.observability.exposed import Numbers, exposed, total
from tests.scripted import scripted_engine
from tiercel.core.batch import StepRecord
from tiercel.core.config import EngineConfig, TraceConfig
from tiercel.core.request import Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.observability.records import RequestRecord, read_requests, read_rounds

K = 3
PER_POS = "tiercel:spec_decode_num_accepted_tokens_per_pos_total"
REACHED = "tiercel:spec_decode_num_reached_tokens_per_pos_total"
SMALL = EngineConfig(max_prefill_tokens=8, kv_tokens=64, page_size=4)
"""A pool in which several requests preempt each other, and one alone can be too large."""
MakeEngine = Callable[[EngineConfig, TraceConfig], Engine]


@dataclass(frozen=True)
class Wish:
    """One request. ``abort_at``: before which step it is withdrawn; ``stop_at``: which of its tokens is an end token."""

    prompt: list[int]
    max_tokens: int
    abort_at: int | None = None
    stop_at: int | None = None
    is_greedy: bool = False


@dataclass(frozen=True)
class History:
    """Requests that come together, the seed of their sampling, and what runs."""

    wishes: list[Wish]
    seed: int = 1
    config: EngineConfig = SMALL


@dataclass
class Run:
    """What a run said, in every way it can."""

    num_steps: int
    truth: dict[str, list[int]]
    delivered: dict[str, list[int]]
    responses: dict[str, RequestRecord] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    metrics: Numbers = field(default_factory=dict)


HISTORIES = st.builds(
    History,
    wishes=st.lists(
        st.builds(
            Wish,
            # Few tokens, so that texts repeat themselves and prompt lookup finds something.
            prompt=st.lists(st.integers(5, 8), min_size=1, max_size=24),
            max_tokens=st.integers(1, 40),
            abort_at=st.none() | st.integers(0, 30),
            stop_at=st.none() | st.integers(0, 30),
            is_greedy=st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**20),
    config=st.builds(
        EngineConfig,
        max_prefill_tokens=st.integers(4, 16),
        kv_tokens=st.integers(8, 30).map(lambda pages: 4 * pages),
        page_size=st.just(4),
        max_batch_size=st.integers(1, 5),
    ),
)


def ask(engine: Engine, history: History, truth: dict[str, list[int]] | None = None) -> list[Request]:
    reqs = []
    for index, wish in enumerate(history.wishes):
        temperature = 0.0 if wish.is_greedy else 0.8
        sampling = SamplingParams(wish.max_tokens, temperature, seed=history.seed + index, ignore_eos=truth is None)
        req = engine.add_request(str(index), wish.prompt, sampling)
        if truth is not None:
            ends = [] if wish.stop_at is None else truth[str(index)][wish.stop_at : wish.stop_at + 1]
            req.eos_token_ids = frozenset(ends)
        reqs.append(req)
    return reqs


def plain_answers(target: LoadedTarget, history: History) -> dict[str, list[int]]:
    """What plain decoding says, without any of the history's stops, aborts and preemptions."""
    plain = scripted_engine(target, lambda req, depth: [], 0)
    reqs = ask(plain, history)
    while plain.has_work:
        plain.step()
    return {req.request_id: req.output_token_ids for req in reqs}


def scripted(target: LoadedTarget, history: History) -> MakeEngine:
    """Drafts of random depth, most of them what plain decoding says: every accept pattern."""
    truth, generator = plain_answers(target, history), random.Random(history.seed)

    def propose(req: Request, depth: int) -> list[int]:
        right = truth[req.request_id][len(req.output_token_ids) :]
        return [token if generator.random() < 0.7 else 5 for token in right[: generator.randint(0, depth)]]

    return lambda config, trace: scripted_engine(target, propose, K, config, trace)


def play(
    make: MakeEngine,
    target: LoadedTarget,
    history: History,
    folder: Path,
    watch: Callable[[Engine], None] = lambda _: None,
) -> Run:
    """Play a history with everything recorded; ``watch`` is shown the engine before its first request."""
    trace = TraceConfig(
        enable_trace=True, otlp_file=folder / "spans.jsonl", records_out=folder / "records", metrics=True
    )
    truth = plain_answers(target, history)
    engine = make(history.config, trace)
    try:
        check_start(engine)
        watch(engine)
        run = Run(engine.worker.num_steps, truth, {req.request_id: [] for req in ask(engine, history, truth)})
        for step in range(400):
            for index, wish in enumerate(history.wishes):
                if wish.abort_at == step and (record := engine.abort(str(index))):
                    run.responses[str(index)] = record
            if not engine.has_work:
                break
            take(engine, run)
        assert not engine.has_work
        engine.close()
    finally:
        engine.pipeline.close()
    read_back(engine, run, folder)
    return run


def check_start(engine: Engine) -> None:
    """Series by position are there before the first request, at 0."""
    assert engine.pipeline.metrics
    found = exposed(engine.pipeline.metrics.store)
    for name in (PER_POS, REACHED):
        assert found.get(name, {}) == {(str(position),): 0 for position in range(engine.worker.num_steps)}


def take(engine: Engine, run: Run) -> None:
    for output in engine.step():
        name = output.request.request_id
        run.delivered[name] += output.token_ids
        if output.record:
            assert name not in run.responses
            run.responses[name] = output.record
    engine.kv.check()


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


def check(run: Run, history: History) -> None:
    assert set(run.requests) == set(run.responses) == set(run.delivered)
    roots = {attributes(s)["gen_ai.response.id"]: s for s in run.spans if s["name"].startswith("chat ")}
    assert len(roots) == sum(s["name"].startswith("chat ") for s in run.spans) == len(run.responses)
    for index, wish in enumerate(history.wishes):
        name = str(index)
        assert run.requests[name] == run.responses[name]
        check_answer(run, name, wish)
        check_counts(run, name)
        check_spans(run, name, roots[name])
    check_metrics(run)


def check_answer(run: Run, name: str, wish: Wish) -> None:
    """What was delivered is what plain decoding says, up to where it had to end."""
    response, delivered, truth = run.responses[name], run.delivered[name], run.truth[name]
    assert delivered == truth[: len(delivered)]
    stop = truth[wish.stop_at] if wish.stop_at is not None and wish.stop_at < len(truth) else None
    assert stop not in delivered[:-1]
    ended_by_token = bool(delivered) and delivered[-1] == stop
    assert ended_by_token == (response.finish_reason == "stop")
    if response.finish_reason == "length":
        assert len(delivered) == wish.max_tokens
    if response.finish_reason == "abort":
        assert wish.abort_at is not None
    assert (response.finish_reason == "error") == (response.error is not None)


def check_counts(run: Run, name: str) -> None:
    """The invariants of docs/design.md, and the response against the records of the rounds."""
    response, delivered = run.responses[name], run.delivered[name]
    spec, rounds = response.spec, [r for s in run.steps for r in s.rounds if r.request_id == name]
    assert list(response.token_ids) == delivered
    assert response.completion_tokens == len(delivered)
    assert [r.round for r in rounds] == list(range(len(rounds)))
    committed: list[int] = delivered[:1]
    for done in rounds:
        assert 0 <= done.num_correct_drafts <= len(done.draft_token_ids) <= run.num_steps
        assert 1 <= done.num_emitted_tokens <= done.num_correct_drafts + 1
        assert len(done.draft_layers) == len(done.draft_token_ids)
        assert done.context_len == response.prompt_tokens + len(committed)
        chain = [*done.draft_token_ids[: done.num_correct_drafts], done.bonus_token_id]
        committed += chain[: done.num_emitted_tokens]
    assert committed == delivered
    counts = {
        "num_spec_steps": len(rounds),
        "num_draft_tokens": sum(len(r.draft_token_ids) for r in rounds),
        "num_accepted_draft_tokens": sum(r.num_correct_drafts for r in rounds),
        "num_emitted_tokens": max(len(delivered) - 1, 0),
    }
    assert {key: spec[key] for key in counts} == counts
    assert spec["per_step_accepted"] == [r.num_correct_drafts for r in rounds]
    assert spec["per_step_drafted"] == [len(r.draft_token_ids) for r in rounds]
    assert sum(spec["acceptance_histogram"]) == len(rounds)
    mine = [s.stage_ns for s in run.steps if any(r.request_id == name for r in s.rounds)]
    for stage, ms in spec["stage_time_ms"].items():
        assert abs(ms - sum(ns[stage] for ns in mine) / 1e6) < 1e-6
    if response.time_to_first_token_ms is not None:
        assert response.queue_ms is not None
        assert 0 <= response.queue_ms <= response.time_to_first_token_ms <= response.e2e_ms
    assert (response.time_to_first_token_ms is not None) == bool(delivered)


def check_spans(run: Run, name: str, root: dict[str, Any]) -> None:
    response, spec, said = run.responses[name], run.responses[name].spec, attributes(root)
    for key, number in (
        ("num_rounds", spec["num_spec_steps"]),
        ("num_draft_tokens", spec["num_draft_tokens"]),
        ("num_correct_drafts", spec["num_accepted_draft_tokens"]),
        ("num_emitted_tokens", spec["num_emitted_tokens"]),
        ("acceptance_histogram", spec["acceptance_histogram"]),
    ):
        assert said[f"tiercel.spec.{key}"] == number
    assert said["gen_ai.usage.output_tokens"] == len(run.delivered[name])
    assert said["finish_reason"] == response.finish_reason
    assert len([e for e in root.get("events", []) if e["name"] == "retract"]) == response.num_preemptions
    mine = [s for s in run.spans if s["traceId"] == root["traceId"]]
    phases = [s["name"] for s in mine if s["name"].startswith(("prefill_", "decode_"))]
    assert "prefill_waiting" in phases
    assert ("prefill_forward" in phases) == (response.queue_ms is not None)
    assert ("decode_forward" in phases) == bool(spec["num_spec_steps"])
    assert len(phases) == len(set(phases))
    rounds = [(s, r) for s in run.steps for r in s.rounds if r.request_id == name]
    verifies = [attributes(s) for s in mine if s["name"] == "spec_verify"]
    assert [(v["round"], v["num_correct_drafts"], v["num_draft_tokens"], v["emitted_tokens"]) for v in verifies] == [
        (r.round, r.num_correct_drafts, len(r.draft_token_ids), r.num_emitted_tokens) for _, r in rounds
    ]
    for stage, count in (("draft", len(rounds)), ("verify", len(rounds)), ("draft_extend", None)):
        found = {attributes(s)["round"]: s for s in mine if s["name"] == f"spec_{stage}"}
        assert count is None or len(found) == count
        for step, done in rounds:
            if span := found.get(done.round):
                took = int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
                assert took == step.stage_ns[stage], "spans and records time the same moments"
    for span in mine:
        assert int(root["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(root["endTimeUnixNano"])


def check_metrics(run: Run) -> None:
    check_sums(run.metrics, list(run.responses.values()), run.num_steps)
    found = run.metrics
    decodes = [s for s in run.steps if s.mode == "decode"]
    for stage in ("draft", "verify", "draft_extend", "other"):
        assert found["tiercel:spec_decode_stage_seconds_count"][stage,] == len(decodes)
        spent = sum(s.stage_ns[stage] for s in decodes) / 1e9
        assert abs(found["tiercel:spec_decode_stage_seconds_sum"][stage,] - spent) < 1e-9
    assert found["tiercel:prefill_step_seconds_count"] == {(): len(run.steps) - len(decodes)}
    with_first = [r for r in run.responses.values() if r.time_to_first_token_ms is not None]
    assert found["tiercel:time_to_first_token_seconds_count"] == {(): len(with_first)}
    assert found["tiercel:inter_token_latency_seconds_count"] == {
        (): sum(max(len(tokens) - 1, 0) for tokens in run.delivered.values())
    }
    rounds = [r for s in run.steps for r in s.rounds]
    for drafter, is_theirs in (
        ("layers", lambda r: r.draft_layers and r.draft_layers[0] >= 0),
        ("lookup", lambda r: r.draft_layers and r.draft_layers[0] < 0),
        ("plain", lambda r: not r.draft_layers),
        ("unknown", lambda r: False),
    ):
        theirs = [r for r in rounds if is_theirs(r)]
        by_drafter = "tiercel:spec_decode_drafter_"
        assert found[f"{by_drafter}rounds_total"][drafter,] == len(theirs)
        assert found[f"{by_drafter}draft_tokens_total"][drafter,] == sum(len(r.draft_token_ids) for r in theirs)
        assert found[f"{by_drafter}accepted_tokens_total"][drafter,] == sum(r.num_correct_drafts for r in theirs)
    assert found["tiercel:requests_running"] == found["tiercel:requests_waiting"] == {(): 0}
    assert found["tiercel:kv_slots_used"] == {(): 0}
    assert total(found, "tiercel:trace_spans_exported_total") == len(run.spans)
    assert total(found, "tiercel:trace_items_dropped_total") == 0
    assert total(found, "tiercel:trace_sink_failures_total") == 0


def check_sums(found: Numbers, ended: list[RequestRecord], num_steps: int) -> None:
    """Counters against what the requests' own responses add up to."""
    specs = [record.spec for record in ended]
    drafted = [d for spec in specs for d in spec["per_step_drafted"]]
    accepted = [a for spec in specs for a in spec["per_step_accepted"]]
    rounds = list(zip(drafted, accepted, strict=True))
    counters: dict[str, float] = {
        "spec_decode_num_rounds_total": sum(spec["num_spec_steps"] for spec in specs),
        "spec_decode_drafter_rounds_total": sum(spec["num_spec_steps"] for spec in specs),
        "spec_decode_num_drafts_total": sum(d > 0 for d in drafted),
        "spec_decode_num_draft_tokens_total": sum(spec["num_draft_tokens"] for spec in specs),
        "spec_decode_drafter_draft_tokens_total": sum(spec["num_draft_tokens"] for spec in specs),
        "spec_decode_num_accepted_tokens_total": sum(spec["num_accepted_draft_tokens"] for spec in specs),
        "spec_decode_drafter_accepted_tokens_total": sum(spec["num_accepted_draft_tokens"] for spec in specs),
        "spec_decode_emitted_tokens_total": sum(spec["num_emitted_tokens"] for spec in specs),
        "generation_tokens_total": sum(record.completion_tokens for record in ended),
        "prompt_tokens_total": sum(record.prompt_tokens for record in ended),
        "preemptions_total": sum(record.num_preemptions for record in ended),
        "requests_total": len(ended),
    }
    assert {name: total(found, f"tiercel:{name}") for name in counters} == counters
    positions = range(num_steps)
    assert found.get(PER_POS, {}) == {(str(i),): sum(a > i for a in accepted) for i in positions}
    assert found.get(REACHED, {}) == {(str(i),): sum(d > i and a >= i for d, a in rounds) for i in positions}
    for record in ended:
        assert found["tiercel:requests_total"][record.finish_reason,] == sum(
            other.finish_reason == record.finish_reason for other in ended
        )
    by_position = [found[PER_POS][str(i),] for i in positions]
    assert all(before >= after for before, after in pairwise(by_position))
