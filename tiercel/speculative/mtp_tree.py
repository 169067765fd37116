"""MTP layers over a tree of drafts: which rows each layer reads, and what they see.

A draft at position d (0-based) of a request with e computed rows is read by layer i > d at row ``e + d - i``: after ``e - i``
rows of known tokens come the drafts, each behind its parent. Their keys and values go into scratch slots, since the next draft
extend reads those rows again with verified tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tiercel.device.placement import integers
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import DraftModel, StepInput
from tiercel.speculative.draft_tree import DraftTree, candidates
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling


@dataclass(slots=True)
class TreeRows:
    """One request's rows ``start .. end - 1`` of a draft extend, and the tree that grows from the last.

    ``token_ids`` is the request's text; ``slots`` holds its KV slots, ``scratch`` those of the drafts. ``sampling`` tells how
    the token at position ``end + 1`` would be chosen.
    """

    token_ids: list[int]
    start: int
    end: int
    slots: Tensor
    scratch: Tensor
    sampling: RowSampling
    tree: DraftTree = field(default_factory=DraftTree)

    @property
    def drafts(self) -> bool:
        """Whether the text ends here; inside a prompt there is nothing to propose."""
        return self.end == len(self.token_ids) - 1

    def known_end(self, layer: int) -> int:
        """Rows before it are read with known tokens."""
        return max(self.start, min(self.end, len(self.token_ids) - 1 - layer))

    def nodes(self, layer: int) -> list[int]:
        """Drafts that ``layer`` reads: those to go on from, and those before them as far as the request has rows."""
        if not self.drafts or layer == 0:
            return []
        found: set[int] = set()
        level = set(self.tree.frontier)
        for _ in range(min(layer, self.end - self.start)):
            found |= level
            level = {self.tree.parents[j] for j in level}
        return sorted(found)


class MtpTree:
    """Runs MTP layers so that each request's tree grows by one position per layer.

    Args:
        model: the layers.
        noise: see ``candidates``.
        topk: candidates after each draft, and drafts to go on from.
        floor: log-probability that a path must have to be gone on from.
        device: where the layers run.
        now: the clock.
    """

    def __init__(
        self,
        model: DraftModel,
        noise: GumbelNoise,
        topk: int,
        floor: float,
        device: torch.device,
        now: Callable[[], int],
    ) -> None:
        self.model, self.noise, self.topk, self.floor, self.device, self.now = model, noise, topk, floor, device, now

    def grow(
        self, pieces: list[TreeRows], depth: int, target_hidden: Tensor, storages: list[list[KvStorage]]
    ) -> list[int]:
        """Let the first ``depth`` layers read ``pieces``; when each ended.

        Args:
            pieces: the requests.
            depth: layers.
            target_hidden: the target's hidden states of all rows, ``[rows, target_hidden_size]``.
            storages: of each layer.
        """
        ends = []
        row_of: list[dict[int, int]] = []
        counts, first = [], 0
        for piece in pieces:  # hidden states by row of the request
            row_of.append({t: first + t - piece.start for t in range(piece.start, piece.end)})
            first += piece.end - piece.start
        hidden, hidden_of = target_hidden, row_of
        node_of: list[dict[int, int]] = [{} for _ in pieces]
        for layer in range(depth):
            is_chained = self.model.description.chained and layer > 0
            segments, tokens, sources, wanted, how = [], [], [], [], []
            rows_now: list[dict[int, int]] = [{} for _ in pieces]
            nodes_now: list[dict[int, int]] = [{} for _ in pieces]
            counts = [0] * len(pieces)
            flat = 0
            for index, piece in enumerate(pieces):
                known_end, nodes = piece.known_end(layer), piece.nodes(layer)
                if piece.start == known_end and not nodes:
                    continue
                roads: dict[int, list[int]] = {}
                for t in range(piece.start, known_end):
                    tokens.append(piece.token_ids[t + 1 + layer])
                    sources.append(hidden_of[index][t])
                    rows_now[index][t] = flat
                    flat += 1
                for place, node in enumerate(nodes, known_end):
                    parent = piece.tree.parents[node]
                    roads[node] = [*roads.get(parent, ()), place]
                    row = known_end + len(roads[node]) - 1
                    tokens.append(piece.tree.tokens[node])
                    before = node_of[index].get(parent) if is_chained else None
                    sources.append(hidden_of[index][row] if before is None else before)
                    nodes_now[index][node] = flat
                    flat += 1
                slots = torch.cat((piece.slots[:known_end], piece.scratch[: len(nodes)])) if nodes else piece.slots
                segments.append(Segment(piece.start, known_end + len(nodes), slots, [roads[n] for n in nodes]))
                if piece.drafts:
                    last = (
                        [rows_now[index][piece.end - 1]]
                        if layer == 0
                        else [nodes_now[index][n] for n in piece.tree.frontier]
                    )
                    wanted += last
                    counts[index] = len(last)
                    wish = piece.sampling
                    how += [replace(wish, position=wish.position + layer)] * len(last)
            if not segments:  # a prompt's chunk too short for this layer
                ends.append(self.now())
                continue
            rows = Rows(segments, self.device)
            step = StepInput(
                rows,
                integers(tokens, self.device),
                integers(wanted, self.device),
                with_logits=True,
                target_hidden=hidden[integers(sources, self.device)],
            )
            output = self.model.layers[layer].run(step, storages[layer])
            if wanted:
                assert output.logits is not None
                self._take(pieces, counts, output.best, output.logits, how)
            if self.model.description.chained:
                hidden, hidden_of, node_of = output.hidden, rows_now, nodes_now
            ends.append(self.now())
        return ends

    def _take(
        self, pieces: list[TreeRows], counts: list[int], best: Tensor, logits: Tensor, how: list[RowSampling]
    ) -> None:
        ids, scores = candidates(best, logits, how, self.noise, self.model.target_ids, self.topk)
        first = 0
        for piece, count in zip(pieces, counts, strict=True):
            if piece.drafts:
                piece.tree.grow(ids[first : first + count], scores[first : first + count], self.topk, self.floor)
            first += count
