"""Plain decoding as a round without drafts: the baseline runs through the same code, hooks and records."""

from typing import ClassVar

from tiercel.core.batch import Batch
from tiercel.speculative.base_worker import ComputedRows, SpecWorker, VerifyInput


class NullWorker(SpecWorker):
    """Proposes nothing; every round emits the bonus token."""

    method: ClassVar[str] = "none"

    def draft(self, batch: Batch) -> VerifyInput:
        count = len(batch.reqs)
        return VerifyInput([[] for _ in range(count)], [()] * count, [None] * count)

    def draft_extend(self, rows: ComputedRows) -> list[int]:
        return []

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""
