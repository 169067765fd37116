"""One round, one count: response, spans, records and Prometheus counters agree number for number, however requests end."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.conftest import Drafts
from tests.conformance.histories import HISTORIES, History, K, Run, Wish, check, check_sums, play, scripted
from tests.observability.exposed import exposed, numbers, total
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.observability.metrics import EngineView, MetricsSink
from tiercel.observability.req_time_stats import ReqTimeStats
from tiercel.observability.trace import set_global_trace_level
from tiercel.speculative.registry import WORKERS


@pytest.fixture(scope="module")
def toy_target(toy_native: LoadedTarget) -> LoadedTarget:
    """Recorded steps: their rows do not depend on the batch, so that every answer can be compared with plain decoding's."""
    return toy_native


def test_every_way_to_end(toy_target: LoadedTarget, tmp_path: Path) -> None:
    history = History(
        [
            Wish([7] * 6, max_tokens=30, stop_at=9),
            Wish([8] * 4, max_tokens=30),
            Wish([9] * 20, max_tokens=12, abort_at=2),  # inside its prompt
            Wish([10] * 5, max_tokens=40, abort_at=9),  # between rounds
            Wish([11] * 5, max_tokens=40, abort_at=0),  # before its first forward
            Wish([12] * 30, max_tokens=60),  # too large for the pool
            Wish([13] * 3, max_tokens=1),
        ]
    )
    run = play(scripted(toy_target, history), toy_target, history, tmp_path)
    check(run, history)
    reasons = {record.finish_reason for record in run.responses.values()}
    assert reasons == {"stop", "length", "abort", "error"}
    assert sum(record.num_preemptions for record in run.responses.values()) > 0
    accepted = [a for record in run.responses.values() for a in record.spec["per_step_accepted"]]
    assert min(accepted) == 0
    assert max(accepted) >= 2


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=HISTORIES)
def test_any_history_with_any_accept_pattern(toy_target: LoadedTarget, history: History) -> None:
    set_global_trace_level(0)
    with TemporaryDirectory() as folder:
        check(play(scripted(toy_target, history), toy_target, history, Path(folder)), history)


@pytest.mark.parametrize("method", sorted(WORKERS))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=HISTORIES)
def test_any_history_of_every_worker(method: str, toy_target: LoadedTarget, drafts: Drafts, history: History) -> None:
    set_global_trace_level(0)
    spec = SpecConfig(method=method, draft=drafts.get(method, "auto"), max_verify_rows=64, min_confidence=0)

    def make(config: EngineConfig, trace: TraceConfig) -> Engine:
        return Engine(config, spec, trace, toy_target)

    with TemporaryDirectory() as folder:
        check(play(make, toy_target, history, Path(folder)), history)


LONG = History(
    [Wish([7] * 6, 30), Wish([8] * 4, 25), Wish([9] * 9, 40, abort_at=12), Wish([10] * 5, 40, abort_at=0)], 5
)


@pytest.fixture(scope="module")
def long_run(toy_target: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield play(scripted(toy_target, LONG), toy_target, LONG, tmp_path_factory.mktemp("long"))
    set_global_trace_level(0)


@settings(max_examples=40, deadline=None)
@given(lost=st.sets(st.integers(0, 80)))
def test_counters_are_exact_whatever_steps_were_dropped(long_run: Run, lost: set[int]) -> None:
    sink = MetricsSink("toy", EngineView("scripted", K))
    stats = ReqTimeStats("ignored", lambda mark: None)
    last = {part.request_id: s.step for s in long_run.steps for part in (*s.extends, *s.rounds)}
    for name in set(long_run.requests) - set(last):  # never came to a step
        sink.on_request(long_run.requests[name], stats)
    for step in long_run.steps:
        if step.step not in lost:
            sink.on_step(step)
        for name in [name for name, number in last.items() if number == step.step]:
            sink.on_request(long_run.requests[name], stats)
    ended = list(long_run.requests.values())
    check_sums(exposed(sink.store), ended, K)
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
