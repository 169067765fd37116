"""EAGLE: one layer on the target's hidden states drafts, position after position (Li et al., 2024)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tiercel.core.batch import Batch
from tiercel.models.eagle import EagleModel
from tiercel.speculative.autoregressive import Growth
from tiercel.speculative.autoregressive_worker import AutoregressiveWorker
from tiercel.speculative.base_worker import ComputedRows, VerifyInput
from tiercel.speculative.kept_hidden import KeptHidden
from tiercel.speculative.target_runner import TargetRunner


@dataclass(slots=True)
class EagleState:
    """What is kept of one request between two draft extends.

    ``end`` rows have been read for good; ``hidden`` holds what is still to be read. ``growth`` is the tree that begins with the
    first draft, made by engine step ``born_step``.
    """

    hidden: KeptHidden
    end: int
    growth: Growth | None = None
    born_step: int = -1


class EagleWorker(AutoregressiveWorker):
    """Drafts with an EAGLE layer.

    The draft extend reads the rows that the target has computed, with the target's hidden states, and finds the first draft; the
    draft stage reads drafts with the layer's own output. Rows read that way are read again where the drafts were right, so that
    draft KV equals that of a fresh prefill. Where there are too many requests to draft for, rows wait.

    Args:
        target: runs the target.
        model: the layer.
        options: see ``AutoregressiveWorker``.
    """

    method: ClassVar[str] = "eagle"
    num_layers = 1

    def __init__(self, target: TargetRunner, model: EagleModel, **options: Any) -> None:
        ids, kv_dtype = model.target_ids, target.kv_dtype
        super().__init__(target, model.layer, model.body, shift=1, target_ids=ids, kv_dtype=kv_dtype, **options)
        self.prepare, target.taps = model.prepare, model.taps
        self.states: dict[str, EagleState] = {}

    def draft(self, batch: Batch) -> VerifyInput:
        growths, depths, born = {}, {}, {}
        for req in batch.reqs:
            depth = self.depth(req, len(batch.reqs))
            state = self.states[req.request_id] if depth else None
            if state is not None and state.growth is not None:
                state.growth.slots = self.kv.slots(req.request_id)  # pages have come since
                name = req.request_id
                growths[name], depths[name], born[name] = state.growth, depth, state.born_step
        self.grow(growths, depths)
        return self.proposals(batch, growths, born)

    def draft_extend(self, rows: ComputedRows) -> list[int]:
        alive = [
            (req, start, hidden)
            for req, start, hidden in zip(rows.reqs, rows.starts, rows.hidden, strict=True)
            if req.draft_depth(self.num_steps)
        ]
        if not alive:
            return []
        prepared = self.prepare(torch.cat([hidden for _, _, hidden in alive]))
        pieces = prepared.split_with_sizes([len(hidden) for _, _, hidden in alive])
        growths = []
        for (req, start, _), hidden in zip(alive, pieces, strict=True):
            state = self.states.setdefault(req.request_id, EagleState(KeptHidden(start), start))
            state.hidden.append(hidden)
            state.growth = None
            growths.append((state, self.new_growth(req, state.end, req.num_computed)))
        if not self.limit(len(self.states)):
            return []
        unread = torch.cat([state.hidden.since(state.end) for state, _ in growths])
        self.reader.read([growth for _, growth in growths], unread)
        for state, growth in growths:
            state.end = growth.end
            state.hidden.forget_before(state.end)
            state.growth, state.born_step = growth if growth.tree.tokens else None, self.step - 1
        return [self.now()]

    def forget(self, request_id: str) -> None:
        self.states.pop(request_id, None)


class Eagle3Worker(EagleWorker):
    """Drafts with an EAGLE-3 head, which reads hidden states from several depths of the target (Li et al., 2025)."""

    method: ClassVar[str] = "eagle3"
