"""Drafts of a model that reads its own: position after position, the best few paths of each request's tree.

A model of ``shift`` 0 is a language model of its own: row t reads ``x[t]`` and proposes ``x[t + 1]``. One of ``shift`` 1 is an
EAGLE layer: row t reads ``x[t + 1]`` and the target's hidden state of row t, and proposes ``x[t + 2]``; where it reads a draft,
the hidden state is what it gave itself for the draft before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from tiercel.device.placement import integers
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import StepInput, StepModel, StepOutput
from tiercel.speculative.draft_tree import DraftTree, candidates
from tiercel.speculative.logits.choose import needs_logits
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling


@dataclass(slots=True)
class Growth:
    """One request's known rows ``start .. end - 1``, and the tree of drafts that grows from the last.

    ``token_ids`` is the request's text, ``slots`` its KV slots; rows of drafts take those of ``scratch``, or without it the
    following ones (a chain). ``sampling`` tells how the first draft's token would be chosen. ``nodes`` are the drafts that were
    read, in order; ``outputs`` is what the model gave for each (-1: for the last known row).
    """

    token_ids: list[int]
    start: int
    end: int
    slots: Tensor
    sampling: RowSampling
    scratch: Tensor | None = None
    tree: DraftTree = field(default_factory=DraftTree)
    nodes: list[int] = field(default_factory=list)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def segment(self) -> Segment:
        """The rows of the frontier, which are read next."""
        first = self.end + len(self.nodes)
        self.nodes += self.tree.frontier
        last = self.end + len(self.nodes)
        if self.scratch is None:
            return Segment(first, last, self.slots)
        place = {node: self.end + i for i, node in enumerate(self.nodes)}
        paths = []
        for node in self.tree.frontier:
            path = [node]
            while (parent := self.tree.parents[path[-1]]) >= 0:
                path.append(parent)
            paths.append([place[step] for step in reversed(path)])
        slots = torch.cat((self.slots[: self.end], self.scratch))
        return Segment(first, last, slots, paths, root=self.end)


@dataclass(frozen=True, slots=True)
class DraftReader:
    """Runs the model over known rows and over drafts, and takes its candidates.

    Args:
        model: plays steps.
        storages: KV of its layers.
        shift: see above.
        target_ids: the target's id of each of the model's first tokens; it proposes no other. int64.
        vocab_size: tokens that the model can read; beyond them it reads its last.
        noise: the target's noise.
        topk: candidates after each draft, and drafts to go on from.
        floor: log-probability that a path must have to be gone on from.
        device: where the model runs.
    """

    model: StepModel
    storages: list[KvStorage]
    shift: int
    target_ids: Tensor
    vocab_size: int
    noise: GumbelNoise
    topk: int
    floor: float
    device: torch.device

    def read(self, growths: Sequence[Growth], hidden: Tensor | None = None) -> None:
        """Read known rows; where a request's text ends with them, its first drafts are found.

        Args:
            growths: the requests; each has rows.
            hidden: the target's hidden states of all rows (shift 1).
        """
        rows = Rows([Segment(g.start, g.end, g.slots) for g in growths], self.device)
        tokens = [t for g in growths for t in g.token_ids[g.start + self.shift : g.end + self.shift]]
        ready = [g.end + self.shift == len(g.token_ids) for g in growths]
        lasts = [end - 1 for end in accumulate(rows.counts)]
        wanted = [last for last, is_ready in zip(lasts, ready, strict=True) if is_ready]
        growing = [g for g, is_ready in zip(growths, ready, strict=True) if is_ready]
        output = self._run(rows, tokens, wanted, growing, 0, hidden)
        for g, last in zip(growing, wanted, strict=True):
            g.outputs[-1] = output.hidden[last]

    def grow(self, growths: Sequence[Growth], depth: int) -> None:
        """Read the drafts to go on from, all at position ``depth`` - 1, and find those that follow."""
        rows = Rows([g.segment() for g in growths], self.device)
        frontiers = [(g, node) for g in growths for node in g.tree.frontier]
        tokens = [g.tree.tokens[node] for g, node in frontiers]
        hidden = torch.stack([g.outputs[g.tree.parents[node]] for g, node in frontiers]) if self.shift else None
        output = self._run(rows, tokens, range(len(tokens)), growths, depth, hidden)
        for (g, node), out in zip(frontiers, output.hidden, strict=True):
            g.outputs[node] = out

    def _run(
        self,
        rows: Rows,
        tokens: list[int],
        wanted: Sequence[int],
        growing: Sequence[Growth],
        depth: int,
        hidden: Tensor | None,
    ) -> StepOutput:
        counts = [len(g.tree.frontier) for g in growing]
        how = [
            replace(g.sampling, position=g.sampling.position + depth)
            for g, count in zip(growing, counts, strict=True)
            for _ in range(count)
        ]
        is_argmax = self.topk == 1 and not needs_logits(how)
        readable = [min(token, self.vocab_size - 1) for token in tokens]
        step = StepInput(
            rows,
            integers(readable, self.device),
            integers(wanted, self.device),
            with_logits=not is_argmax,
            target_hidden=hidden,
            with_confidence=is_argmax,
        )
        output = self.model.run(step, self.storages)
        if growing:
            ids, scores = self._candidates(output, how, is_argmax)
            first = 0
            for g, count in zip(growing, counts, strict=True):
                g.tree.grow(ids[first : first + count], scores[first : first + count], self.topk, self.floor)
                first += count
        return output

    def _candidates(
        self, output: StepOutput, how: list[RowSampling], is_argmax: bool
    ) -> tuple[list[list[int]], list[list[float]]]:
        if is_argmax:
            assert output.confidence is not None
            # NaN, or padding of the vocabulary: a draft is only a guess, any token will do.
            best = torch.where(output.best < len(self.target_ids), output.best, 0).clamp(min=0)
            scores = output.confidence.clamp(min=torch.finfo(torch.float32).tiny).log()
            return self.target_ids[best][:, None].tolist(), scores[:, None].tolist()
        assert output.logits is not None
        logits = output.logits[:, : len(self.target_ids)]
        return candidates(output.best, logits, how, self.noise, self.target_ids, self.topk)
