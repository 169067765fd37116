"""Changes that a request's text before a token makes to its logits: bias, penalties, custom processors, forbidden tokens."""

import math

import torch
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.speculative.logits.rows import RowSampling, TextBefore


def adjusted_logits(logits: Tensor, row: RowSampling) -> Tensor:
    """Bias, penalties, custom processors, then what is forbidden: nothing can bring a forbidden token back.

    Args:
        logits: float32 ``[vocab]``; left as it is.
        row: whose they are; without text before it nothing changes.

    Returns:
        float32 ``[vocab]``, -inf where forbidden.

    Raises:
        UserError: a custom processor gives something else than a row of logits.
    """
    before, params = row.before, row.params
    if before is None:
        return logits
    scores = _penalised(_biased(logits.clone(), params), params, before)
    for call in before.processors:
        given = call(list(before.token_ids), scores)
        if not isinstance(given, Tensor) or given.shape != logits.shape:
            what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            name = getattr(call, "__name__", repr(call))
            raise UserError(
                f"logits_processors: {name} returned {what}: return a tensor of shape {tuple(logits.shape)}"
            )
        scores = given.to(logits)
    return _without_forbidden(scores, params, before)


def adjusted_draft_logits(logits: Tensor, row: RowSampling, vocab_size: int, token_ids: Tensor | None) -> Tensor:
    """As ``adjusted_logits``, of a draft whose column c stands for the target's token ``token_ids[c]`` (None: for c)."""
    if row.before is None or token_ids is None:
        return adjusted_logits(logits, row)
    spread = logits.new_full((vocab_size,), -math.inf)
    spread[token_ids] = logits
    return adjusted_logits(spread, row)[token_ids]


def _biased(scores: Tensor, params: SamplingParams) -> Tensor:
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
    return scores


def _penalised(scores: Tensor, params: SamplingParams, before: TextBefore) -> Tensor:
    """Repetition counts prompt and output (Keskar et al., 2019), presence and frequency the output alone, as in vLLM."""
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(before.token_ids)), device=scores.device)
        found = scores[seen]
        scores[seen] = torch.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    output = before.token_ids[before.num_prompt_tokens :]
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = torch.tensor(output, device=scores.device).bincount(minlength=len(scores))
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return scores


def _without_forbidden(scores: Tensor, params: SamplingParams, before: TextBefore) -> Tensor:
    output = list(before.token_ids[before.num_prompt_tokens :])
    forbidden: set[int] = set(before.ending_ids) if len(output) < params.min_tokens else set()
    for *start, last in before.bad_word_ids:
        if not start or output[-len(start) :] == start:
            forbidden.add(last)
    if forbidden:
        scores = scores.index_fill(0, torch.tensor(sorted(forbidden), device=scores.device), -math.inf)
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=scores.device)
        scores = torch.full_like(scores, -math.inf).index_copy(0, allowed, scores[allowed])
    return scores
