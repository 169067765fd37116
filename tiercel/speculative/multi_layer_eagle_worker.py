"""Multi-layer EAGLE: one MTP layer per draft position, chained or not, each with its own exact KV cache.

Layer i reads row t as (token ``x[t + 1 + i]``, hidden state of row t) and proposes ``x[t + 2 + i]``. A draft extend runs over
the rows that the target has just computed; the last layers' last rows need tokens that nobody has verified yet, and take
the drafts of the layers before them. Those rows are provisional: with **exact KV** the next draft extend feeds them again,
from hidden states kept for the purpose, so that draft KV equals that of a fresh prefill.

Where the end of a request's text occurred in it before, what followed then is a better draft than the layers': **prompt lookup**
takes the round, and the layers are left out. They go on later, exactly, from the hidden states kept for them.
"""

import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from tiercel.core.batch import Batch, StepRecord
from tiercel.core.depths import DepthChoice, DepthTable
from tiercel.core.request import SOURCE_NGRAM, Request
from tiercel.device.placement import integers
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import DraftModel, DraftTokens, StepInput
from tiercel.speculative.adaptive import AdaptiveDepth
from tiercel.speculative.base_worker import ComputedRows, SpecWorker, VerifyInput
from tiercel.speculative.draft_tree import DraftTree, floor_of
from tiercel.speculative.kept_hidden import KeptHidden
from tiercel.speculative.logits.choose import choose, needs_logits
from tiercel.speculative.logits.rows import draft_row
from tiercel.speculative.mtp_tree import MtpTree, TreeRows
from tiercel.speculative.ngram import NOTHING, Continuation, NgramIndex
from tiercel.speculative.target_runner import TargetRunner

CATCH_UP = 8
"""Rows per token of the answer so far that layers may read at once to go on: more would cost more than they bring."""


@dataclass(slots=True)
class DraftState:
    """What is kept of one request between two draft extends.

    ``ends[i]`` rows have been read by layer i; ``hidden`` holds what some layer has to read still, or again.
    ``drafts`` are the proposals made by engine step ``born_step``, on the host, and ``sources[j]`` is the layer that draft j came
    from, or ``SOURCE_NGRAM``. ``is_certain`` says that a lookup found them where much of the text agrees;
    ``confidence`` is the first layer's probability of its latest draft. ``tree`` holds the layers' proposals where they
    draft trees.
    """

    hidden: KeptHidden
    ends: list[int]
    text: NgramIndex | None
    drafts: list[int] = field(default_factory=list)
    sources: tuple[int, ...] = ()
    born_step: int = -1
    is_certain: bool = False
    confidence: float = 0.0
    tree: DraftTree | None = None

    def propose(self, drafts: list[int], sources: Iterable[int], born_step: int, *, is_certain: bool = False) -> None:
        """Keep what the next round is to verify."""
        self.drafts, self.sources, self.born_step, self.is_certain = drafts, tuple(sources), born_step, is_certain
        self.tree = None


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One request's rows ``start .. end - 1`` of a draft extend."""

    req: Request
    state: DraftState
    start: int
    end: int

    def known_tokens(self, depth: int) -> list[int]:
        """Token ``x[end + i]`` for each layer i, -1 where it is not known yet."""
        ahead = self.req.token_ids[self.end : self.end + depth]
        return ahead + [-1] * (depth - len(ahead))


class MultiLayerEagleWorker(SpecWorker):
    """Drafts with the target's MTP layers.

    Args:
        target: runs the target; shares its KV slots with the MTP layers.
        draft: the MTP layers, at least ``num_layers`` of them.
        num_layers: layers in use.
        lookup: ``SpecConfig.lookup``: tokens that must agree for prompt lookup (0: off), and its drafts per round at most.
        min_confidence: a request is drafted for, beyond its first draft, while its drafts so far are all right with this
            probability in the layers' own eyes; 0: always.
        exact_kv: feed provisional rows again.
        max_verify_rows: rows that a verify may hold; with more requests each gets fewer drafts, down to none but those of the
            long matches.
        depths: layers and prompt lookup by number of requests; None: as many layers as ``max_verify_rows`` has rows for. Layers
            that are left out go on later from hidden states kept for them, so drafts are the same as if they had run all along.
        is_adaptive: choose K, 0 included, by what rounds cost and how often drafts are right; ``depths`` is then where it
            begins, and still says where prompt lookup drafts.
        topk: candidates after each draft: above 1 the layers draft trees (needs ``exact_kv``).
        num_draft_tokens: drafts in a tree at most; None: ``topk`` times ``num_layers``.
        max_batch_size: requests at once at most (trees only).
    """

    method: ClassVar[str] = "multi-layer-eagle"

    def __init__(
        self,
        target: TargetRunner,
        draft: DraftModel,
        num_layers: int,
        *,
        lookup: tuple[int, int] = (0, 0),
        min_confidence: float = 0.0,
        exact_kv: bool = True,
        max_verify_rows: int = sys.maxsize,
        depths: DepthTable | None = None,
        is_adaptive: bool = False,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        max_batch_size: int = 1,
    ) -> None:
        (self.match, self.max_lookup), self.min_confidence = lookup, min_confidence
        super().__init__(target, max(num_layers, self.max_lookup))
        self.model, self.num_layers, self.max_verify_rows = draft, num_layers, max_verify_rows
        self.depths: DepthTable = depths or DepthTable.of_rows(max_verify_rows, num_layers)
        self.adaptive = AdaptiveDepth(num_layers, self.depths) if is_adaptive and num_layers else None
        self.num_refed = num_layers - 1 if exact_kv and num_layers else 0
        self.states: dict[str, DraftState] = {}
        self.tree: MtpTree | None = None
        self.most_in_tree = num_draft_tokens or topk * num_layers
        self.num_scratch = 0
        if topk > 1 and num_layers:
            self.num_draft_tokens = max(self.most_in_tree, self.max_lookup)
            self.num_scratch = topk * num_layers
            floor = floor_of(min_confidence)
            self.tree = MtpTree(draft, target.noise, topk, floor, target.placement.device, self.now)
        num_slots = self.kv.num_slots_total + self.num_scratch * max_batch_size
        body, placement = draft.description.body, target.placement
        self.storages = [
            [KvStorage(num_slots, body.num_kv_heads, body.head_dim, target.kv_dtype, placement.device)]
            for _ in range(num_layers)
        ]

    def forget(self, request_id: str) -> None:
        self.states.pop(request_id, None)
        if self.adaptive:
            self.adaptive.forget(request_id)

    def observe(self, record: StepRecord) -> None:
        if self.adaptive:
            self.adaptive.observe(record)

    def _choose(self) -> DepthChoice:
        num_requests = len(self.states)
        if self.adaptive:
            return self.adaptive.choose(num_requests)
        return DepthChoice(self.depths.at(num_requests).num_steps, "table")

    def draft(self, batch: Batch) -> VerifyInput:
        """The drafts were made by the last draft extend; a request takes as many as it may still use."""
        chains, layers, born, trees = [], [], [], []
        for req in batch.reqs:
            depth = req.draft_depth(self.num_steps)
            state = self.states[req.request_id] if depth else None
            if state and state.tree:
                drafts, positions, parents = self._worthwhile_tree(req, state.tree, depth, len(batch.reqs))
                chains.append(drafts)
                layers.append(positions)
                born.append(state.born_step if drafts else None)
                trees.append(parents)
                continue
            trees.append(())
            chains.append(self._worthwhile(state, len(batch.reqs))[:depth] if state else [])
            layers.append(state.sources[: len(chains[-1])] if state else ())
            born.append(state.born_step if state and chains[-1] else None)
        return VerifyInput(chains, layers, born, trees if any(trees) else ())

    def _worthwhile_tree(
        self, req: Request, tree: DraftTree, depth: int, num_requests: int
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        rows = max(0, self.max_verify_rows // num_requests - 1)
        reserved = len(self.kv.slots(req.request_id)) - len(req.token_ids)
        depth = min(depth, self.depths.at(num_requests).num_steps)
        return tree.best(min(self.most_in_tree, rows, reserved), depth)

    def _worthwhile(self, state: DraftState, num_requests: int) -> list[int]:
        if SOURCE_NGRAM in state.sources:
            return self._worthwhile_lookup(Continuation(state.drafts, state.is_certain), num_requests)
        # What was drafted for fewer requests than there are now is cut, unless somebody who measures has chosen.
        return state.drafts if self.adaptive else state.drafts[: self.depths.at(num_requests).num_steps]

    def _worthwhile_lookup(self, found: Continuation, num_requests: int) -> list[int]:
        if not self.depths.at(num_requests).lookup:
            return []
        return found.worth_verifying(max(0, self.max_verify_rows // max(1, num_requests) - 1))

    def draft_extend(self, rows: ComputedRows) -> list[int]:
        # A request that can use no more drafts never will again: its rows are left out.
        alive = [
            (req, self._receive(req, start, hidden), start)
            for req, start, hidden in zip(rows.reqs, rows.starts, rows.hidden, strict=True)
            if req.draft_depth(self.num_steps)
        ]
        self.chosen, looks_up = self._choose(), self.depths.at(len(self.states)).lookup
        for req, state, _ in alive:
            found = self._look_up(req, state) if looks_up else NOTHING
            looked_up = self._worthwhile_lookup(found, len(self.states))
            state.propose(looked_up, (SOURCE_NGRAM,) * len(looked_up), self.step - 1, is_certain=found.is_certain)
        is_probe = self.chosen.reason == "probe"
        most = 1 if is_probe else self.chosen.num_steps
        waiting = [
            (req, state) for req, state, start in alive if not state.drafts and self._may_run(req, state, start, most)
        ]
        depth = max((req.draft_depth(most) for req, _ in waiting), default=0)
        if depth == 0:
            return []
        if is_probe:
            return self._probe(waiting)
        if not self.min_confidence or depth == 1 or self.tree:
            return self._propose(waiting, depth)
        ends = self._propose(waiting, 1)
        # Most first drafts are not sure enough for a second: the deeper layers wait, and catch up when one is.
        sure = [(req, state) for req, state in waiting if state.confidence >= self.min_confidence]
        return self._propose(sure, depth) if sure else ends

    def _propose(self, alive: list[tuple[Request, DraftState]], depth: int) -> list[int]:
        """Run the first ``depth`` layers over what they have not read, and keep their drafts; when each layer ended."""
        pieces = [DraftRows(req, state, self._first_row(state, depth), req.num_computed) for req, state in alive]
        if self.tree:
            return self._propose_trees(self.tree, pieces, depth)
        drafts, confidence, ends = self._run(pieces, depth)
        for piece, proposed, sure in zip(pieces, drafts.t().tolist(), confidence.t().tolist(), strict=True):
            state = piece.state
            state.confidence = sure[0]
            # A draft is worth a row if those before it are right with some confidence.
            reach = [1.0, *accumulate(sure[:-1], operator.mul)]
            kept = sum(1 for share in reach if share >= self.min_confidence)
            state.propose(proposed[:kept], range(kept), self.step - 1)
            self._has_read(piece, depth)
        return ends

    def _has_read(self, piece: DraftRows, depth: int) -> None:
        """The first ``depth`` layers have read a request's rows."""
        piece.state.ends[:depth] = [piece.end] * depth
        piece.state.hidden.forget_before(self._first_row(piece.state, self.num_layers))

    def _may_run(self, req: Request, state: DraftState, start: int, depth: int) -> bool:
        """Whether layers that were left out may go on before row ``start``: not with far more to read than was answered."""
        behind = start - min(state.ends[:depth], default=start)
        return not self.adaptive or behind <= CATCH_UP * max(0, start + 1 - req.num_prompt_tokens)

    def _probe(self, alive: list[tuple[Request, DraftState]]) -> list[int]:
        """Run the first layer over what it has not read: hold what it would have drafted against the answer, keep its last."""
        assert self.adaptive is not None
        pieces = [DraftRows(req, state, self._first_row(state, 1), req.num_computed) for req, state in alive]
        rows = self._rows(pieces)
        tokens = integers([t for p in pieces for t in p.req.token_ids[p.start + 1 : p.end + 1]], rows.device)
        how = [draft_row(p.req, t + 2) for p in pieces for t in range(p.start, p.end)]
        every = integers(range(rows.num_rows), rows.device)
        hidden = torch.cat([p.state.hidden.since(p.start) for p in pieces])
        step = StepInput(rows, tokens, every, needs_logits(how), hidden)
        output = self.model.layers[0].run(step, self.storages[0])
        drafts = choose(output.best, output.logits, how, self.target.noise, self.model.target_ids)
        for piece, own in zip(pieces, torch.split(drafts.clamp(min=0), rows.counts), strict=True):
            *earlier, newest = own.tolist()
            skipped = max(0, piece.req.num_prompt_tokens - piece.start - 2)  # rows whose next token nobody drafts
            truth = piece.req.token_ids[piece.start + 2 :]
            correct = [draft == token for draft, token in zip(earlier, truth, strict=True)]
            self.adaptive.scored(piece.req.request_id, correct[skipped:])
            piece.state.propose([newest], (0,), self.step - 1)
            self._has_read(piece, 1)
        return [self.now()]

    def _propose_trees(self, mtp: MtpTree, pieces: list[DraftRows], depth: int) -> list[int]:
        first = self.kv.num_slots_total
        trees = []
        for index, p in enumerate(pieces):
            scratch = torch.arange(self.num_scratch) + first + index * self.num_scratch
            wish = draft_row(p.req, p.end + 1)
            trees.append(TreeRows(p.req.token_ids, p.start, p.end, self.kv.slots(p.req.request_id), scratch, wish))
        ends = mtp.grow(trees, depth, torch.cat([p.state.hidden.since(p.start) for p in pieces]), self.storages)
        for piece, grown in zip(pieces, trees, strict=True):
            piece.state.propose([], (), self.step - 1)
            piece.state.tree = grown.tree if grown.tree.tokens else None
            self._has_read(piece, depth)
        return ends

    def _look_up(self, req: Request, state: DraftState) -> Continuation:
        if state.text is None or not req.output_token_ids:
            return NOTHING
        return state.text.continuation(req.token_ids, req.draft_depth(self.max_lookup))

    def _rows(self, pieces: list[DraftRows]) -> Rows:
        segments = [Segment(p.start, p.end, self.kv.slots(p.req.request_id)) for p in pieces]
        return Rows(segments, self.target.placement.device)

    def _run(self, pieces: list[DraftRows], depth: int) -> DraftTokens:
        rows = self._rows(pieces)
        device = rows.device
        last = integers([end - 1 for end in accumulate(rows.counts)], device)
        tokens = integers([t for p in pieces for t in p.req.token_ids[p.start : p.end]], device)
        known = integers(list(zip(*(p.known_tokens(depth) for p in pieces), strict=True)), device)
        hidden = torch.cat([p.state.hidden.since(p.start) for p in pieces])
        if self.model.chain is not None and not needs_logits([draft_row(p.req, p.end + 1) for p in pieces]):
            return self.model.chain(rows, tokens, last, known, hidden, self.storages)
        return self._layer_by_layer(pieces, rows, tokens, last, known, hidden)

    def _layer_by_layer(
        self, pieces: list[DraftRows], rows: Rows, tokens: Tensor, last: Tensor, known: Tensor, target_hidden: Tensor
    ) -> DraftTokens:
        hidden, is_known, newest = target_hidden, known >= 0, known[0]
        drafts, confidence, ends = [], [], []
        for index in range(len(known)):
            # One token to the left: each request's last row takes the next known token, else the newest draft.
            tokens = tokens.roll(-1)
            tokens[last] = torch.where(is_known[index], known[index], newest)
            source = hidden if self.model.description.chained else target_hidden
            how = [draft_row(p.req, p.end + 1 + index) for p in pieces]
            step = StepInput(rows, tokens, last, needs_logits(how), source, with_confidence=True)
            output = self.model.layers[index].run(step, self.storages[index])
            # A draft is only a guess: where its logits are NaN (-1) any token will do, and the next layer can embed it.
            newest = choose(output.best, output.logits, how, self.target.noise, self.model.target_ids).clamp(min=0)
            hidden = output.hidden
            drafts.append(newest)
            assert output.confidence is not None
            confidence.append(output.confidence)
            ends.append(self.now())
        return DraftTokens(torch.stack(drafts), torch.stack(confidence), ends)

    def _first_row(self, state: DraftState, depth: int) -> int:
        """Where the first ``depth`` layers have to go on: at their oldest end, less the rows that are fed again.

        Layer i's last i rows are provisional, so the deepest of those that run says how many.
        """
        return max(state.hidden.start, min(state.ends[:depth]) - min(self.num_refed, depth - 1))

    def _receive(self, req: Request, start: int, hidden: Tensor) -> DraftState:
        state = self.states.get(req.request_id)
        if state is None:
            text = NgramIndex(self.match) if self.match else None
            state = self.states[req.request_id] = DraftState(KeptHidden(start), [start] * self.num_layers, text)
        if state.hidden.end != start:
            raise RuntimeError(
                f"{req.request_id}: hidden states end at row {state.hidden.end}, the target's new rows start at {start}"
            )
        state.hidden.append(hidden)
        return state
