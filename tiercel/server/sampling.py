"""From a request's fields to the engine's ``SamplingParams``. A field that has no effect here is refused by name."""

import re
from typing import Any

from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.speculative_params import SpeculativeParams
from tiercel.engine.sampling_checks import check_sampling
from tiercel.server.bodies import ChatBody, CompletionBody, Wishes
from tiercel.server.errors import ApiError, invalid

PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "stop_token_ids", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "bad_words", "allowed_token_ids", "min_tokens"),
    *("ignore_eos", "include_stop_str_in_output", "n"),
)
"""Fields of a body that the engine has under the same name; null says nothing."""
_FIRST_WORD = re.compile(r"\w+")


def sampling_params(body: Wishes, room: int, vocab_size: int) -> SamplingParams:
    """What the engine is asked for.

    Args:
        body: the request. OpenAI's defaults hold: temperature 1, and 16 tokens of a text completion.
        room: tokens that the context and the KV pool can hold after the prompt.
        vocab_size: token ids are below.

    Raises:
        ApiError: a field is wrong, or not supported.
    """
    chosen: dict[str, Any] = {"temperature": 1.0, "max_tokens": min(_max_tokens(body, room), room)}
    chosen |= {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    if chosen.get("top_k") == -1:  # vLLM's way to keep everything
        chosen["top_k"] = 0
    if "seed" in chosen:
        chosen["seed"] %= 2**64
    chosen["logprobs"] = _num_logprobs(body)
    if body.speculative is not None:
        chosen["speculative"] = SpeculativeParams(body.speculative.enabled, body.speculative.num_steps)
    if body.logit_bias:
        chosen["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    try:
        sampling = SamplingParams(**chosen)
        check_sampling(sampling.samples()[0], vocab_size)
    except UserError as error:
        word = _FIRST_WORD.match(str(error))
        raise ApiError(400, str(error), word[0] if word and word[0] in type(body).model_fields else None) from error
    return sampling


def _num_logprobs(body: Wishes) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise invalid("logit_bias", f"{key!r} is no token id")
    return int(key)


def _max_tokens(body: Wishes, room: int) -> int:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens or room
    return body.max_tokens or 16


def check_supported(body: ChatBody | CompletionBody) -> None:
    """Refuse what would otherwise be left out in silence.

    Raises:
        ApiError: naming the field.
    """
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "only with logprobs: true")
    if body.response_format is not None and body.response_format != {"type": "text"}:
        raise invalid("response_format", 'only {"type": "text"} is supported by this engine')
    if isinstance(body, CompletionBody):
        if body.echo and body.logprobs is not None:
            raise invalid("logprobs", "not supported together with echo; leave one out")
        if body.suffix:
            raise invalid("suffix", "not supported; leave it out")
        if body.best_of not in (None, body.n or 1):
            raise invalid("best_of", "not supported beyond n; leave it out")
