"""Prometheus metrics: a sink that counts what the trace pipeline brings, and the port that shows it.

Counts of requests come from step records, so that long answers show while they run. What the pipeline had to drop is made up for
when the request ends, from its record: counters equal the sums over responses, spans and records, whatever was lost on the
way. Only histograms of steps and tokens lack dropped steps.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from tiercel.core.batch import ForwardMode, RequestRound, StepRecord
from tiercel.core.depths import REASONS, DepthTable
from tiercel.core.request import SOURCE_NGRAM
from tiercel.observability import metric_table as table
from tiercel.observability.metric_store import MetricStore, Reading
from tiercel.observability.metrics_server import MetricsServer
from tiercel.observability.records import RequestRecord
from tiercel.observability.req_time_stats import ReqTimeStats


class Load(NamedTuple):
    """How busy the engine is at this moment."""

    running: int = 0
    waiting: int = 0
    kv_slots_used: int = 0
    kv_slots: int = 0


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the metrics need to know of the engine.

    Args:
        method: who drafts.
        num_steps: drafts per round at most; each position has its series from the start.
        num_layers: MTP layers in use.
        load: asked at every scrape, on the scraper's thread.
        depths: how many of them run at which load; None where there is no such choice.
    """

    method: str = "none"
    num_steps: int = 0
    num_layers: int = 0
    load: Callable[[], Load] = Load
    depths: DepthTable | None = None


@dataclass(slots=True)
class _Counted:
    """What has been counted of a request that has not ended."""

    has_first_token: bool = False
    emitted: int = 0
    next_round: int = 0
    missing_rounds: list[int] = field(default_factory=list)
    length: int = 0
    """Tokens, the prompt's included, when the last were delivered; 0 before the first."""
    delivered_ns: int = 0


class MetricsSink:
    """Counts steps and requests, on the exporter thread.

    Args:
        model: model name.
        engine: shape and load of the engine.
        vllm_names: see ``MetricStore``.
        port: of an HTTP server on this machine, until ``close``; 0 takes a free one, None starts none.

    Raises:
        UserError: the port cannot be used.
    """

    def __init__(self, model: str, engine: EngineView, *, vllm_names: bool = False, port: int | None = None) -> None:
        self.store = MetricStore(model, vllm_names=vllm_names)
        self._engine = engine
        self._open: dict[str, _Counted] = {}
        self._declare()
        self.store.readers.append(self._read_load)
        self._server = None if port is None else MetricsServer(self.store, port)

    @property
    def port(self) -> int | None:
        """Where the server listens; None without one."""
        return self._server.port if self._server else None

    def on_step(self, record: StepRecord) -> None:
        store = self.store
        with store.lock:
            for part in record.extends:
                if part.sampled_token_id is not None and part.sampled_token_id >= 0:
                    self._first_token(part.request_id, part.end, record.end_ns)
            for done in record.rounds:
                self._round(done, record.end_ns)
            if record.mode is ForwardMode.EXTEND:
                store.observe(table.PREFILL_SECONDS, (record.end_ns - record.start_ns) / 1e9)
                return
            store.add(table.DEPTH_ROUNDS, labels=(str(record.num_steps), record.depth_reason))
            for stage, ns in record.stage_ns.items():
                store.observe(table.STAGE_SECONDS, ns / 1e9, (stage,))
            start = record.draft_extend_start_ns
            for layer, end in enumerate(record.layer_end_ns):
                store.observe(table.LAYER_SECONDS, (end - start) / 1e9, (str(layer),))
                start = end

    def on_request(self, record: RequestRecord, _: ReqTimeStats) -> None:
        with self.store.lock:
            self._make_up(self._open.pop(record.request_id, _Counted()), record)
            self.store.add(table.REQUESTS, labels=(record.finish_reason,))
            self.store.add(table.PREEMPTIONS, record.num_preemptions)
            times = {table.TTFT: record.time_to_first_token_ms, table.QUEUE: record.queue_ms, table.E2E: record.e2e_ms}
            for family, ms in times.items():
                if ms is not None:
                    self.store.observe(family, ms / 1e3)

    def close(self) -> None:
        if self._server:
            self._server.close()

    def _declare(self) -> None:
        engine, declare = self._engine, self.store.declare
        for position in range(engine.num_steps):
            declare(table.ACCEPTED_PER_POS, (str(position),))
            declare(table.REACHED_PER_POS, (str(position),))
        for stage in table.STAGES:
            declare(table.STAGE_SECONDS, (stage,))
        for layer in range(engine.num_layers):
            declare(table.LAYER_SECONDS, (str(layer),))
        for reason in table.FINISH_REASONS:
            declare(table.REQUESTS, (reason,))
        for num_steps, reason in product(range(engine.num_layers + 1), REASONS):
            declare(table.DEPTH_ROUNDS, (str(num_steps), reason))
        for drafter in table.DRAFTERS:
            for family in (table.DRAFTER_ROUNDS, table.DRAFTER_DRAFT_TOKENS, table.DRAFTER_ACCEPTED_TOKENS):
                declare(family, (drafter,))

    def _read_load(self) -> Iterable[Reading]:
        load = self._engine.load()
        yield table.ENGINE_INFO, (self._engine.method, str(self._engine.num_steps)), 1
        if depths := self._engine.depths:
            limited = [depth for depth in depths.depths if depth.requests is not None]
            for depth in (*limited, depths.at(sys.maxsize)):
                labels = (str(depth.requests or "more"), str(depth.lookup).lower(), str(depths.source))
                yield table.DEPTH_STEPS, labels, depth.num_steps
        yield table.RUNNING, (), load.running
        yield table.WAITING, (), load.waiting
        yield table.KV_SLOTS_USED, (), load.kv_slots_used
        yield table.KV_SLOTS, (), load.kv_slots
        yield table.KV_USAGE, (), load.kv_slots_used / load.kv_slots if load.kv_slots else 0

    def _first_token(self, request_id: str, prompt_tokens: int, at_ns: int) -> None:
        counted = self._open.setdefault(request_id, _Counted())
        counted.has_first_token = True
        counted.length, counted.delivered_ns = prompt_tokens + 1, at_ns
        self.store.add(table.PROMPT_TOKENS, prompt_tokens)
        self.store.add(table.GENERATION_TOKENS)

    def _round(self, done: RequestRound, at_ns: int) -> None:
        counted = self._open.setdefault(done.request_id, _Counted())
        counted.missing_rounds += range(counted.next_round, done.round)
        counted.next_round = done.round + 1
        counted.emitted += done.num_emitted_tokens
        self._count(len(done.draft_token_ids), done.num_correct_drafts, _drafter(done), done.depth)
        self.store.add(table.EMITTED_TOKENS, done.num_emitted_tokens)
        self.store.add(table.GENERATION_TOKENS, done.num_emitted_tokens)
        length = done.context_len + done.num_emitted_tokens
        if counted.length:
            tokens = length - counted.length  # of this round, and of dropped ones before it
            self.store.observe(table.INTER_TOKEN, (at_ns - counted.delivered_ns) / 1e9 / tokens, times=tokens)
        counted.length, counted.delivered_ns = length, at_ns

    def _count(self, proposed: int, correct: int, drafter: str, depth: int) -> None:
        add = self.store.add
        add(table.DRAFTER_ROUNDS, labels=(drafter,))
        add(table.DRAFTER_DRAFT_TOKENS, proposed, (drafter,))
        add(table.DRAFTER_ACCEPTED_TOKENS, correct, (drafter,))
        add(table.ROUNDS)
        add(table.DRAFTS, proposed > 0)
        add(table.DRAFT_TOKENS, proposed)
        add(table.ACCEPTED_TOKENS, correct)
        for position in range(correct):
            add(table.ACCEPTED_PER_POS, labels=(str(position),))
        for position in range(min(correct + 1, depth)):
            add(table.REACHED_PER_POS, labels=(str(position),))

    def _make_up(self, counted: _Counted, record: RequestRecord) -> None:
        spec = record.spec
        for number in (*counted.missing_rounds, *range(counted.next_round, spec["num_spec_steps"])):
            drafted = spec["per_step_drafted"][number]
            self._count(drafted, spec["per_step_accepted"][number], "unknown", min(drafted, record.num_steps))
        self.store.add(table.EMITTED_TOKENS, spec["num_emitted_tokens"] - counted.emitted)
        generated = counted.has_first_token + counted.emitted
        self.store.add(table.GENERATION_TOKENS, record.completion_tokens - generated)
        self.store.add(table.PROMPT_TOKENS, 0 if counted.has_first_token else record.prompt_tokens)


def _drafter(done: RequestRound) -> str:
    if not done.draft_layers:
        return "plain"
    return "lookup" if done.draft_layers[0] == SOURCE_NGRAM else "layers"
