"""How a token is chosen from logits: the same for plain decoding, verification and drafts.

The token at position p of a request is ``argmax(log-probabilities + Gumbel noise)`` over the vocabulary, with noise drawn
from (seed, p) alone (Gumbel-max; Maddison et al., 2014): a draw from the softmax. Because the noise belongs to the position
and not to the step, a verify row chooses exactly the token that plain decoding would have chosen there, so accepting a
draft iff it equals that token is lossless: the output is the same as without speculation, not only its distribution.
Drafts are chosen with the same noise, which makes them agree as often as the two distributions allow.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiercel.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row of logits chooses: the request's wishes, its seed, and the position of the token to be chosen."""

    params: SamplingParams
    seed: int
    position: int


class GumbelNoise:
    """Gumbel noise by (seed, position), float32 ``[vocab_size]``; the latest rows are kept, since drafts and verify share them.

    Philox (Salmon et al., 2011) is counter-based: its key is the pair itself, and no state is carried from call to call.
    """

    KEPT_ROWS = 256

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def row(self, seed: int, position: int) -> Tensor:
        """Noise of one position, on the host."""
        key = (seed, position)
        found = self._rows.get(key)
        if found is None:
            generator = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
            found = torch.from_numpy(generator.gumbel(size=self.vocab_size).astype(np.float32))
            self._rows[key] = found
            if len(self._rows) > self.KEPT_ROWS:
                self._rows.popitem(last=False)
        return found


def needs_logits(rows: list[RowSampling]) -> bool:
    """Whether any row chooses by more than the argmax."""
    return not all(row.params.is_greedy for row in rows)


def choose(
    best: Tensor, logits: Tensor | None, rows: list[RowSampling], noise: GumbelNoise, token_ids: Tensor | None = None
) -> Tensor:
    """Choose one token per row.

    Args:
        best: each row's argmax, -1 where it holds NaN: int64 ``[rows]``.
        logits: float32 ``[rows, vocab]``; None will do unless ``needs_logits(rows)``.
        rows: how each row chooses.
        noise: source of the noise, over the target's vocabulary.
        token_ids: target id of each column of ``logits`` (a reduced draft vocabulary); None if column = id.

    Returns:
        int64 ``[rows]`` on the device of ``best``: target ids; -1 where the row holds NaN.
    """
    chosen = best
    if logits is not None and needs_logits(rows):
        chosen = best.clone()
        for index, row in enumerate(rows):
            if not row.params.is_greedy and best[index] >= 0:
                chosen[index] = _sample(logits[index], row, noise, token_ids)
    return chosen if token_ids is None else torch.where(best < 0, -1, token_ids[chosen])


def _sample(logits: Tensor, row: RowSampling, noise: GumbelNoise, token_ids: Tensor | None) -> Tensor:
    kept = filtered_logits(logits, row.params)
    gumbel = noise.row(row.seed, row.position).to(logits.device)
    return (kept + (gumbel if token_ids is None else gumbel[token_ids])).argmax()


def filtered_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, then top-p (the order of Hugging Face ``generate``): float32 ``[vocab]``, -inf where cut.

    Top-p keeps the smallest set of most likely tokens whose mass reaches ``top_p``; ties at the top-k border all stay.
    """
    scaled = logits / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -math.inf)
    if params.top_p < 1:
        ordered, order = scaled.sort(descending=True, stable=True)
        mass = ordered.softmax(-1)
        beyond = mass.cumsum(-1) - mass >= params.top_p
        beyond[0] = False  # however small top_p is, the likeliest token stays (float32 rounds 1e-46 to 0)
        scaled = scaled.index_fill(0, order[beyond], -math.inf)
    return scaled
