"""The worker against a plain loop written from the definition, with nothing cached."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import random_draft
from tests.speculative.test_ngram import looked_up
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.request import SOURCE_NGRAM, Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.models.attention import DenseAttention
from tiercel.models.mtp import MtpDraft
from tiercel.models.mtp_checkpoint import load_draft, save_draft
from tiercel.models.step import eager_draft
from tiercel.speculative import registry
from tiercel.speculative.base_worker import SpecWorker
from tiercel.speculative.multi_layer_eagle_worker import MultiLayerEagleWorker
from tiercel.speculative.registry import WorkerContext

PROMPTS = [[7, 30, 99, 12, 200, 45, 8, 61, 5, 77, 140, 9, 33, 2, 18, 55, 21], [90, 91], [14] * 9]


def reference_drafts(target: LoadedTarget, draft: MtpDraft, token_ids: list[int], depth: int) -> list[int]:
    """Drafts after ``token_ids``: every layer runs over the whole text, unknown tokens being the drafts before."""
    return reference_drafts_and_confidence(target, draft, token_ids, depth)[0]


@torch.inference_mode()
def reference_drafts_and_confidence(
    target: LoadedTarget, draft: MtpDraft, token_ids: list[int], depth: int
) -> tuple[list[int], list[float]]:
    rows = len(token_ids) - 1
    attention, positions = DenseAttention(1), torch.arange(rows)
    hidden = first = target.model.decoder(torch.tensor(token_ids[:-1]), positions, attention)
    drafts: list[int] = []
    confidence = []
    for i in range(depth):
        known = [*token_ids, *drafts]
        inputs = torch.tensor([known[t + 1 + i] for t in range(rows)])
        source = hidden if draft.description.chained else first
        hidden = draft.layers[i](draft.embed(inputs), source, draft.rotary(positions), i, attention)
        logits = draft.logits(i, hidden[-1:])
        drafts.append(int(draft.target_ids[logits.argmax()]))
        confidence.append(float(logits.softmax(-1).max()))
    return drafts, confidence


def engine_with(
    target: LoadedTarget,
    draft: MtpDraft,
    config: EngineConfig,
    *,
    num_steps: int = 3,
    exact_kv: bool = True,
    max_verify_rows: int = 99,
    lookup: tuple[int, int] = (0, 0),
    min_confidence: float = 0.0,
) -> Engine:
    def build(context: WorkerContext) -> SpecWorker:
        return MultiLayerEagleWorker(
            context.target,
            eager_draft(draft),
            num_steps,
            lookup=lookup,
            min_confidence=min_confidence,
            exact_kv=exact_kv,
            max_verify_rows=max_verify_rows,
        )

    before = registry.WORKERS["none"]
    registry.WORKERS["none"] = build
    try:
        return Engine(config, SpecConfig(method="none"), TraceConfig(), target)
    finally:
        registry.WORKERS["none"] = before


def sometimes_right(engine: Engine, answers: dict[str, list[int]]) -> None:
    """Replace proposals by true ones now and then, so that every accept pattern occurs; what the layers compute stays."""
    worker = engine.worker
    assert isinstance(worker, MultiLayerEagleWorker)
    honest, turn = worker.draft, iter(range(10**9))

    def draft(batch):  # type: ignore[no-untyped-def]
        proposed = honest(batch)
        chains = []
        for req, chain in zip(batch.reqs, proposed.draft_token_ids, strict=True):
            good = next(turn) % (len(chain) + 1)
            done = len(req.output_token_ids)
            truth = answers[req.request_id][done : done + good]
            chains.append([*truth, *chain[len(truth) :]])
        return dataclasses.replace(proposed, draft_token_ids=chains)

    worker.draft = draft  # type: ignore[method-assign]


def rounds(engine: Engine) -> Iterator[Request]:
    """Step the engine; yields every request that has just got fresh drafts."""
    worker = engine.worker
    assert isinstance(worker, MultiLayerEagleWorker)
    while engine.has_work:
        outputs = engine.step()
        engine.kv.check()
        for output in outputs:
            req = output.request
            state = worker.states.get(req.request_id)
            is_read = state and state.hidden.end == len(req.token_ids) - 1
            if is_read and state.drafts and not req.is_finished and req.draft_depth(3) == 3:
                yield req


def plain_answers(target: LoadedTarget, sampling: SamplingParams) -> dict[str, list[int]]:
    engine = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(), target)
    reqs = [engine.add_request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    return {req.request_id: req.output_token_ids for req in reqs}


SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 7, 512])
def test_drafts_equal_a_fresh_prefill_after_every_accept_pattern(
    toy_target: LoadedTarget, chained: bool, chunk: int
) -> None:
    draft = random_draft(toy_target, chained=chained)
    answers = plain_answers(toy_target, SAMPLING)
    engine = engine_with(toy_target, draft, EngineConfig(max_prefill_tokens=chunk, page_size=4))
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    seen = set()
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    for req in rounds(engine):
        expected = reference_drafts(toy_target, draft, req.token_ids, 3)
        assert engine.worker.states[req.request_id].drafts == expected
        seen.update(req.spec.correct)
    assert seen == {0, 1, 2, 3}
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert engine.worker.states == {}
    assert engine.kv.num_slots_used == 0


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("max_verify_rows", [6, 99])
def test_recorded_layers_draft_what_the_reference_does(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, tmp_path: Path, chained: bool, max_verify_rows: int
) -> None:
    draft = random_draft(toy_modules, chained=chained)
    save_draft(draft, tmp_path, {})
    draft = load_draft(tmp_path, toy_modules.checkpoint, toy_modules.model.decoder)  # rounded to bfloat16
    answers = plain_answers(toy_modules, SAMPLING)
    spec = SpecConfig(draft=str(tmp_path), max_verify_rows=max_verify_rows, ngram_match=0, min_confidence=0)
    engine = Engine(EngineConfig(max_prefill_tokens=7, page_size=4), spec, TraceConfig(), toy_native)
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    assert engine.worker.model.chain is not None
    checked = 0
    for req in rounds(engine):
        drafts = engine.worker.states[req.request_id].drafts
        assert drafts == reference_drafts(toy_modules, draft, req.token_ids, len(drafts))
        checked += 1
    assert checked > 5
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert max(max(r.spec.correct) for r in reqs) == min(3, max_verify_rows // 3 - 1)


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_deeper_layers_wait_for_sure_drafts_and_go_on_exactly(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, tmp_path: Path, chained: bool, recorded: bool
) -> None:
    save_draft(random_draft(toy_modules, chained=chained), tmp_path, {})
    draft = load_draft(tmp_path, toy_modules.checkpoint, toy_modules.model.decoder)
    answers = plain_answers(toy_modules, SAMPLING)
    middle = sorted(
        reference_drafts_and_confidence(toy_modules, draft, [*PROMPTS[int(name)], *answer[:n]], 1)[1][0]
        for name, answer in answers.items()
        for n in range(1, 20)
    )[28]
    spec = SpecConfig(draft=str(tmp_path), num_steps=3, ngram_match=0, min_confidence=middle, max_verify_rows=99)
    target = toy_native if recorded else toy_modules
    engine = Engine(EngineConfig(max_prefill_tokens=7, page_size=4), spec, TraceConfig(), target)
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    lengths = set()
    for req in rounds(engine):
        expected, confidence = reference_drafts_and_confidence(toy_modules, draft, req.token_ids, 3)
        reach, kept = 1.0, 0
        while kept < 3 and (kept == 0 or reach >= middle):
            reach *= confidence[kept]
            kept += 1
        if all(abs(c - middle) > 1e-4 for c in confidence[:1]):
            assert engine.worker.states[req.request_id].drafts == expected[:kept]
            lengths.add(kept)
    assert {1, 2} <= lengths
    assert {r.request_id: r.output_token_ids for r in reqs} == answers


def test_drafts_are_exact_after_preemption_and_resume(toy_target: LoadedTarget) -> None:
    draft = random_draft(toy_target)
    answers = plain_answers(toy_target, SAMPLING)
    engine = engine_with(toy_target, draft, EngineConfig(kv_tokens=64, page_size=4, max_prefill_tokens=5))
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    for req in rounds(engine):
        assert engine.worker.states[req.request_id].drafts == reference_drafts(toy_target, draft, req.token_ids, 3)
    assert sum(req.num_preemptions for req in reqs) > 0
    assert {r.request_id: r.output_token_ids for r in reqs} == answers


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("max_verify_rows", [1, 4, 6])
def test_layers_that_were_left_out_go_on_exactly(toy_target: LoadedTarget, chained: bool, max_verify_rows: int) -> None:
    draft = random_draft(toy_target, chained=chained)
    wishes = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 22, 40)]
    engine = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(), toy_target)
    plain = [engine.add_request(str(i), p, w) for i, (p, w) in enumerate(zip(PROMPTS, wishes, strict=True))]
    while engine.has_work:
        engine.step()
    answers = {req.request_id: req.output_token_ids for req in plain}
    engine = engine_with(
        toy_target, draft, EngineConfig(max_prefill_tokens=7, page_size=4), max_verify_rows=max_verify_rows
    )
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), p, w) for i, (p, w) in enumerate(zip(PROMPTS, wishes, strict=True))]
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    for req in rounds(engine):
        drafts = engine.worker.states[req.request_id].drafts
        assert drafts == reference_drafts(toy_target, draft, req.token_ids, len(drafts))
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    depths = {p for req in reqs for p in req.spec.proposed}
    assert depths >= ({0} if max_verify_rows == 1 else {0, 1, 3} if max_verify_rows == 4 else {1, 2, 3})
    assert max(reqs[0].spec.proposed) <= max_verify_rows // 3 + 1


@pytest.mark.parametrize("chained", [True, False])
def test_prompt_lookup_takes_the_rounds_it_can_and_the_layers_go_on_exactly(
    toy_target: LoadedTarget, chained: bool
) -> None:
    draft = random_draft(toy_target, chained=chained)
    wish = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = plain_answers(toy_target, wish)
    engine = engine_with(toy_target, draft, EngineConfig(max_prefill_tokens=7, page_size=4), lookup=(1, 5))
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), prompt, wish) for i, prompt in enumerate(PROMPTS)]
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    kinds = set()
    for req in rounds(engine):
        state = engine.worker.states[req.request_id]
        expected = looked_up(req.token_ids, 1, req.draft_depth(5))
        if expected:
            assert (state.drafts, set(state.sources)) == (expected, {SOURCE_NGRAM})
            kinds.add("left out" if state.ends[0] < req.num_computed else "lookup")
        else:
            assert state.drafts == reference_drafts(toy_target, draft, req.token_ids, 3)
            assert state.sources == (0, 1, 2)
            kinds.add("layers")
    assert kinds == {"left out", "layers"}
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert SOURCE_NGRAM in {source for req in reqs for source in req.output_sources}


def test_stale_kv_differs_so_the_test_above_can_fail(toy_target: LoadedTarget) -> None:
    draft = random_draft(toy_target)
    engine = engine_with(toy_target, draft, EngineConfig(), exact_kv=False)
    engine.add_request("0", PROMPTS[0], SAMPLING)
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    wrong = 0
    for req in rounds(engine):
        wrong += engine.worker.states["0"].drafts != reference_drafts(toy_target, draft, req.token_ids, 3)
    assert wrong > 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_fewer_steps_than_layers(toy_target: LoadedTarget, num_steps: int) -> None:
    engine = engine_with(toy_target, random_draft(toy_target), EngineConfig(), num_steps=num_steps)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    assert {r.request_id: r.output_token_ids for r in reqs} == plain_answers(toy_target, SAMPLING)
    assert all(max(r.spec.proposed) == num_steps for r in reqs)


def test_the_last_rounds_propose_no_more_than_can_be_used(toy_target: LoadedTarget) -> None:
    engine = engine_with(toy_target, random_draft(toy_target), EngineConfig())
    req = engine.add_request("0", PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert req.spec.proposed[0] == 1  # two tokens are left after the first: one draft and the bonus token
    assert all(0 <= p <= 1 for p in req.spec.proposed)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
    ],
)
def test_sampling_gives_the_same_tokens_with_and_without_speculation(
    toy_target: LoadedTarget, params: dict[str, float]
) -> None:
    sampling = SamplingParams(max_tokens=24, seed=11, ignore_eos=True, **params)  # type: ignore[arg-type]
    engine = engine_with(toy_target, random_draft(toy_target), EngineConfig(max_prefill_tokens=5))
    answers = plain_answers(toy_target, sampling)
    sometimes_right(engine, answers)
    reqs = [engine.add_request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert sum(sum(r.spec.correct) for r in reqs) > 0
    other = plain_answers(toy_target, dataclasses.replace(sampling, seed=12))
    assert other != answers


def test_nan_in_an_early_chunk_ends_one_request_and_spares_the_others(toy_target: LoadedTarget) -> None:
    wish = SamplingParams(max_tokens=8, ignore_eos=True)
    draft, config = random_draft(toy_target), EngineConfig(max_prefill_tokens=4, page_size=4)
    alone = engine_with(toy_target, draft, config)
    expected = alone.add_request("well", PROMPTS[1], wish)
    while alone.has_work:
        alone.step()
    engine = engine_with(toy_target, draft, config)
    sick, well = engine.add_request("sick", PROMPTS[0], wish), engine.add_request("well", PROMPTS[1], wish)
    engine.step()
    # The next chunk chooses no token, so the first to meet the NaN are the draft layers.
    engine.worker.target.storages[0].keys[:, engine.kv.slots("sick")[0]] = float("nan")
    while engine.has_work:
        engine.step()
    assert "NaN" in str(sick.error)
    assert well.output_token_ids == expected.output_token_ids
