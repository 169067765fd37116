"""The round. One base class owns it, hooks included; a worker only supplies its parts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import ClassVar, final

from torch import Tensor

from tiercel.core.batch import (
    Batch,
    ForwardMode,
    GenerationBatchResult,
    RequestExtend,
    RequestRound,
    StepRecord,
    VerifyOutput,
)
from tiercel.core.depths import DepthChoice, DepthTable
from tiercel.core.logprobs import TokenLogprobs
from tiercel.core.request import SOURCE_BONUS, SOURCE_PREFILL, FinishReason, Request
from tiercel.core.tree import depth_of
from tiercel.device.parallel import SINGLE, TensorParallelGroup, draft_tp_context, speculative_moe_backend_context
from tiercel.device.placement import integers
from tiercel.observability.req_time_stats import set_time_batch
from tiercel.observability.trace import get_global_tracing_enabled
from tiercel.speculative.target_runner import LogitsOutput, TargetRunner
from tiercel.speculative.verify import accept

NO_TOKEN = (
    "no token can be chosen: the model's logits hold NaN (check the weights, or use --dtype float32), or the request's "
    "allowed_token_ids, bad_words, min_tokens and logits_processors together forbid every token"
)


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """A chain or tree of drafts per request, ready to be verified.

    ``draft_token_ids[i]`` (host) are the drafts of request i, ``draft_layers[i]`` the MTP layer behind each (or
    ``SOURCE_NGRAM``), and ``born_steps[i]`` the engine step whose draft extend made them (None: none did). ``draft_parents[i]``
    is their tree (``core.tree``); left out where all are chains.
    """

    draft_token_ids: list[list[int]]
    draft_layers: list[tuple[int, ...]]
    born_steps: list[int | None]
    draft_parents: Sequence[Sequence[int]] = ()

    def tree(self, request: int) -> Sequence[int]:
        """The tree of one request's drafts, ``()`` for a chain."""
        return self.draft_parents[request] if self.draft_parents else ()


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows that the target has just computed for good, request by request.

    ``hidden[i]`` (``[num_computed - starts[i], hidden_size]``, before the final norm) belongs to positions
    ``starts[i] .. num_computed - 1`` of request i.
    """

    reqs: list[Request]
    starts: list[int]
    hidden: list[Tensor]


class SpecWorker(ABC):
    """Draft → verify → draft extend, for a batch of requests.

    Subclasses name their ``method`` and implement ``draft``, ``draft_extend`` and ``forget``.
    ``forward_batch_generation`` is final: a worker cannot forget the hooks. ``num_steps`` are the positions drafted for per round
    at most, ``num_draft_tokens`` the drafts (more only where they form trees), ``num_layers`` the MTP layers in use, ``depths``
    how many of them run at which load (None: the method has no such choice), ``chosen`` how many may in the latest draft extend.
    """

    method: ClassVar[str]
    num_layers: int = 0
    depths: DepthTable | None = None

    def __init__(self, target: TargetRunner, num_steps: int, draft_tp_group: TensorParallelGroup = SINGLE) -> None:
        self.target, self.num_steps, self.draft_tp_group = target, num_steps, draft_tp_group
        self.num_draft_tokens = num_steps
        self.chosen = DepthChoice()
        self.kv = target.kv
        self.step = 0

    def __init_subclass__(cls) -> None:
        if "forward_batch_generation" in cls.__dict__:
            raise TypeError(f"{cls.__name__} overrides forward_batch_generation, which owns the trace hooks")

    @abstractmethod
    def draft(self, batch: Batch) -> VerifyInput:
        """Assemble the drafts to be verified in this round."""

    @abstractmethod
    def draft_extend(self, rows: ComputedRows) -> list[int]:
        """Read the rows the target has computed and prepare the next round's drafts.

        Returns:
            When each MTP layer ended, by ``now``; empty where none ran.
        """

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended or was preempted."""

    def observe(self, record: StepRecord) -> None:  # noqa: B027 - most workers have nothing to learn from it
        """A step's record is complete: costs and acceptance of its rounds can be learnt from."""

    @final
    def forward_batch_generation(self, batch: Batch) -> GenerationBatchResult:
        """Play one engine step: tokens are appended to the requests, and everything is recorded.

        Args:
            batch: made by the scheduler; the KV slots of its rows are reserved.

        Returns:
            Emitted counts, correct drafts per request, and the step's record (``start_ns``/``end_ns`` left to the engine).
        """
        record = StepRecord(self.step, batch.mode, self.method, clock=self.target.placement.clock)
        self.step += 1
        if batch.mode is ForwardMode.EXTEND:
            return self._extend(batch, record)
        return self._decode(batch, record)

    def _decode(self, batch: Batch, record: StepRecord) -> GenerationBatchResult:
        reqs, starts = batch.reqs, [req.num_computed for req in batch.reqs]
        record.draft_start_ns = self.now()
        set_time_batch(reqs, "set_spec_draft_start_time", trace_only=True, ts_ns=record.draft_start_ns)
        with draft_tp_context(self.draft_tp_group), speculative_moe_backend_context():
            verify_input = self.draft(batch)
        record.draft_end_ns = self.now()
        set_time_batch(reqs, "set_spec_draft_end_time", trace_only=True, ts_ns=record.draft_end_ns)

        record.verify_start_ns = self.now()
        set_time_batch(reqs, "set_spec_verify_start_time", trace_only=True, ts_ns=record.verify_start_ns)
        logits_output, verify_output, can_run_graph = self.verify(batch, verify_input)
        record.verify_end_ns = self.now()
        if get_global_tracing_enabled():
            for req, correct in zip(reqs, verify_output.num_correct_drafts_per_req_cpu, strict=True):
                req.time_stats.set_spec_verify_end_time(record.verify_end_ns, num_correct_drafts=correct)

        hidden = self._keep_paths(reqs, starts, verify_output.accepted, logits_output.hidden)
        num_emitted = self._commit(reqs, verify_input, verify_output, logits_output.logprobs, record)
        self._draft_extend(computed_rows(reqs, starts, hidden), record, traced=True)
        correct_drafts = verify_output.num_correct_drafts_per_req_cpu
        return GenerationBatchResult(num_emitted, correct_drafts, can_run_graph, record)

    def _extend(self, batch: Batch, record: StepRecord) -> GenerationBatchResult:
        reqs, starts, ends = batch.reqs, [req.num_computed for req in batch.reqs], batch.extend_ends
        record.draft_start_ns = record.draft_end_ns = record.verify_start_ns = self.now()
        tokens = [t for req, start, end in zip(reqs, starts, ends, strict=True) for t in req.token_ids[start:end]]
        is_last = [not r.output_token_ids and end == len(r.token_ids) for r, end in zip(reqs, ends, strict=True)]
        logits_output = self.target.forward(reqs, self._on_device(tokens), ends, [int(last) for last in is_last])
        record.verify_end_ns = self.now()

        num_emitted = []
        chosen = zip(reqs, ends, logits_output.token_ids, logits_output.logprobs, strict=True)
        for req, end, sampled, logprobs in chosen:
            record.extends.append(RequestExtend(req.request_id, req.num_computed, end, sampled[0] if sampled else None))
            req.num_computed = end
            self.kv.commit(req.request_id, end)
            num_emitted.append(deliver(req, sampled, [SOURCE_PREFILL] * len(sampled), logprobs))
        self._draft_extend(computed_rows(reqs, starts, logits_output.hidden), record, traced=False)
        return GenerationBatchResult(num_emitted, [], self.target.can_run_graph, record)

    def verify(self, batch: Batch, verify_input: VerifyInput) -> tuple[LogitsOutput, VerifyOutput, bool]:
        """Run the target over each request's last token and its drafts, and accept the drafts that it agrees with.

        Returns:
            The target's output, the verdict, and whether a graph was replayed.
        """
        drafts = verify_input.draft_token_ids
        tokens = [t for req, chain in zip(batch.reqs, drafts, strict=True) for t in (req.token_ids[-1], *chain)]
        ends = [len(req.token_ids) + len(chain) for req, chain in zip(batch.reqs, drafts, strict=True)]
        parents = verify_input.draft_parents
        counts = [len(chain) + 1 for chain in drafts]
        output = self.target.forward(batch.reqs, self._on_device(tokens), ends, counts, parents)
        return output, accept(drafts, output.token_ids, parents), self.target.can_run_graph

    def _keep_paths(
        self, reqs: list[Request], starts: list[int], accepted: list[list[int]], hidden: list[Tensor]
    ) -> list[Tensor]:
        """Where accepted drafts are not the first of their tree, move their KV and hidden states to where a chain has them."""
        moves, kept = [], []
        for req, start, path, rows in zip(reqs, starts, accepted, hidden, strict=True):
            if path == list(range(len(path))):
                kept.append(rows)
                continue
            base = start + 1
            moves.append(
                (self.kv.slots(req.request_id), [base + d for d in path], [base + i for i in range(len(path))])
            )
            kept.append(rows[self._on_device([0, *(1 + d for d in path)])])
        self.target.keep_paths(moves)
        return kept

    def _commit(
        self,
        reqs: list[Request],
        sent: VerifyInput,
        said: VerifyOutput,
        logprobs: list[list[TokenLogprobs | None]],
        record: StepRecord,
    ) -> list[int]:
        num_emitted = []
        for i, req in enumerate(reqs):
            correct, bonus = said.num_correct_drafts_per_req_cpu[i], said.bonus_token_ids[i]
            drafts, layers, context_len = sent.draft_token_ids[i], sent.draft_layers[i], len(req.token_ids)
            parents = sent.tree(i)
            if parents:
                drafts, layers, parents = _path_first(said.accepted[i], drafts, layers, parents)
            req.num_computed += correct + 1
            self.kv.commit(req.request_id, req.num_computed)
            self.kv.rollback(req.request_id)
            sources = [*layers[:correct], SOURCE_BONUS]
            on_path = [logprobs[i][row] for row in (0, *(1 + draft for draft in said.accepted[i]))]
            emitted = deliver(req, [*drafts[:correct], bonus], sources, on_path)
            num_emitted.append(emitted)
            if emitted:
                req.spec.add_round(len(drafts), correct, emitted, depth_of(parents, len(drafts)))
                record.rounds.append(
                    RequestRound(
                        request_id=req.request_id,
                        round=req.spec.num_rounds - 1,
                        context_len=context_len,
                        draft_token_ids=tuple(drafts),
                        draft_layers=layers,
                        born_step=sent.born_steps[i],
                        num_correct_drafts=correct,
                        bonus_token_id=bonus,
                        num_emitted_tokens=emitted,
                        draft_parents=tuple(parents),
                    )
                )
        return num_emitted

    def _draft_extend(self, rows: ComputedRows, record: StepRecord, *, traced: bool) -> None:
        # Finished requests have no next round, so nothing is drafted for them and their last round has no such stage.
        record.draft_extend_start_ns = self.now()
        if traced:
            start = record.draft_extend_start_ns
            set_time_batch(rows.reqs, "set_spec_draft_extend_start_time", trace_only=True, ts_ns=start)
        if rows.reqs:
            with draft_tp_context(self.draft_tp_group), speculative_moe_backend_context():
                record.layer_end_ns = self.draft_extend(rows)
        record.num_steps, record.depth_reason = self.chosen.num_steps, self.chosen.reason
        record.draft_extend_end_ns = self.now()
        if traced:
            end = record.draft_extend_end_ns
            set_time_batch(rows.reqs, "set_spec_draft_extend_end_time", trace_only=True, ts_ns=end)

    def now(self) -> int:
        """Host clock in nanoseconds, once the device has done its work."""
        self.target.placement.synchronize()
        return perf_counter_ns()

    def _on_device(self, token_ids: list[int]) -> Tensor:
        return integers(token_ids, self.target.placement.device)


def _path_first(
    path: list[int], drafts: list[int], layers: tuple[int, ...], parents: Sequence[int]
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """The same tree with its accepted path in front."""
    order = [*path, *(j for j in range(len(drafts)) if j not in path)]
    place = {-1: -1} | {draft: i for i, draft in enumerate(order)}
    moved = tuple(place[parents[j]] for j in order)
    return [drafts[j] for j in order], tuple(layers[j] for j in order), moved


def deliver(req: Request, token_ids: list[int], sources: list[int], logprobs: Sequence[TokenLogprobs | None]) -> int:
    """Append committed tokens to ``req`` up to its stop; where the target's choice was NaN (-1), end it with an error.

    As in plain decoding, the tokens before the NaN are delivered, and a stop among them comes first.

    Returns:
        How many were delivered (emitted).
    """
    count = token_ids.index(-1) if -1 in token_ids else len(token_ids)
    emitted = req.append_until_stop(token_ids[:count], sources[:count])
    req.output_logprobs += [found for found in logprobs[:emitted] if found is not None]
    if count < len(token_ids) and not req.is_finished:
        req.finish_reason, req.error = FinishReason.ERROR, NO_TOKEN
    return emitted


def computed_rows(reqs: list[Request], starts: list[int], hidden: list[Tensor]) -> ComputedRows:
    """The committed part of a forward's rows, for the requests that go on; rejected drafts' rows are cut off."""
    alive = [i for i, req in enumerate(reqs) if not req.is_finished]
    return ComputedRows(
        [reqs[i] for i in alive],
        [starts[i] for i in alive],
        [hidden[i][: reqs[i].num_computed - starts[i]] for i in alive],
    )
