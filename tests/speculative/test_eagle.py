"""EAGLE against plain loops over the whole text, with nothing cached."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.conftest import random_draft
from tests.eagle_heads import Head, Llama
from tests.speculative.growing import check_drafter, make
from tests.speculative.test_multi_layer_eagle import PROMPTS, SAMPLING, plain_answers
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.errors import UserError
from tiercel.engine.engine import LoadedTarget
from tiercel.models.attention import DenseAttention
from tiercel.models.mtp import MtpDraft
from tiercel.models.mtp_checkpoint import load_draft, save_draft


def spec_with(draft: Path, **settings: object) -> SpecConfig:
    given = {"method": "eagle", "num_steps": 3, "max_verify_rows": 999, "min_confidence": 0} | settings
    return SpecConfig(draft=str(draft), **given)  # type: ignore[arg-type]


@torch.inference_mode()
def target_hidden(target: LoadedTarget, text: list[int]) -> torch.Tensor:
    found: torch.Tensor = target.model.decoder(torch.tensor(text), torch.arange(len(text)), DenseAttention(1))  # type: ignore[attr-defined]
    return found


@torch.inference_mode()
def reference_scores(target: LoadedTarget, draft: MtpDraft, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities after ``path``: known rows with the target's hidden states, each draft with the output before it."""
    hidden = target_hidden(target, text[:-1])
    tokens = text[1:]
    for step in range(len(path) + 1):
        positions = torch.arange(len(tokens))
        out = draft.layers[0](draft.embed(torch.tensor(tokens)), hidden, draft.rotary(positions), 0, DenseAttention(1))
        if step < len(path):
            tokens = [*tokens, path[step]]
            hidden = torch.cat((hidden, out[-1:]))
    return draft.logits(0, out[-1]).log_softmax(-1)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("recorded", [True, False])
def test_drafts_and_kv_are_those_of_a_fresh_prefill_after_every_accept_pattern(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, tmp_path: Path, topk: int, chunk: int, recorded: bool
) -> None:
    save_draft(random_draft(toy_modules), tmp_path, {})
    draft = load_draft(tmp_path, toy_modules.checkpoint, toy_modules.model.decoder)  # type: ignore[attr-defined]
    check_drafter(
        toy_native if recorded else toy_modules,
        spec_with(tmp_path, topk=topk, num_draft_tokens=21 if topk > 1 else None),
        EngineConfig(max_prefill_tokens=chunk, page_size=4, enforce_eager=not recorded),
        plain_answers(toy_modules, SAMPLING),
        SAMPLING,
        lambda text, path: reference_scores(toy_modules, draft, text, path),
        lambda text: target_hidden(toy_modules, text),
    )


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize(("method", "recorded"), [("eagle", True), ("eagle3", True), ("eagle3", False)])
def test_published_heads_too(
    toy_modules: LoadedTarget,
    toy_native: LoadedTarget,
    toy_model: Path,
    tmp_path: Path,
    method: str,
    topk: int,
    chunk: int,
    recorded: bool,
) -> None:
    head = Head(Llama(toy_model), (0, 1, 2) if method == "eagle3" else ())
    head.save_flat(tmp_path, **({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if method == "eagle3" else {}))
    check_drafter(
        toy_native if recorded else toy_modules,
        spec_with(tmp_path, topk=topk, num_draft_tokens=21 if topk > 1 else None, method=method),
        EngineConfig(max_prefill_tokens=chunk, page_size=4, enforce_eager=not recorded),
        plain_answers(toy_modules, SAMPLING),
        SAMPLING,
        head.scores,
        head.prepared,
    )


@pytest.mark.parametrize("topk", [1, 2])
def test_sampled_output_is_that_of_plain_decoding(toy_modules: LoadedTarget, toy_draft: Path, topk: int) -> None:
    wish = dataclasses.replace(SAMPLING, temperature=0.9, seed=3)
    answers = plain_answers(toy_modules, wish)
    engine, _ = make(toy_modules, spec_with(toy_draft, topk=topk), EngineConfig())
    reqs = [engine.add_request(str(i), prompt, wish) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert sum(sum(r.spec.correct) for r in reqs) > 0


def test_preempted_requests_begin_again(toy_modules: LoadedTarget, toy_draft: Path) -> None:
    engine, _ = make(toy_modules, spec_with(toy_draft), EngineConfig(kv_tokens=64, page_size=4, max_prefill_tokens=5))
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
        engine.kv.check()
    assert sum(r.num_preemptions for r in reqs) > 0
    assert {r.request_id: r.output_token_ids for r in reqs} == plain_answers(toy_modules, SAMPLING)


def test_rows_wait_where_there_are_too_many_requests(toy_modules: LoadedTarget, tmp_path: Path) -> None:
    """With room for one request's draft, three draft nothing; the last one to run goes on exactly."""
    save_draft(random_draft(toy_modules), tmp_path, {})
    draft = load_draft(tmp_path, toy_modules.checkpoint, toy_modules.model.decoder)  # type: ignore[attr-defined]
    wishes = [dataclasses.replace(SAMPLING, max_tokens=n) for n in (6, 8, 24)]
    engine, worker = make(toy_modules, spec_with(tmp_path, max_verify_rows=4), EngineConfig(max_prefill_tokens=7))
    reqs = [engine.add_request(str(i), p, w) for i, (p, w) in enumerate(zip(PROMPTS, wishes, strict=True))]
    while engine.has_work:
        engine.step()
        for name, state in worker.states.items():  # type: ignore[attr-defined]
            if state.growth is not None:
                text = engine.requests[name].token_ids
                best = reference_scores(toy_modules, draft, text, []).argmax()
                assert state.growth.tree.tokens[0] == draft.target_ids[best]
    assert set(reqs[0].spec.proposed) == {0}
    assert max(reqs[2].spec.proposed) == 3
    for req, answer in zip(reqs, plain_answers(toy_modules, SAMPLING).values(), strict=True):
        assert req.output_token_ids == answer[: len(req.output_token_ids)]


def test_contradictions_are_named(toy_draft: Path) -> None:
    for wrong, named in (({"ngram_match": 2}, "ngram_match"), ({"exact_kv": False}, "exact_kv")):
        with pytest.raises(UserError, match=named):
            spec_with(toy_draft, **wrong)
