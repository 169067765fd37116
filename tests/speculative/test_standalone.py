"""The standalone drafter against its own model's forward over the whole text, with nothing cached."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.speculative.growing import check_drafter, make
from tests.speculative.test_multi_layer_eagle import PROMPTS, SAMPLING, plain_answers
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.engine.engine import Engine, LoadedTarget, load_target
from tiercel.speculative.standalone_worker import StandaloneWorker


def spec_with(draft: Path, **settings: object) -> SpecConfig:
    given = {"num_steps": 3, "max_verify_rows": 999, "min_confidence": 0} | settings
    return SpecConfig(method="standalone", draft=str(draft), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("recorded", [True, False])
def test_drafts_and_kv_are_those_of_a_fresh_prefill_after_every_accept_pattern(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, toy_small_model: Path, topk: int, chunk: int, recorded: bool
) -> None:
    reference = LlamaForCausalLM.from_pretrained(toy_small_model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def scores(text: list[int], path: list[int]) -> torch.Tensor:
        found: torch.Tensor = reference(torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1)
        return found

    target = toy_native if recorded else toy_modules
    config = EngineConfig(max_prefill_tokens=chunk, page_size=4, enforce_eager=not recorded)
    spec = spec_with(toy_small_model, topk=topk, num_draft_tokens=21 if topk > 1 else None)
    check_drafter(target, spec, config, plain_answers(toy_modules, SAMPLING), SAMPLING, scores)


def test_accepted_rows_are_not_read_again(toy_modules: LoadedTarget, toy_model: Path) -> None:
    """With the target itself as draft every draft is right: from the second round on two rows are new, then one."""
    engine, worker = make(toy_modules, spec_with(toy_model), EngineConfig(enforce_eager=True))
    req = engine.add_request("0", PROMPTS[0], SAMPLING)
    run, read = worker.reader.model.run, []
    worker.reader.model.run = lambda step, storages: (read.append(step.rows.num_rows), run(step, storages))[1]  # type: ignore[method-assign, func-returns-value]
    while engine.has_work:
        engine.step()
    assert {*req.spec.correct[:-1]} == {3}
    assert read[:10] == [len(PROMPTS[0]), 1, 1, 1, 2, 1, 1, 2, 1, 1]


def test_sampled_output_is_that_of_plain_decoding(toy_modules: LoadedTarget, toy_small_model: Path) -> None:
    wish = dataclasses.replace(SAMPLING, temperature=0.9, seed=3)
    answers = plain_answers(toy_modules, wish)
    for topk in (1, 2):
        engine, _ = make(toy_modules, spec_with(toy_small_model, topk=topk), EngineConfig(enforce_eager=True))
        reqs = [engine.add_request(str(i), prompt, wish) for i, prompt in enumerate(PROMPTS)]
        while engine.has_work:
            engine.step()
        assert {r.request_id: r.output_token_ids for r in reqs} == answers
        assert sum(sum(r.spec.correct) for r in reqs) > 10


def test_preempted_requests_begin_again(toy_modules: LoadedTarget, toy_small_model: Path) -> None:
    config = EngineConfig(kv_tokens=64, page_size=4, max_prefill_tokens=5, enforce_eager=True)
    engine, worker = make(toy_modules, spec_with(toy_small_model), config)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
        engine.kv.check()
    assert sum(r.num_preemptions for r in reqs) > 0
    assert {r.request_id: r.output_token_ids for r in reqs} == plain_answers(toy_modules, SAMPLING)
    assert isinstance(worker, StandaloneWorker)


@pytest.mark.parametrize("draft_is_larger", [True, False])
def test_vocabularies_may_be_padded_differently(
    toy_model: Path, toy_small_model: Path, tmp_path: Path, draft_is_larger: bool
) -> None:
    """The same tokens, and rows beyond them in one of the two embeddings, as Qwen2.5's sizes have them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((toy_model / name).read_bytes())
    wide = LlamaForCausalLM.from_pretrained(toy_small_model if draft_is_larger else toy_model, dtype=torch.float32)
    wide.resize_token_embeddings(264, mean_resizing=False)
    wide.model.embed_tokens.weight.data[259:] = 3.0  # likelier than any token
    if not draft_is_larger:
        wide.model.embed_tokens.weight.data[259:] = 0.0
    wide.save_pretrained(tmp_path)
    model, draft = (toy_model, tmp_path) if draft_is_larger else (tmp_path, toy_small_model)
    config = EngineConfig(model=str(model), enforce_eager=True)
    target = load_target(config, SpecConfig(method="none"))
    for topk in (1, 2):
        engine, _ = make(target, spec_with(draft, topk=topk), config)
        reqs = [
            engine.add_request(str(i), [*prompt, 260 - 2 * draft_is_larger], SAMPLING)
            for i, prompt in enumerate(PROMPTS)
        ]
        while engine.has_work:
            engine.step()
        plain = Engine(config, SpecConfig(method="none"), TraceConfig(), target)
        expected = [plain.add_request(str(i), r.prompt_token_ids, SAMPLING) for i, r in enumerate(reqs)]
        while plain.has_work:
            plain.step()
        assert [r.output_token_ids for r in reqs] == [r.output_token_ids for r in expected]


def test_a_draft_model_is_named_and_has_the_targets_tokens(
    toy_model: Path, toy_small_model: Path, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(toy_model))
    with pytest.raises(UserError, match="--draft"):
        load_target(config, SpecConfig(method="standalone"))
    for file in toy_small_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["thx"] = tokens["model"]["vocab"].pop("th")
    tokens["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match="tokenizer has other tokens"):
        load_target(config, SpecConfig(method="standalone", draft=str(tmp_path)))
    for wrong, named in (({"ngram_match": 2}, "ngram_match"), ({"exact_kv": False}, "exact_kv"), ({"topk": 0}, "topk")):
        with pytest.raises(UserError, match=named):
            spec_with(toy_small_model, **wrong)
