"""Which wishes this engine can grant: what ``SamplingParams`` alone cannot know."""

from collections.abc import Sequence
from dataclasses import fields

from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.models.tokenizer import Tokenizer

REFUSED = (
    "prompt_logprobs",
    "structured_outputs",
)
"""Fields that have no effect here: a value other than the default is refused."""
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse what cannot be done.

    Raises:
        UserError: a field that is not supported, a token id out of range, or several samples at once; names the field.
    """
    if sampling.n != 1:
        raise UserError(
            f"n={sampling.n}: the engine makes one answer per request: give it those of SamplingParams.samples()"
        )
    for name in REFUSED:
        if getattr(sampling, name) != DEFAULTS[name]:
            raise UserError(f"{name} is not supported: leave it out")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        wrong = [token for token in getattr(sampling, name) or () if token >= vocab_size]
        if wrong:
            raise UserError(f"{name}: token {wrong[0]} is not in the vocabulary: give ids from 0 to {vocab_size - 1}")


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, as it begins a text and as it follows a space."""
    spellings = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    return tuple(dict.fromkeys(tuple(tokenizer.encode_part(spelling)) for spelling in spellings))
