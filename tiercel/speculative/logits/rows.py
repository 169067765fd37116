"""How one row of logits chooses, and what text comes before the token it chooses."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.core.request import Request
from tiercel.core.sampling_params import LogitsProcessor, SamplingParams


@dataclass(frozen=True, slots=True)
class TextBefore:
    """The text before a row's token, and what of the request depends on it.

    Args:
        token_ids: prompt and output, for a verify row with the drafts on its path.
        num_prompt_tokens: how many of them are the prompt.
        bad_word_ids: token sequences that must not be completed.
        ending_ids: tokens that would end the answer.
        processors: custom ones to call.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    bad_word_ids: Sequence[tuple[int, ...]] = ()
    ending_ids: frozenset[int] = frozenset()
    processors: Sequence[LogitsProcessor] = ()


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row of logits chooses: the request's wishes, its seed, and the position of the token to be chosen.

    ``before`` is None where the choice does not depend on the text before it but through the model. ``num_logprobs`` is how many
    alternatives' log-probabilities are asked for (None: not even the chosen token's).
    """

    params: SamplingParams
    seed: int
    position: int
    before: TextBefore | None = None
    num_logprobs: int | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether it chooses the argmax of the model's own logits."""
        return self.before is None and self.params.is_greedy


def verify_row(req: Request, position: int, drafts: Sequence[int] = ()) -> RowSampling:
    """How a target's row chooses the token at ``position``, after the request's text and the ``drafts`` on the row's path."""
    return _row(req, position, drafts, req.sampling.logits_processors, req.sampling.logprobs)


def draft_row(req: Request, position: int) -> RowSampling:
    """How a draft for ``position`` is chosen: as the target would, as far as that is cheap.

    The text before is the request's own without the drafts between, and custom processors are not called: a draft is a guess.
    """
    return _row(req, position, (), (), None)


def _row(
    req: Request, position: int, drafts: Sequence[int], processors: Sequence[LogitsProcessor], num_logprobs: int | None
) -> RowSampling:
    params = req.sampling
    before = None
    if params.adjusts_logits:
        text = [*req.token_ids, *drafts][:position]
        ending = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else req.eos_token_ids)
        before = TextBefore(text, req.num_prompt_tokens, req.bad_word_ids, ending, processors)
    return RowSampling(params, req.seed, position, before, num_logprobs)
