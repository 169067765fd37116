"""The engine under every accept pattern, pool size, chunk size and end, on a real (toy) target."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TOY_EOS
from tests.scripted import Propose, ScriptedWorker, run, scripted_engine
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.request import SOURCE_BONUS, SOURCE_PREFILL, FinishReason, Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.observability.records import read_requests
from tiercel.speculative import target_runner
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling

PROMPT = [7, 30, 99, 12, 200, 45, 8, 61]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def plain(target: LoadedTarget, prompt: list[int] = PROMPT, sampling: SamplingParams = LONG) -> list[int]:
    engine = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(), target)
    req = engine.add_request("plain", prompt, sampling)
    run(engine)
    return req.output_token_ids


def perfect(answers: dict[str, list[int]]) -> Propose:
    def propose(req: Request, depth: int) -> list[int]:
        done = len(req.output_token_ids)
        return answers[req.request_id][done : done + depth]

    return propose


def wrong_from(answers: dict[str, list[int]], right: Callable[[Request], int]) -> Propose:
    """Drafts that are right up to ``right(req)`` of them, then wrong."""
    good = perfect(answers)

    def propose(req: Request, depth: int) -> list[int]:
        chain = good(req, depth)
        cut = right(req)
        return chain[:cut] + [(t + 1) % 250 for t in chain[cut:]]

    return propose


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("right", [0, 1, 2, 5])
def test_output_equals_plain_for_every_accept_pattern(toy_target: LoadedTarget, num_steps: int, right: int) -> None:
    answer = plain(toy_target)
    engine = scripted_engine(toy_target, wrong_from({"a": answer}, lambda _: right), num_steps)
    req = engine.add_request("a", PROMPT, LONG)
    run(engine)
    assert req.output_token_ids == answer
    assert sum(req.spec.emitted) == len(answer) - 1
    assert all(c == min(right, p) for p, c in zip(req.spec.proposed, req.spec.correct, strict=True))
    assert req.output_sources[0] == SOURCE_PREFILL
    expected: list[int] = []
    for correct, emitted in zip(req.spec.correct, req.spec.emitted, strict=True):
        expected += [*range(correct), SOURCE_BONUS][:emitted]
    assert req.output_sources[1:] == expected


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_eos_ends_the_answer_at_every_position_of_a_run(toy_target: LoadedTarget, at: int, num_steps: int) -> None:
    answer = plain(toy_target)
    eos = answer[at]
    first = answer.index(eos)
    engine = scripted_engine(toy_target, perfect({"a": answer}), num_steps)
    req = engine.add_request("a", PROMPT, SamplingParams(max_tokens=20))
    req.eos_token_ids = frozenset({eos})
    tokens = run(engine)
    assert tokens["a"] == answer[: first + 1] == req.output_token_ids
    assert req.finish_reason is FinishReason.STOP
    assert sum(req.spec.emitted) == len(req.output_token_ids) - 1


def test_an_eos_after_a_wrong_draft_does_not_stop(toy_target: LoadedTarget) -> None:
    answer = plain(toy_target)

    def propose(req: Request, depth: int) -> list[int]:
        done = len(req.output_token_ids)
        return [(answer[done] + 1) % 250, TOY_EOS, TOY_EOS][:depth]

    engine = scripted_engine(toy_target, propose, 3)
    req = engine.add_request("a", PROMPT, SamplingParams(max_tokens=12))
    run(engine)
    assert req.output_token_ids == answer[:12]


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("num_steps", [0, 3])
def test_max_tokens_is_exact(toy_target: LoadedTarget, max_tokens: int, num_steps: int) -> None:
    answer = plain(toy_target)
    engine = scripted_engine(toy_target, perfect({"a": answer}), num_steps)
    req = engine.add_request("a", PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    run(engine)
    assert req.output_token_ids == answer[:max_tokens]
    assert req.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("room", range(1, 8))
def test_the_context_limit_ends_an_answer_with_length(toy_target: LoadedTarget, room: int) -> None:
    answer = plain(toy_target)
    engine = scripted_engine(toy_target, perfect({"a": answer}), 3, EngineConfig(max_model_len=len(PROMPT) + room))
    req = engine.add_request("a", PROMPT, LONG)
    run(engine)
    assert req.output_token_ids == answer[:room]
    assert req.finish_reason is FinishReason.LENGTH


def many(count: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"r{i}": [rng.randrange(250) for _ in range(rng.randint(1, 40))] for i in range(count)}


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_chunk_size_and_batching_change_nothing(toy_target: LoadedTarget, chunk: int) -> None:
    prompts = many(5, seed=1)
    answers = {name: plain(toy_target, prompt) for name, prompt in prompts.items()}
    config = EngineConfig(max_prefill_tokens=chunk, max_batch_size=3, page_size=4)
    engine = scripted_engine(toy_target, wrong_from(answers, lambda r: len(r.token_ids) % 4), 3, config)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, LONG)
    assert run(engine) == answers


def test_preemption_and_resume_change_nothing(toy_target: LoadedTarget) -> None:
    prompts = many(4, seed=2)
    answers = {name: plain(toy_target, prompt) for name, prompt in prompts.items()}
    config = EngineConfig(kv_tokens=96, page_size=4, max_prefill_tokens=16)
    engine = scripted_engine(toy_target, wrong_from(answers, lambda r: len(r.token_ids) % 4), 3, config)
    reqs = [engine.add_request(name, prompt, LONG) for name, prompt in prompts.items()]
    assert run(engine) == answers
    assert sum(req.num_preemptions for req in reqs) > 0
    assert isinstance(engine.worker, ScriptedWorker)
    assert set(engine.worker.forgotten) == set(prompts)
    for req in reqs:
        assert sum(req.spec.emitted) == len(req.output_token_ids) - 1


def test_a_request_that_outgrows_the_pool_alone_fails_clearly_and_alone(toy_target: LoadedTarget) -> None:
    answer = plain(toy_target)
    engine = scripted_engine(
        toy_target, perfect({"big": answer, "small": answer}), 3, EngineConfig(kv_tokens=16, page_size=4)
    )
    big = engine.add_request("big", PROMPT, LONG)
    small = engine.add_request("small", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert big.finish_reason is FinishReason.ERROR
    assert big.error is not None
    assert "kv_tokens" in big.error
    assert small.output_token_ids == answer[:3]
    assert engine.kv.num_slots_used == 0


@pytest.mark.parametrize("steps_before", range(6))
def test_abort_in_every_phase(toy_target: LoadedTarget, steps_before: int) -> None:
    answer = plain(toy_target)
    config = EngineConfig(max_prefill_tokens=4, page_size=4)
    engine = scripted_engine(toy_target, perfect({"a": answer, "b": answer}), 3, config)
    engine.add_request("a", PROMPT, LONG)
    other = engine.add_request("b", PROMPT, LONG)
    for _ in range(steps_before):
        engine.step()
    record = engine.abort("a")
    assert record is not None
    assert record.finish_reason == "abort"
    engine.kv.check()
    assert engine.abort("a") is None
    run(engine)
    assert other.output_token_ids == answer
    assert engine.kv.num_slots_used == 0
    assert engine.requests == {}


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "at least one token"),
        ([259], "258"),
        ([1.5], "integer"),
        (["a"], "integer"),
        ([-1], "258"),
        ([1] * 512, "512"),
        ([1] * 600, "600"),
    ],
)
def test_prompts_that_cannot_run(toy_target: LoadedTarget, prompt: list[int], named: str) -> None:
    engine = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(), toy_target)
    with pytest.raises(UserError, match=named):
        engine.add_request("a", prompt, LONG)
    assert not engine.has_work
    engine.add_request("a", [1] * 511, LONG)
    assert len(run(engine)["a"]) == 1
    engine.add_request("a", PROMPT, LONG)
    with pytest.raises(UserError, match="in use"):
        engine.add_request("a", PROMPT, LONG)


@pytest.mark.parametrize("where", ["schedule", "forward", "update"])
def test_a_fault_of_ours_is_loud_and_closes_every_request(toy_target: LoadedTarget, where: str) -> None:
    def broken(*_: object) -> list[int]:
        raise ZeroDivisionError

    engine = scripted_engine(toy_target, broken if where == "forward" else lambda r, d: [1] * d, 3)
    reqs = [engine.add_request(name, PROMPT, LONG) for name in ("a", "b")]
    engine.step()
    if where != "forward":
        setattr(engine.scheduler, where, broken)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [req.finish_reason for req in reqs] == [FinishReason.ERROR] * 2
    assert all("ZeroDivisionError" in str(req.error) for req in reqs)
    assert engine.requests == {}
    assert engine.kv.num_slots_used == 0


def test_an_interrupt_aborts_the_requests_and_the_engine_goes_on(toy_target: LoadedTarget, tmp_path: Path) -> None:
    answer = plain(toy_target)

    def interrupted(req: Request, depth: int) -> list[int]:
        if req.request_id == "first":
            raise KeyboardInterrupt
        return answer[len(req.output_token_ids) :][:depth]

    engine = scripted_engine(toy_target, interrupted, 3, trace=TraceConfig(records_out=tmp_path))
    first = engine.add_request("first", PROMPT, LONG)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert first.finish_reason is FinishReason.ABORT
    assert engine.kv.num_slots_used == 0
    engine.add_request("second", PROMPT, LONG)
    assert run(engine) == {"second": answer}
    engine.close()
    ends = {record.request_id: record.finish_reason for record in read_requests(tmp_path / "requests.jsonl")}
    assert ends == {"first": "abort", "second": "length"}


def test_nan_logits_end_one_request_and_spare_the_others(toy_target: LoadedTarget) -> None:
    answer = plain(toy_target)
    engine = scripted_engine(toy_target, perfect({"sick": answer, "well": answer}), 3)
    sick = engine.add_request("sick", PROMPT, LONG)
    well = engine.add_request("well", PROMPT, LONG)
    engine.step()
    engine.worker.target.storages[0].keys[:, engine.kv.slots("sick")[0]] = float("nan")
    run(engine)
    assert sick.finish_reason is FinishReason.ERROR
    assert "NaN" in str(sick.error)
    assert well.output_token_ids == answer


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("eos_before", [False, True])
def test_nan_in_a_run_delivers_what_plain_decoding_delivers(
    toy_target: LoadedTarget, monkeypatch: pytest.MonkeyPatch, at: int, eos_before: bool
) -> None:
    answer, real = plain(toy_target), target_runner.choose

    def choose(best: torch.Tensor, logits: object, how: list[RowSampling], noise: GumbelNoise) -> torch.Tensor:
        sick = torch.tensor([row.position == len(PROMPT) + at for row in how], dtype=torch.bool)
        return torch.where(sick, -1, real(best, logits, how, noise))

    monkeypatch.setattr(target_runner, "choose", choose)
    engine = scripted_engine(toy_target, perfect({"a": answer}), 3)
    req = engine.add_request("a", PROMPT, SamplingParams(max_tokens=20))
    req.eos_token_ids = frozenset({answer[at - 1]} if eos_before else ())
    run(engine)
    if eos_before:
        assert req.output_token_ids == answer[: answer.index(answer[at - 1]) + 1]
        assert req.finish_reason is FinishReason.STOP
    else:
        assert req.output_token_ids == answer[:at]
        assert req.finish_reason is FinishReason.ERROR
    assert sum(req.spec.emitted) == len(req.output_token_ids) - 1


def test_soak_with_random_everything(toy_target: LoadedTarget) -> None:
    rng = random.Random(7)
    prompts = many(120, seed=3)
    wishes = {name: SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True) for name in prompts}
    answers = {name: plain(toy_target, prompt, wishes[name]) for name, prompt in prompts.items()}
    config = EngineConfig(kv_tokens=160, page_size=4, max_prefill_tokens=13, max_batch_size=5)
    engine = scripted_engine(toy_target, wrong_from(answers, lambda r: rng.randint(0, 3)), 3, config)
    waiting, done, aborted = list(prompts), {}, set()
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            name = waiting.pop()
            engine.add_request(name, prompts[name], wishes[name])
        if engine.requests and rng.random() < 0.05:
            name = rng.choice(list(engine.requests))
            engine.abort(name)
            aborted.add(name)
        for output in engine.step():
            done[output.request.request_id] = output.request
        engine.kv.check()
    assert engine.kv.num_slots_used == 0
    for name, req in done.items():
        if name not in aborted:
            assert req.output_token_ids == answers[name]
            assert req.finish_reason is FinishReason.LENGTH


def test_stage_times_add_up_to_the_rounds_wall_time(toy_target: LoadedTarget) -> None:
    from time import perf_counter_ns

    steps: list[Any] = []
    engine = scripted_engine(toy_target, lambda r, d: [1] * d, 3)
    engine.pipeline.on_step = steps.append  # type: ignore[method-assign]
    req = engine.add_request("a", PROMPT, LONG)
    wall = 0
    while engine.has_work:
        start = perf_counter_ns()
        engine.step()
        wall += perf_counter_ns() - start
    inside = sum(sum(s.stage_ns.values()) for s in steps)
    assert inside == sum(s.end_ns - s.start_ns for s in steps)
    assert 0.7 * wall < inside <= wall  # the toy's steps are so short that the calls around them show
    decode = [s for s in steps if s.rounds]
    assert req.spec.stage_ns.verify == sum(s.stage_ns["verify"] for s in decode)
    assert all(v >= 0 for s in steps for v in s.stage_ns.values())
