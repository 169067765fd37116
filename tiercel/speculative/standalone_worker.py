"""A smaller model with the target's tokenizer drafts (Leviathan et al., 2023; Chen et al., 2023)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tiercel.core.batch import Batch
from tiercel.models.step import Target
from tiercel.speculative.autoregressive import Growth
from tiercel.speculative.autoregressive_worker import AutoregressiveWorker
from tiercel.speculative.base_worker import ComputedRows, VerifyInput
from tiercel.speculative.target_runner import TargetRunner


@dataclass(slots=True)
class ReadRows:
    """The draft model's rows of one request: ``end`` of them are final; ``growth`` is the last round's, to be judged."""

    end: int
    growth: Growth | None = None


class StandaloneWorker(AutoregressiveWorker):
    """Drafts with a language model of its own, which reads every token that the target does.

    The prompt is read in the draft extend of its chunks. A round begins with what the model has not read yet – the last token,
    and before it a draft that it has only proposed – and goes on with its own drafts. Rows of accepted drafts in a chain stay;
    those of a tree lie elsewhere, and are read again with the next round's last token.

    Args:
        target: runs the target.
        model: the draft model.
        options: see ``AutoregressiveWorker``.
    """

    method: ClassVar[str] = "standalone"

    def __init__(self, target: TargetRunner, model: Target, kv_dtype: torch.dtype, **options: Any) -> None:
        shared = min(model.description.vocab_size, target.model.description.vocab_size)
        ids = torch.arange(shared, device=target.placement.device)
        super().__init__(target, model, model.description, shift=0, target_ids=ids, kv_dtype=kv_dtype, **options)
        self.states: dict[str, ReadRows] = {}

    def draft(self, batch: Batch) -> VerifyInput:
        growths, depths = {}, {}
        for req in batch.reqs:
            if depth := self.depth(req, len(batch.reqs)):
                state = self.states[req.request_id]
                state.growth = self.new_growth(req, state.end, len(req.token_ids))
                growths[req.request_id], depths[req.request_id] = state.growth, depth
        if growths:
            self.reader.read(list(growths.values()))
            self.grow(growths, depths)
        return self.proposals(batch, growths, {})

    def draft_extend(self, rows: ComputedRows) -> list[int]:
        growths = []
        for req, start in zip(rows.reqs, rows.starts, strict=True):
            state = self.states.setdefault(req.request_id, ReadRows(start))
            if state.growth is not None:
                state.end, state.growth = self._kept(state.growth), None
            elif req.draft_depth(self.num_steps) and start < req.num_prompt_tokens:
                growths.append(self.new_growth(req, state.end, req.num_computed))
                state.end = req.num_computed
        if growths:
            self.reader.read(growths)
        return []

    def _kept(self, growth: Growth) -> int:
        """Where the rows end that were read with what the text says now (which has grown since)."""
        end = growth.end
        if growth.scratch is not None:
            return end
        for node in growth.nodes:
            if end == len(growth.token_ids) - 1 or growth.tree.tokens[node] != growth.token_ids[end]:
                break
            end += 1
        return end

    def forget(self, request_id: str) -> None:
        self.states.pop(request_id, None)
