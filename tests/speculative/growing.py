"""Trees and chains of autoregressive drafters, held against loops that cache nothing while every accept pattern occurs."""

from collections.abc import Callable

import pytest
import torch

from tests.speculative.test_multi_layer_eagle import PROMPTS
from tests.speculative.test_tree import helped
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.request import Request
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.tree import paths
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import StepInput
from tiercel.speculative.autoregressive import DraftReader, Growth
from tiercel.speculative.autoregressive_worker import AutoregressiveWorker

Scores = Callable[[list[int], list[int]], torch.Tensor]
"""Text and path to the log-probabilities of what follows, over the draft's vocabulary, from nothing cached."""


def make(target: LoadedTarget, spec: SpecConfig, config: EngineConfig) -> tuple[Engine, AutoregressiveWorker]:
    engine = Engine(config, spec, TraceConfig(), target)
    assert isinstance(engine.worker, AutoregressiveWorker)
    return engine, engine.worker


def check_growth(growth: Growth, reader: DraftReader, scores: Scores, text: list[int]) -> int:
    """Every candidate is the reference's; how many places were looked at."""
    tree, roads = growth.tree, paths(growth.tree.parents)
    for parent in sorted({*tree.parents}):
        path = [tree.tokens[j] for j in (roads[parent] if parent >= 0 else [])]
        mine = [j for j in range(len(tree.tokens)) if tree.parents[j] == parent]
        best = scores(text, path).topk(len(mine))
        assert [tree.tokens[j] for j in mine] == reader.target_ids[best.indices].tolist()
        reach = tree.scores[parent] if parent >= 0 else 0.0
        assert [tree.scores[j] - reach for j in mine] == pytest.approx(best.values.tolist(), abs=2e-4)
    return len({*tree.parents})


def check_kv(worker: AutoregressiveWorker, req: Request, end: int, hidden: torch.Tensor | None) -> None:
    """The draft's KV of rows ``0 .. end - 1`` is that of a fresh prefill."""
    reader, slots = worker.reader, worker.kv.slots(req.request_id)[:end]
    like = reader.storages[0].keys
    fresh = [KvStorage(end, like.shape[0], like.shape[2], like.dtype, like.device) for _ in reader.storages]
    rows = Rows([Segment(0, end, torch.arange(end))], like.device)
    tokens = torch.tensor(req.token_ids[reader.shift : end + reader.shift])
    reader.model.run(StepInput(rows, tokens, torch.tensor([end - 1]), target_hidden=hidden), fresh)
    for kept, expected in zip(reader.storages, fresh, strict=True):
        torch.testing.assert_close(kept.keys[:, slots], expected.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept.values[:, slots], expected.values, atol=1e-4, rtol=1e-4)


def check_drafter(
    target: LoadedTarget,
    spec: SpecConfig,
    config: EngineConfig,
    answers: dict[str, list[int]],
    sampling: SamplingParams,
    scores: Scores,
    hidden: Callable[[list[int]], torch.Tensor] | None = None,
) -> None:
    """Run prompts with the right path at changing places; compare trees, KV and output."""
    engine, worker = make(target, spec, config)
    grow, seen_places = worker.grow, []

    def watched(growths: dict[str, Growth], depths: dict[str, int]) -> None:
        grow(growths, depths)
        if sum(seen_places) < 150:
            seen_places.extend(check_growth(g, worker.reader, scores, g.token_ids) for g in growths.values())

    worker.grow = watched  # type: ignore[method-assign]
    seen = helped(engine, answers)
    reqs = [engine.add_request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    checked = 0
    while engine.has_work:
        engine.step()
        engine.kv.check()
        for req in engine.requests.values():
            state = worker.states.get(req.request_id)  # type: ignore[attr-defined]
            if state is not None and 0 < state.end <= req.num_computed and checked < 40:
                rows = None if hidden is None else hidden(req.token_ids[: state.end])
                check_kv(worker, req, state.end, rows)
                checked += 1
    assert checked > 10
    assert sum(seen_places) > 20
    assert {r.request_id: r.output_token_ids for r in reqs} == answers
    assert {len(path) for path in seen} == set(range(worker.num_steps + 1))
    if worker.topk > 1:
        assert sum(path != tuple(range(len(path))) for path in seen) > 3
    assert worker.states == {}  # type: ignore[attr-defined]
    assert engine.kv.num_slots_used == 0
