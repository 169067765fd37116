"""Every field of SamplingParams has its effect, the same with and without speculation, or is refused by name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.conformance.conftest import Drafts
from tests.scripted import run, scripted_engine
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.request import FinishReason, Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.structured_outputs import StructuredOutputs
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.engine.sampling_checks import REFUSED

PROMPTS = [[(11 * i + 3 * j) % 250 for j in range(4 + 5 * i)] for i in range(4)]
LENGTH = 16
WARM = {"temperature": 0.8, "seed": 5}


def by_last_token(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on the last two tokens, so that a wrong text before a row shows."""
    return logits.roll(1) if (token_ids[-1] + token_ids[-2]) % 3 == 0 else logits


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": ({}, {"max_tokens": 9}),
    "temperature": ({}, {"temperature": 0.9, "seed": 3}),
    "top_p": (WARM, {"top_p": 0.3}),
    "top_k": (WARM, {"top_k": 2}),
    "seed": (WARM, {"seed": 6}),
    "min_p": (WARM, {"min_p": 0.4}),
    "typical_p": (WARM, {"typical_p": 0.2}),
    "repetition_penalty": ({}, {"repetition_penalty": 1.8}),
    "presence_penalty": ({}, {"presence_penalty": 2.0}),
    "frequency_penalty": ({}, {"frequency_penalty": 1.5}),
    "logit_bias": ({}, {"logit_bias": {40: 4.0, 41: 3.5}}),
    "bad_words": ({}, {"bad_words": [chr(33 + i) for i in range(0, 90, 2)]}),
    "allowed_token_ids": ({}, {"allowed_token_ids": list(range(0, 250, 3))}),
    "logits_processors": ({}, {"logits_processors": [by_last_token]}),
    "stop": ({}, {"stop": [chr(33 + i) for i in range(0, 90, 6)]}),
    "stop_token_ids": ({}, {"stop_token_ids": list(range(0, 250, 7))}),
    "every one": (
        WARM,
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "min_p": 0.02,
            "top_k": 60,
            "logit_bias": {40: 1.0},
            "bad_words": ["ab"],
            "allowed_token_ids": list(range(1, 250)),
            "top_p": 0.97,
            "typical_p": 0.97,
            "min_tokens": 5,
            "logits_processors": [by_last_token],
        },
    ),
}
ELSEWHERE = {
    "ignore_eos": "tests/engine/test_engine.py",
    "logprobs": "below: it changes no token",
    "min_tokens": "below: it needs an end that would come earlier",
    "n": "SamplingParams.samples: the engine sees one",
    "speculative": "tests/speculative/test_adaptive_worker.py",
    "include_stop_str_in_output": "tests/engine/test_stops.py: it changes no token",
}
WORKERS: dict[str, dict[str, Any]] = {
    "chain": {"method": "multi-layer-eagle", "num_steps": 3, "ngram_match": 0},
    "tree": {"method": "multi-layer-eagle", "num_steps": 3, "topk": 2, "ngram_match": 0},
    "ngram": {"method": "ngram", "ngram_match": 1, "ngram_tokens": 3},
    "eagle tree": {"method": "eagle", "num_steps": 2, "topk": 2},
}


def answers(
    target: LoadedTarget, spec: SpecConfig, wish: SamplingParams, ending: frozenset[int] | None = None
) -> list[Request]:
    engine = Engine(EngineConfig(max_batch_size=3, max_prefill_tokens=16, page_size=4), spec, TraceConfig(), target)
    reqs = [engine.add_request(str(i), prompt, wish) for i, prompt in enumerate(PROMPTS)]
    for req in reqs:
        req.eos_token_ids = req.eos_token_ids if ending is None else ending
    while engine.has_work:
        engine.step()
    engine.kv.check()
    return reqs


def tokens(reqs: list[Request]) -> list[list[int]]:
    return [req.output_token_ids for req in reqs]


def test_the_table_has_every_field() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names - FIELDS.keys() - ELSEWHERE.keys() - set(REFUSED) == set()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_field_has_its_effect_and_speculation_has_none(toy_native: LoadedTarget, drafts: Drafts, worker: str) -> None:
    given = WORKERS[worker]
    draft = drafts.get(given["method"], "auto")
    spec = SpecConfig(draft=draft, max_verify_rows=999, **({} if worker == "ngram" else {"min_confidence": 0}), **given)
    correct = 0
    for name, (base, change) in FIELDS.items():
        common = {"max_tokens": LENGTH, "ignore_eos": True, **base}
        wish = SamplingParams(**{**common, **change})
        plain = tokens(answers(toy_native, SpecConfig(method="none"), wish))
        assert plain != tokens(answers(toy_native, SpecConfig(method="none"), SamplingParams(**common))), name
        ours = answers(toy_native, spec, wish)
        assert tokens(ours) == plain, name
        correct += sum(sum(req.spec.correct) for req in ours)
    assert correct > 0


@pytest.mark.parametrize("worker", WORKERS)
def test_min_tokens_holds_back_every_end(toy_native: LoadedTarget, drafts: Drafts, worker: str) -> None:
    given = WORKERS[worker]
    spec = SpecConfig(draft=drafts.get(given["method"], "auto"), max_verify_rows=999, **given)
    none = SpecConfig(method="none")
    free = tokens(answers(toy_native, none, SamplingParams(max_tokens=LENGTH, ignore_eos=True)))
    ending = frozenset(answer[2] for answer in free)
    early = answers(toy_native, none, SamplingParams(max_tokens=LENGTH), ending)
    assert all(len(req.output_token_ids) <= 3 for req in early)
    wish = SamplingParams(max_tokens=LENGTH, min_tokens=8)
    plain = answers(toy_native, none, wish, ending)
    assert all(len(req.output_token_ids) >= 8 for req in plain)
    assert tokens(answers(toy_native, spec, wish, ending)) == tokens(plain)


@pytest.mark.parametrize("wrong_from", range(5))
@pytest.mark.parametrize("field", [name for name in FIELDS if name != "max_tokens"])
def test_every_accept_pattern_gives_the_same_answer(toy_native: LoadedTarget, field: str, wrong_from: int) -> None:
    base, change = FIELDS[field]
    wish = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **base, **change})
    plain = tokens(answers(toy_native, SpecConfig(method="none"), wish))

    def propose(req: Request, depth: int) -> list[int]:
        done = len(req.output_token_ids)
        chain = plain[int(req.request_id)][done : done + depth]
        return chain[:wrong_from] + [(token + 1) % 250 for token in chain[wrong_from:]]

    engine = scripted_engine(toy_native, propose, 4)
    reqs = [engine.add_request(str(i), prompt, wish) for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert tokens(reqs) == plain
    for req in reqs:
        assert all(c == min(wrong_from, p) for p, c in zip(req.spec.proposed, req.spec.correct, strict=True))


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("warm", [False, True])
def test_logprobs_are_the_models_own_whoever_drafts(
    toy_native: LoadedTarget, toy_model: Path, drafts: Drafts, worker: str, warm: bool
) -> None:
    given = WORKERS[worker]
    spec = SpecConfig(draft=drafts.get(given["method"], "auto"), max_verify_rows=999, **given)
    wish = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=3, **(WARM | {"top_k": 40} if warm else {}))
    model = LlamaForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    for req in answers(toy_native, spec, wish):
        with torch.inference_mode():
            logs = model(torch.tensor([req.token_ids])).logits[0].log_softmax(-1)[req.num_prompt_tokens - 1 : -1]
        assert [found.token_id for found in req.output_logprobs] == req.output_token_ids
        for row, found in zip(logs, req.output_logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[found.token_id]), abs=1e-4)
            assert [p for _, p in found.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            assert [p for _, p in found.top] == pytest.approx([float(row[i]) for i, _ in found.top], abs=1e-4)


def test_a_request_that_forbids_every_token_fails_clearly_and_alone(toy_native: LoadedTarget) -> None:
    engine = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(), toy_native)
    eos = sorted(toy_native.checkpoint.description.eos_token_ids)
    stuck = engine.add_request("a", PROMPTS[0], SamplingParams(allowed_token_ids=eos, min_tokens=3))
    other = engine.add_request("b", PROMPTS[1], SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert stuck.finish_reason is FinishReason.ERROR
    assert "forbid every token" in str(stuck.error)
    assert len(other.output_token_ids) == 3


REFUSED_VALUES: dict[str, Any] = {"prompt_logprobs": 1, "structured_outputs": StructuredOutputs(json_object=True)}


@pytest.mark.parametrize("name", sorted(REFUSED_VALUES.keys() & set(REFUSED)))
def test_what_has_no_effect_is_refused_by_name(toy_native: LoadedTarget, tmp_path: Path, name: str) -> None:
    engine = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(records_out=tmp_path), toy_native)
    with pytest.raises(UserError, match=name):
        engine.add_request("a", PROMPTS[0], SamplingParams(**{name: REFUSED_VALUES[name]}))
    engine.close()
