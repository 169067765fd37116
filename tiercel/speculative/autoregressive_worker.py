"""What drafters have in common whose model reads its own drafts (``speculative.autoregressive``)."""

import torch

from tiercel.core.batch import Batch
from tiercel.core.request import Request
from tiercel.kvcache.storage import KvStorage
from tiercel.models.description import ModelDescription
from tiercel.models.step import StepModel
from tiercel.speculative.autoregressive import DraftReader, Growth
from tiercel.speculative.base_worker import SpecWorker, VerifyInput
from tiercel.speculative.draft_tree import floor_of
from tiercel.speculative.logits.rows import draft_row
from tiercel.speculative.target_runner import TargetRunner

DEFAULT_NUM_STEPS = 3


class AutoregressiveWorker(SpecWorker):
    """Drafts position after position with one model.

    Args:
        target: runs the target; shares its KV slots with the model.
        model: the draft.
        body: its layers, ``num_layers`` of them.
        shift: see ``speculative.autoregressive``.
        target_ids: see ``DraftReader``.
        kv_dtype: of the model's KV.
        num_steps: positions drafted for per round (K), at least 0.
        topk: candidates after each draft: above 1 drafts form trees.
        num_draft_tokens: drafts in a tree at most; None: ``topk`` times ``num_steps``.
        min_confidence: only paths that are right with this probability in the model's own eyes are gone on from.
        max_verify_rows: rows that a verify may hold; with more requests each gets fewer drafts, down to none.
        max_batch_size: requests at once at most.
    """

    def __init__(
        self,
        target: TargetRunner,
        model: StepModel,
        body: ModelDescription,
        *,
        shift: int,
        target_ids: torch.Tensor,
        kv_dtype: torch.dtype,
        num_steps: int,
        topk: int,
        num_draft_tokens: int | None,
        min_confidence: float,
        max_verify_rows: int,
        max_batch_size: int,
    ) -> None:
        super().__init__(target, num_steps)
        self.topk, self.max_verify_rows = topk, max_verify_rows
        self.num_draft_tokens = (num_draft_tokens or topk * num_steps) if topk > 1 else num_steps
        self.num_scratch = topk * max(0, num_steps - 1) if topk > 1 else 0  # the last position's drafts are not read
        num_slots, device = self.kv.num_slots_total + self.num_scratch * max_batch_size, target.placement.device
        storages = [
            KvStorage(num_slots, body.num_kv_heads, body.head_dim, kv_dtype, device) for _ in range(body.num_layers)
        ]
        self.reader = DraftReader(
            model, storages, shift, target_ids, body.vocab_size, target.noise, topk, floor_of(min_confidence), device
        )

    def limit(self, num_requests: int) -> int:
        """Drafts per request at most, with so many requests in the batch."""
        return max(0, min(self.num_draft_tokens, self.max_verify_rows // max(1, num_requests) - 1))

    def new_growth(self, req: Request, start: int, end: int) -> Growth:
        """Rows ``start .. end - 1`` of a request, to be read."""
        wish = draft_row(req, end + self.reader.shift)
        return Growth(req.token_ids, start, end, self.kv.slots(req.request_id), wish)

    def grow(self, growths: dict[str, Growth], depths: dict[str, int]) -> None:
        """Let trees that have their first position grow to their depths."""
        first = self.kv.num_slots_total
        for index, growth in enumerate(growths.values()):
            if self.topk > 1:
                growth.scratch = torch.arange(self.num_scratch) + first + index * self.num_scratch
        for depth in range(1, self.num_steps):
            going_on = [g for name, g in growths.items() if depths[name] > depth and g.tree.frontier]
            if not going_on:
                return
            self.reader.grow(going_on, depth)

    def depth(self, req: Request, num_requests: int) -> int:
        """Positions worth drafting for."""
        return min(req.draft_depth(self.num_steps), self.limit(num_requests))

    def proposals(self, batch: Batch, growths: dict[str, Growth], born_steps: dict[str, int]) -> VerifyInput:
        """The best drafts of each tree.

        Args:
            batch: the requests; those without a tree propose nothing.
            growths: by request id.
            born_steps: the step whose draft extend made the first draft, where one did.
        """
        chains, layers, born, trees = [], [], [], []
        for req in batch.reqs:
            growth = growths.get(req.request_id)
            drafts: list[int] = []
            parents: tuple[int, ...] = ()
            if growth is not None:
                reserved = len(self.kv.slots(req.request_id)) - len(req.token_ids)
                depth = self.depth(req, len(batch.reqs))
                drafts, _, parents = growth.tree.best(min(self.limit(len(batch.reqs)), reserved), depth)
            chains.append(drafts)
            layers.append((0,) * len(drafts))
            born.append(born_steps.get(req.request_id) if drafts else None)
            trees.append(parents)
        return VerifyInput(chains, layers, born, trees if any(trees) else ())
