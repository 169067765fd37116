"""From a request's fields to the engine's ``SamplingParams``. A field that has no effect here is refused by name."""

from dataclasses import fields
from typing import Any

from tiercel.core.sampling_params import SamplingParams
from tiercel.server.bodies import ChatBody, CompletionBody, Wishes
from tiercel.server.errors import invalid

ENGINE_FIELDS = {field.name for field in fields(SamplingParams)}
PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "stop_token_ids", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("ignore_eos", "include_stop_str_in_output"),
)
"""Fields of a body that the engine has under the same name."""
NEUTRAL: dict[str, Any] = {
    "min_p": 0,
    "typical_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
"""Values that change nothing, which clients may send to any engine."""


def sampling_params(body: Wishes, room: int) -> SamplingParams:
    """What the engine is asked for.

    Args:
        body: the request. OpenAI's defaults hold: temperature 1, and 16 tokens of a text completion.
        room: tokens that the context and the KV pool can hold after the prompt.

    Raises:
        ApiError: a field is not supported.
    """
    chosen: dict[str, Any] = {"temperature": 1.0, "max_tokens": min(_max_tokens(body, room), room)}
    for name in PASSED_ON:
        value = getattr(body, name)
        if value is None or value is False or value in ([], {}) or value == NEUTRAL.get(name):
            continue
        if name not in ENGINE_FIELDS:
            raise invalid(name, "not supported by this engine; leave it out")
        chosen[name] = value
    if chosen.get("top_k") == -1:  # vLLM's way to keep everything
        chosen["top_k"] = 0
    if "seed" in chosen:
        chosen["seed"] %= 2**64
    return SamplingParams(**chosen)


def _max_tokens(body: Wishes, room: int) -> int:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens or room
    return body.max_tokens or 16


def check_supported(body: ChatBody | CompletionBody) -> None:
    """Refuse what would otherwise be left out in silence.

    Raises:
        ApiError: naming the field.
    """
    if body.logprobs not in (None, False):
        raise invalid("logprobs", "not supported by this engine; leave it out")
    if body.response_format is not None and body.response_format != {"type": "text"}:
        raise invalid("response_format", 'only {"type": "text"} is supported by this engine')
    if body.speculative is not None and body.speculative != type(body.speculative)():
        raise invalid("speculative", "this engine drafts as it was started; leave it out")
    if isinstance(body, CompletionBody):
        if body.suffix:
            raise invalid("suffix", "not supported; leave it out")
        if body.best_of not in (None, body.n or 1):
            raise invalid("best_of", "not supported beyond n; leave it out")
