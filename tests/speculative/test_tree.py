"""Trees of drafts: their rows against chains bit by bit, their drafts against a loop that caches nothing, their output."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.conftest import random_draft
from tests.speculative.test_multi_layer_eagle import PROMPTS, SAMPLING, plain_answers
from tiercel.bench.planted import plant
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.request import Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.tree import depth_of, paths
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.attention import DenseAttention
from tiercel.models.mtp import MtpDraft
from tiercel.models.mtp_checkpoint import load_draft, save_draft
from tiercel.models.step import StepInput, StepOutput
from tiercel.speculative.draft_tree import DraftTree
from tiercel.speculative.multi_layer_eagle_worker import MultiLayerEagleWorker
from tiercel.speculative.verify import accept

CPU = torch.device("cpu")
PARENTS = (-1, -1, 0, 0, 1, 2, 4, 4)


def test_paths_and_depth() -> None:
    assert paths((-1, -1, 0, 1, 3)) == [[0], [1], [0, 2], [1, 3], [1, 3, 4]]
    assert (depth_of((-1, -1, 0, 1, 3), 5), depth_of((), 4), depth_of((), 0)) == (3, 4, 0)


@pytest.mark.parametrize(
    ("target", "path", "bonus"),
    [
        # rows: the last token, then drafts 5, 6 (siblings), 7 and 8 after 5, 7 after 6
        ([9, 0, 0, 0, 0, 0], [], 9),
        ([5, 9, 0, 0, 0, 0], [0], 9),
        ([5, 8, 0, 0, 3, 0], [0, 3], 3),
        ([6, 8, 7, 0, 0, 4], [1, 4], 4),
        ([6, 7, 8, 0, 0, 0], [1], 8),
    ],
)
def test_the_path_that_the_target_chooses_is_accepted(target: list[int], path: list[int], bonus: int) -> None:
    said = accept([[5, 6, 7, 8, 7]], [target], [(-1, -1, 0, 0, 1)])
    assert (said.accepted, said.num_correct_drafts_per_req_cpu, said.bonus_token_ids) == ([path], [len(path)], [bonus])


def test_the_likeliest_drafts_are_kept_and_the_likeliest_path_comes_first() -> None:
    tree = DraftTree()
    tree.grow([[5, 6]], [[-0.2, -1.0]], 2, -9)
    tree.grow([[7, 8], [7, 9]], [[-2.0, -3.0], [-0.1, -4.0]], 2, -1.5)
    assert tree.frontier == [4]  # of -1.1 and -2.2 the second is below the floor
    assert tree.best(3, 3) == ([5, 6, 7], (0, 0, 1), (-1, -1, 1))
    assert tree.best(4, 3) == ([5, 7, 6, 7], (0, 1, 0, 1), (-1, 0, -1, 2))
    assert tree.best(9, 1) == ([5, 6], (0, 0), (-1, -1))
    assert tree.best(1, 3) == ([5], (0,), ())
    assert tree.best(-2, 3) == ([], (), ())


def forward(target: LoadedTarget, kept: list[KvStorage], segment: Segment, tokens: list[int]) -> StepOutput:
    rows = Rows([segment], CPU)
    return target.model.run(StepInput(rows, torch.tensor(tokens), torch.arange(len(tokens)), with_logits=True), kept)


def storages(target: LoadedTarget) -> list[KvStorage]:
    shape = target.checkpoint.description
    return [KvStorage(400, shape.num_kv_heads, shape.head_dim, torch.float32, CPU) for _ in range(shape.num_layers)]


@pytest.mark.parametrize("context", [1, 60, 62, 64, 130])
@pytest.mark.parametrize("recorded", [True, False])
def test_every_path_of_a_tree_gives_what_a_chain_gives(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, context: int, recorded: bool
) -> None:
    """Bit by bit in the CPU library, before and after its KV is moved to where a chain has it."""
    target = toy_native if recorded else toy_modules
    prompt = [(7 * i) % 250 for i in range(context)]
    tokens = [31, 41, 59, 26, 53, 58, 97, 93, 23]  # the last token, then the drafts
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(3))
    base = context + 1
    roads = [[base + j for j in path] for path in paths(PARENTS)]
    for draft, path in enumerate(paths(PARENTS)):
        chain, tree = storages(target), storages(target)
        for kept in (chain, tree):
            forward(target, kept, Segment(0, context, slots), prompt)
        end = base + len(tokens) - 1
        ours = forward(target, tree, Segment(context, end, slots, roads), tokens)
        text = [tokens[0], *(tokens[1 + j] for j in path)]
        theirs = forward(target, chain, Segment(context, base + len(path), slots), text)
        assert ours.logits is not None
        assert theirs.logits is not None
        for storage in tree:
            storage.move(slots[roads[draft]], slots[base : base + len(path)])
        after = [
            forward(target, kept, Segment(base + len(path), base + len(path) + 1, slots), [77]).logits
            for kept in (tree, chain)
        ]
        rows = [0, *(1 + j for j in path)]
        if recorded:
            assert torch.equal(ours.logits[rows], theirs.logits)
            assert torch.equal(after[0], after[1])  # type: ignore[arg-type]
        else:
            torch.testing.assert_close(ours.logits[rows], theirs.logits, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(after[0], after[1], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def reference_scores(target: LoadedTarget, draft: MtpDraft, token_ids: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities after ``path``, every layer over the whole text."""
    rows = len(token_ids) - 1
    attention, positions = DenseAttention(1), torch.arange(rows)
    hidden = first = target.model.decoder(torch.tensor(token_ids[:-1]), positions, attention)  # type: ignore[attr-defined]
    known = [*token_ids, *path]
    for i in range(len(path) + 1):
        source = hidden if draft.description.chained else first
        inputs = torch.tensor([known[t + 1 + i] for t in range(rows)])
        hidden = draft.layers[i](draft.embed(inputs), source, draft.rotary(positions), i, attention)
    return draft.logits(len(path), hidden[-1]).log_softmax(-1)


def tree_engine(target: LoadedTarget, folder: Path, config: EngineConfig, **spec: object) -> Engine:
    settings = {"ngram_match": 0, "min_confidence": 0, "max_verify_rows": 999, "topk": 3, "num_draft_tokens": 11} | spec
    return Engine(config, SpecConfig(draft=str(folder), **settings), TraceConfig(), target)  # type: ignore[arg-type]


def helped(engine: Engine, answers: dict[str, list[int]]) -> Counter[tuple[int, ...]]:
    """Let some trees hold the right path, so that every accept pattern occurs; counts what was accepted."""
    plant(engine.worker, answers)
    judged, seen = engine.worker.verify, Counter[tuple[int, ...]]()

    def verify(batch, sent):  # type: ignore[no-untyped-def]
        said = judged(batch, sent)
        seen.update(tuple(path) for path in said[1].accepted)
        return said

    engine.worker.verify = verify  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("recorded", [True, False])
def test_trees_equal_a_loop_that_caches_nothing_after_every_accept_pattern(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, tmp_path: Path, chained: bool, chunk: int, recorded: bool
) -> None:
    save_draft(random_draft(toy_modules, chained=chained), tmp_path, {})
    draft = load_draft(tmp_path, toy_modules.checkpoint, toy_modules.model.decoder)  # type: ignore[attr-defined]
    answers = plain_answers(toy_modules, SAMPLING)
    target = toy_native if recorded else toy_modules
    engine = tree_engine(target, tmp_path, EngineConfig(max_prefill_tokens=chunk, page_size=4), num_draft_tokens=21)
    seen = helped(engine, answers)
    reqs = [engine.add_request(str(i), prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    assert isinstance(engine.worker, MultiLayerEagleWorker)
    checked = 0
    while engine.has_work:
        outputs = engine.step()
        engine.kv.check()
        for req in {o.request.request_id: o.request for o in outputs}.values():
            state = engine.worker.states.get(req.request_id)
            if state is None or state.tree is None or not req.draft_depth(1) or checked > 60:
                continue
            check_tree(toy_modules, draft, req, state.tree)
            checked += 1
    assert checked > 20
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert engine.kv.num_slots_used == 0
    moved = [path for path in seen if path != tuple(range(len(path)))]
    assert len(moved) > 3
    assert {len(path) for path in seen} == {0, 1, 2, 3}


def check_tree(target: LoadedTarget, draft: MtpDraft, req: Request, tree: DraftTree) -> None:
    roads = paths(tree.parents)
    for parent in sorted({*tree.parents}):
        path = [tree.tokens[j] for j in (roads[parent] if parent >= 0 else [])]
        scores = reference_scores(target, draft, req.token_ids, path)
        mine = [j for j in range(len(tree.tokens)) if tree.parents[j] == parent]
        best = scores.topk(3)
        assert [tree.tokens[j] for j in mine] == draft.target_ids[best.indices].tolist()
        reach = tree.scores[parent] if parent >= 0 else 0.0
        assert [tree.scores[j] - reach for j in mine] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_that_of_plain_decoding(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, toy_draft: Path, batch: int, num_steps: int, temperature: float
) -> None:
    prompts = [[(5 * i + 3 * j) % 250 for j in range(1 + 4 * i)] for i in range(8)]
    wish = SamplingParams(max_tokens=14, temperature=temperature, seed=5, ignore_eos=True)
    for target in (toy_modules, toy_native):
        plain = Engine(EngineConfig(), SpecConfig(method="none"), TraceConfig(), target)
        expected = [plain.add_request(str(i), p, wish) for i, p in enumerate(prompts)]
        while plain.has_work:
            plain.step()
        answers = {r.request_id: r.output_token_ids for r in expected}
        for chunk in (7, 16, 512):
            config = EngineConfig(max_prefill_tokens=chunk, max_batch_size=batch)
            engine = tree_engine(target, toy_draft, config, num_steps=num_steps)
            helped(engine, answers)
            reqs = [engine.add_request(str(i), p, wish) for i, p in enumerate(prompts)]
            while engine.has_work:
                engine.step()
            assert {r.request_id: r.output_token_ids for r in reqs} == answers
            assert sum(sum(r.spec.correct) for r in reqs) > 0
            assert all(d <= num_steps for r in reqs for d in r.spec.depths)


def test_a_pool_that_is_full_makes_trees_smaller(toy_modules: LoadedTarget, toy_draft: Path) -> None:
    wish = dataclasses.replace(SAMPLING, max_tokens=12)
    engine = tree_engine(toy_modules, toy_draft, EngineConfig(kv_tokens=32, page_size=4))
    req = engine.add_request("0", PROMPTS[0], wish)
    while engine.has_work:
        engine.step()
        engine.kv.check()
    assert req.error is None
    assert len(req.output_token_ids) == 12
    assert min(req.spec.proposed[:-2]) < max(req.spec.proposed) == 11


def test_contradictions_are_named() -> None:
    for wrong, named in (
        ({"topk": 0}, "topk=0"),
        ({"topk": 2, "exact_kv": False}, "exact_kv"),
        ({"num_draft_tokens": 5, "num_steps": 3}, "num_draft_tokens=5"),
        ({"topk": 2, "method": "ngram"}, "ngram"),
        ({"num_draft_tokens": 0, "topk": 2}, "num_draft_tokens=0"),
    ):
        with pytest.raises(UserError, match=named):
            SpecConfig(**wrong)  # type: ignore[arg-type]
