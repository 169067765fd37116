"""Drafts made right on purpose: every accept pattern occurs, however good the drafter is."""

import itertools
from collections.abc import Mapping, Sequence

from tiercel.core.batch import Batch
from tiercel.core.tree import parent_of, paths
from tiercel.speculative.base_worker import SpecWorker, VerifyInput


def plant(worker: SpecWorker, answers: Mapping[str, Sequence[int]]) -> None:
    """Let some of a worker's drafts be those that the target will choose, along changing paths and for changing lengths.

    Output must stay as it is; what the drafter keeps of its own drafts is then often wrong, and must not matter.

    Args:
        worker: whose drafts are changed, from now on.
        answers: plain decoding's tokens by request id.
    """
    honest, turns = worker.draft, itertools.count()

    def draft(batch: Batch) -> VerifyInput:
        sent = honest(batch)
        for index, req in enumerate(batch.reqs):
            drafts, parents, turn = sent.draft_token_ids[index], sent.tree(index), next(turns)
            if not drafts:
                continue
            path = paths(parents)[turn % len(drafts)] if parents else list(range(len(drafts)))
            truth = answers[req.request_id][len(req.output_token_ids) :][: turn % 5]
            for node, token in zip(path, truth, strict=False):
                for sibling, other in enumerate(drafts):  # those that follow one draft differ
                    if other == token and parent_of(parents, sibling) == parent_of(parents, node):
                        drafts[sibling] = drafts[node]
                drafts[node] = token
        return sent

    worker.draft = draft  # type: ignore[method-assign]
