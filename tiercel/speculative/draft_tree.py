"""Trees of drafts as they grow: the best few continuations of each of the best few paths (EAGLE-2; Li et al., 2024)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiercel.core.tree import paths
from tiercel.speculative.logits.adjust import adjusted_draft_logits
from tiercel.speculative.logits.filters import filtered_logits
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling


@dataclass(slots=True)
class DraftTree:
    """Drafts of one request in the order in which they were found, parents before children.

    ``scores[j]`` is the log-probability of the path to draft j in the draft's own eyes; ``frontier`` are the drafts to go on from
    (-1: the request's last token).
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])

    def grow(
        self, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], width: int, floor: float
    ) -> None:
        """Add candidates after each draft of the frontier; the ``width`` best become the next frontier.

        Args:
            tokens: per draft of the frontier, candidates, all different.
            scores: each one's log-probability; -inf leaves it out.
            width: drafts to go on from at most.
            floor: only drafts whose path reaches this score are gone on from.
        """
        first = len(self.tokens)
        for parent, ids, shares in zip(self.frontier, tokens, scores, strict=True):
            reach = self.scores[parent] if parent >= 0 else 0.0
            for token, share in zip(ids, shares, strict=True):
                if share > -math.inf:
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.scores.append(reach + share)
        found = sorted(range(first, len(self.tokens)), key=lambda j: -self.scores[j])[:width]
        self.frontier = [j for j in found if self.scores[j] >= floor]

    def best(self, limit: int, depth: int) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """The likeliest ``limit`` drafts among the first ``depth`` positions: tokens, positions, parents (``()``: a chain).

        The likeliest path comes first: where it is accepted nothing has to be moved.
        """
        roads = paths(self.parents)
        near = [j for j in range(len(self.tokens)) if len(roads[j]) <= depth]
        kept = set(
            sorted(near, key=lambda j: -self.scores[j])[: max(0, limit)]
        )  # stable, so a parent comes before its child
        main: list[int] = []
        while following := [j for j in kept if self.parents[j] == (main[-1] if main else -1)]:
            main.append(max(following, key=lambda j: (self.scores[j], -j)))
        order = [*main, *sorted(kept.difference(main))]
        place = {-1: -1} | {j: i for i, j in enumerate(order)}
        positions = tuple(len(roads[j]) - 1 for j in order)
        parents = tuple(place[self.parents[j]] for j in order)
        is_chain = parents == tuple(range(-1, len(order) - 1))
        return [self.tokens[j] for j in order], positions, () if is_chain else parents


def candidates(
    best: Tensor, logits: Tensor, rows: list[RowSampling], noise: GumbelNoise, token_ids: Tensor, count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The ``count`` likeliest choices of each row, and their log-probabilities.

    A sampled row's choice is the argmax of log-probabilities and noise, so its candidates are the best of that sum: a draw
    without replacement (Gumbel top-k; Kool et al., 2019) with the noise that verification will use.

    Args:
        best: argmax of each row, -1 where it holds NaN: int64 ``[rows]``.
        logits: float32 ``[rows, draft vocab]``.
        rows: how each row chooses.
        noise: source of the noise.
        token_ids: target id of each column.
        count: candidates per row.
    """
    scores = torch.where(best[:, None] < 0, 0.0, logits)  # NaN: a draft is only a guess, any token will do
    for index, row in enumerate(rows):
        scores[index] = adjusted_draft_logits(scores[index], row, noise.vocab_size, token_ids)
        if not row.params.is_greedy:
            gumbel = noise.row(row.seed, row.position).to(logits.device)[token_ids]
            scores[index] = filtered_logits(scores[index], row.params).log_softmax(-1) + gumbel
    top = scores.log_softmax(-1).topk(min(count, scores.shape[1]))
    ids: list[list[int]] = token_ids[top.indices].tolist()
    return ids, top.values.tolist()


def floor_of(min_confidence: float) -> float:
    """The score that a path of this probability has."""
    return math.log(min_confidence) if min_confidence else -math.inf
