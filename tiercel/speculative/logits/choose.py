"""How a token is chosen from logits: the same for plain decoding, verification and drafts.

The token at position p of a request is ``argmax(log-probabilities + Gumbel noise)`` over the vocabulary, with noise drawn
from (seed, p) alone (Gumbel-max; Maddison et al., 2014): a draw from the softmax. Because the noise belongs to the position
and not to the step, and the log-probabilities to the text before it, a verify row chooses exactly the token that plain decoding
would have chosen there, so accepting a draft iff it equals that token is lossless: the output is the same as without
speculation, not only its distribution. Drafts are chosen with the same noise, which makes them agree as often as the two
distributions allow.
"""

import math

import torch
from torch import Tensor

from tiercel.speculative.logits.adjust import adjusted_draft_logits
from tiercel.speculative.logits.filters import filtered_logits
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling


def needs_logits(rows: list[RowSampling]) -> bool:
    """Whether more of any row is needed than its argmax."""
    return any(not row.is_argmax or row.num_logprobs is not None for row in rows)


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
        int64 ``[rows]`` on the device of ``best``: target ids; -1 where the row holds NaN, or every token is forbidden.
    """
    chosen = best
    if logits is not None and needs_logits(rows):
        chosen = best.clone()
        for index, row in enumerate(rows):
            if not row.is_argmax and best[index] >= 0:
                chosen[index] = _choose(logits[index], row, noise, token_ids)
    return chosen if token_ids is None else torch.where(chosen < 0, -1, token_ids[chosen])


def _choose(logits: Tensor, row: RowSampling, noise: GumbelNoise, token_ids: Tensor | None) -> Tensor:
    scores = adjusted_draft_logits(logits, row, noise.vocab_size, token_ids)
    if not row.params.is_greedy:
        gumbel = noise.row(row.seed, row.position).to(logits.device)
        scores = filtered_logits(scores, row.params) + (gumbel if token_ids is None else gumbel[token_ids])
    value, index = scores.max(-1)
    return torch.where(value > -math.inf, index, -1)
