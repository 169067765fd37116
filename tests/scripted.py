"""A worker whose drafts are given, so that any accept pattern can be forced on a real target."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from opentelemetry.sdk.trace.export import SpanExporter

from tiercel.core.batch import Batch
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.request import Request
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.kvcache.manager import KvCacheManager
from tiercel.speculative import registry
from tiercel.speculative.base_worker import ComputedRows, SpecWorker, VerifyInput
from tiercel.speculative.registry import WorkerContext
from tiercel.speculative.target_runner import TargetRunner

Propose = Callable[[Request, int], list[int]]
"""Drafts for a request, at most so many."""


class ScriptedWorker(SpecWorker):
    """Proposes what ``propose`` says."""

    method: ClassVar[str] = "scripted"

    def __init__(self, target: TargetRunner, num_steps: int, propose: Propose) -> None:
        super().__init__(target, num_steps)
        self.propose = propose
        self.forgotten: list[str] = []

    def draft(self, batch: Batch) -> VerifyInput:
        chains = [self.propose(req, req.draft_depth(self.num_steps)) for req in batch.reqs]
        born = [self.step - 2 if chain else None for chain in chains]
        return VerifyInput(chains, [tuple(range(len(chain))) for chain in chains], born)

    def draft_extend(self, rows: ComputedRows) -> list[int]:
        return []

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def scripted_engine(
    target: LoadedTarget,
    propose: Propose,
    num_steps: int,
    config: EngineConfig | None = None,
    trace: TraceConfig | None = None,
    exporters: Sequence[SpanExporter] = (),
) -> Engine:
    """An engine whose worker is scripted."""

    def build(context: WorkerContext) -> SpecWorker:
        return ScriptedWorker(context.target, num_steps, propose)

    before = registry.WORKERS["none"]
    registry.WORKERS["none"] = build
    try:
        return Engine(config or EngineConfig(), SpecConfig(method="none"), trace or TraceConfig(), target, exporters)
    finally:
        registry.WORKERS["none"] = before


def run(engine: Engine, check: Callable[[KvCacheManager], None] = KvCacheManager.check) -> dict[str, list[int]]:
    """Step until nothing is left, checking the pool after every step; tokens by request id."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request.request_id, []).extend(output.token_ids)
        check(engine.kv)
    return tokens
