"""Depths that change while requests run: drafts stay exact, probes see what the first layer would have drafted."""

import itertools
from pathlib import Path

import pytest

from tests.conftest import random_draft
from tests.speculative.test_multi_layer_eagle import PROMPTS, SAMPLING, plain_answers, reference_drafts, rounds
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.depths import DepthChoice, DepthTable
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.speculative_params import SpeculativeParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.models.mtp_checkpoint import load_draft, save_draft
from tiercel.observability.records import read_rounds
from tiercel.speculative.multi_layer_eagle_worker import MultiLayerEagleWorker

ORDER = [
    DepthChoice(1, "start"),
    *[DepthChoice(0, "kept")] * 3,
    DepthChoice(0, "probe"),
    *[DepthChoice(0, "kept")] * 2,
    DepthChoice(3, "measure"),
    DepthChoice(2, "switched"),
    DepthChoice(0, "switched"),
]


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_drafts_and_probes_are_exact_whatever_is_chosen(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, tmp_path: Path, chained: bool, recorded: bool
) -> None:
    save_draft(random_draft(toy_modules, chained=chained), tmp_path, {})
    draft = load_draft(tmp_path, toy_modules.checkpoint, toy_modules.model.decoder)
    spec = SpecConfig(draft=str(tmp_path), num_steps=3, adaptive=True, ngram_match=0, min_confidence=0)
    config = EngineConfig(max_prefill_tokens=7, page_size=4)
    engine = Engine(config, spec, TraceConfig(), toy_native if recorded else toy_modules)
    worker = engine.worker
    assert isinstance(worker, MultiLayerEagleWorker)
    assert worker.adaptive is not None
    turns = itertools.cycle(ORDER)
    worker.adaptive.choose = lambda _: next(turns)  # type: ignore[method-assign]
    scored: dict[str, list[list[bool]]] = {}
    worker.adaptive.scored = lambda name, hits: scored.setdefault(name, []).append(list(hits))  # type: ignore[method-assign]
    answers = plain_answers(toy_modules, SAMPLING)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    depths, seen_probes = set(), 0
    for req in rounds(engine):
        drafts = worker.states[req.request_id].drafts
        assert drafts == reference_drafts(toy_modules, draft, req.token_ids, len(drafts))
        depths.add(len(drafts))
        for hits in scored.pop(req.request_id, ()):
            seen_probes += 1
            text, count = req.token_ids, len(hits)
            first = max(len(text) - count, req.num_prompt_tokens)
            expected = [
                reference_drafts(toy_modules, draft, text[:end], 1) == [text[end]] for end in range(first, len(text))
            ]
            assert hits == expected
            assert count >= 1
    assert depths == {1, 2, 3}
    assert seen_probes >= 3
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert worker.states == {}


def test_layers_far_behind_wait_until_the_answer_is_long_enough(toy_modules: LoadedTarget, toy_draft: Path) -> None:
    spec = SpecConfig(draft=str(toy_draft), num_steps=3, adaptive=True, ngram_match=0, min_confidence=0)
    engine = Engine(EngineConfig(), spec, TraceConfig(), toy_modules)
    worker = engine.worker
    assert isinstance(worker, MultiLayerEagleWorker)
    assert worker.adaptive is not None
    choices = itertools.chain([DepthChoice(0, "start")], itertools.repeat(DepthChoice(1, "switched")))
    worker.adaptive.choose = lambda _: next(choices)  # type: ignore[method-assign]
    req = engine.add_request("long", list(range(1, 42)), SamplingParams(max_tokens=24, ignore_eos=True))
    while engine.has_work:
        engine.step()
    drafted = [count > 0 for count in req.spec.proposed]
    # 41 rows to read: after the sixth token they are fewer than eight per token of the answer.
    assert not any(drafted[:5])
    assert all(drafted[6:-1])


def test_decisions_are_in_the_records_and_on_metrics(
    toy_modules: LoadedTarget, toy_draft: Path, tmp_path: Path
) -> None:
    trace = TraceConfig(records_out=tmp_path / "records", metrics=True)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    spec = SpecConfig(draft=str(toy_draft), tuned=False)
    with LLM(engine=EngineConfig(), spec=spec, trace=trace, target=toy_modules) as llm:
        llm.generate([[7, 30, 99, 12]], sampling)
    text = llm.metrics_text()
    steps = [step for step in read_rounds(tmp_path / "records") if step.mode == "decode"]
    assert steps[0].depth_reason in ("start", "kept")
    assert {step.depth_reason for step in steps} >= {"kept", "measure"}
    for step in steps:
        series = f'num_steps="{step.num_steps}",reason="{step.depth_reason}"'
        same = [s for s in steps if (s.num_steps, s.depth_reason) == (step.num_steps, step.depth_reason)]
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith("tiercel:spec_decode_depth_rounds_total") and series in line
        ]
        assert float(line.rsplit(" ", 1)[1]) == len(same)


@pytest.mark.parametrize("method", ["multi-layer-eagle", "ngram"])
def test_a_request_says_how_it_is_drafted_for(toy_modules: LoadedTarget, toy_draft: Path, method: str) -> None:
    spec = SpecConfig(method="ngram")
    if method != "ngram":
        spec = SpecConfig(draft=str(toy_draft), ngram_match=0, min_confidence=0, num_steps=3)
    prompt = [3, 4, 5, 6] * 6
    with LLM(engine=EngineConfig(), spec=spec, target=toy_modules) as llm:
        wishes = [
            SpeculativeParams(),
            SpeculativeParams(num_steps=1),
            SpeculativeParams(enabled=False),
            SpeculativeParams(num_steps=0),
        ]
        params = [SamplingParams(max_tokens=16, ignore_eos=True, speculative=wish) for wish in wishes]
        outputs = [llm.generate([prompt], one)[0] for one in params]
    most = [max(output.record.spec["per_step_drafted"]) for output in outputs]
    assert most[0] >= 2
    assert most[1:] == [1, 0, 0]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert outputs[1].record.sampling["speculative"] == {"enabled": True, "num_steps": 1}


@pytest.mark.parametrize(
    "wish", [{"enabled": 1}, {"enabled": None}, {"num_steps": -1}, {"num_steps": True}, {"num_steps": 1.5}]
)
def test_a_wrong_wish_names_its_field(wish: dict[str, object]) -> None:
    (name,) = wish
    with pytest.raises(UserError, match=f"speculative.{name}"):
        SpeculativeParams(**wish)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="speculative="):
        SamplingParams(speculative={"enabled": True})  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [{"method": "ngram"}, {"method": "none"}, {"topk": 2}, {"exact_kv": False}])
def test_what_cannot_adapt_says_so(spec: dict[str, object]) -> None:
    with pytest.raises(UserError, match="adaptive=True needs"):
        SpecConfig(adaptive=True, **spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wish", "is_adaptive"),
    [
        ({}, True),
        ({"num_steps": 2}, False),
        ({"num_steps": 2, "adaptive": True}, True),
        ({"topk": 2}, False),
        ({"exact_kv": False}, False),
        ({"max_verify_rows": 8}, False),
        ({"adaptive": False}, False),
        ({"depths": DepthTable.fixed(1)}, False),
        ({"depths": DepthTable.fixed(1), "adaptive": True}, True),
    ],
)
def test_it_adapts_where_nothing_else_was_asked_for(
    toy_modules: LoadedTarget, toy_draft: Path, wish: dict[str, object], is_adaptive: bool
) -> None:
    spec = SpecConfig(draft=str(toy_draft), tuned=False, **wish)  # type: ignore[arg-type]
    worker = Engine(EngineConfig(), spec, TraceConfig(), toy_modules).worker
    assert isinstance(worker, MultiLayerEagleWorker)
    assert (worker.adaptive is not None) is is_adaptive
