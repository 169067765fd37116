"""Prompt lookup as the only drafter: no model, no KV, drafts wherever a text repeats itself."""

from typing import ClassVar

from tiercel.core.batch import Batch
from tiercel.core.request import SOURCE_NGRAM
from tiercel.speculative.base_worker import ComputedRows, SpecWorker, VerifyInput
from tiercel.speculative.ngram import NgramIndex
from tiercel.speculative.target_runner import TargetRunner


class NgramWorker(SpecWorker):
    """Drafts with prompt lookup.

    Args:
        target: runs the target.
        lookup: ``SpecConfig.lookup``: tokens that must agree, and drafts per round at most.
        max_verify_rows: rows that a verify may hold; with more requests each gets fewer drafts, down to none but those of
            long matches.
    """

    method: ClassVar[str] = "ngram"

    def __init__(self, target: TargetRunner, lookup: tuple[int, int], max_verify_rows: int) -> None:
        self.match, limit = lookup
        super().__init__(target, limit)
        self.max_verify_rows = max_verify_rows
        self.texts: dict[str, NgramIndex] = {}

    def draft(self, batch: Batch) -> VerifyInput:
        """Look every request's text up."""
        rows = max(0, self.max_verify_rows // len(batch.reqs) - 1)
        chains = []
        for req in batch.reqs:
            text = self.texts.setdefault(req.request_id, NgramIndex(self.match))
            found = text.continuation(req.token_ids, req.draft_depth(self.num_steps))
            chains.append(found.worth_verifying(rows))
        return VerifyInput(chains, [(SOURCE_NGRAM,) * len(chain) for chain in chains], [None] * len(chains))

    def draft_extend(self, rows: ComputedRows) -> list[int]:
        return []

    def forget(self, request_id: str) -> None:
        self.texts.pop(request_id, None)
