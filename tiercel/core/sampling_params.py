"""How one request wants its tokens chosen."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tiercel.core.config import at_least
from tiercel.core.errors import UserError
from tiercel.core.speculative_params import AS_THE_ENGINE_DOES, SpeculativeParams
from tiercel.core.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the choice is the argmax: the softmax has collapsed to one token."""
MOST_LOGPROBS = 20
"""Alternatives per position at most (OpenAI's limit)."""

LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]
"""Called with the token ids so far (prompt and output) and the row of logits (float32 ``[vocab]``); returns the row to use."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request choices under the names of OpenAI and vLLM, checked when built.

    The token at a position depends on the request's own text before it and on (seed, position) alone: it is the same with and
    without speculation, alone and in a batch. Logits are changed in the order of docs/sampling.md.

    Args:
        max_tokens: completion tokens at most, the first (prefill) token included.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.
        top_k: number of tokens kept; 0 keeps everything.
        seed: the token at position p is drawn from (seed, p) alone. None draws a seed at arrival.
        ignore_eos: go on to ``max_tokens`` even where the model ends its answer.
        min_p: drops tokens below this share of the likeliest one's probability, in [0, 1].
        typical_p: keeps the tokens closest to the expected surprise, up to this mass in (0, 1] (locally typical sampling).
        repetition_penalty: logits of tokens in prompt or output are divided by it, or multiplied where negative; above 0.
        presence_penalty: taken from logits of tokens in the output, in [-2, 2].
        frequency_penalty: taken from logits once per occurrence in the output, in [-2, 2].
        logit_bias: added to logits, by token id; each in [-100, 100].
        bad_words: texts whose token sequences (with and without a space in front) are never completed.
        allowed_token_ids: only these tokens can be chosen; None allows all.
        min_tokens: nothing that ends an answer is chosen before so many completion tokens, and no stop string counts.
        stop: texts that end the answer as soon as they are complete; at most 16.
        stop_token_ids: tokens that end the answer, also under ``ignore_eos``.
        include_stop_str_in_output: keep the stop text (or stop token's text) at the end of the answer's text.
        logits_processors: called in order for every row that the target checks, with the text before its token, drafts included;
            what one returns must depend on its arguments alone.
        logprobs: log-probabilities of each completion token, and of so many likeliest ones (0 to 20); None: none.
        prompt_logprobs: the same for the prompt's tokens after the first.
        n: answers per prompt; answer i is what seed + i gives alone.
        structured_outputs: a grammar that the answer must follow.
        speculative: how this request is drafted for; the answer does not depend on it.

    Raises:
        UserError: a value is outside its range; the message names the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logits_processors: Sequence[LogitsProcessor] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured_outputs: StructuredOutputs | None = None
    speculative: SpeculativeParams = AS_THE_ENGINE_DOES

    def __post_init__(self) -> None:
        for name in ("max_tokens", "n"):
            at_least(name, getattr(self, name), 1)
        for name in ("top_k", "min_tokens"):
            at_least(name, getattr(self, name), 0)
        for name, (holds, allowed) in NUMBERS.items():
            value = getattr(self, name)
            _require(_is_number(value) and holds(value), name, value, allowed)
        seed_fits = self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**64)
        _require(seed_fits, "seed", self.seed, "an integer in [0, 2**64)")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or (type(value) is int and 0 <= value <= MOST_LOGPROBS)
            _require(fits, name, value, f"an integer from 0 to {MOST_LOGPROBS}")
        fits = self.min_tokens <= self.max_tokens
        _require(fits, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        self._keep_lists()
        wish = self.structured_outputs
        _require(
            wish is None or isinstance(wish, StructuredOutputs), "structured_outputs", wish, "StructuredOutputs(…)"
        )
        fits = isinstance(self.speculative, SpeculativeParams)
        _require(fits, "speculative", self.speculative, "SpeculativeParams(…)")

    def _keep_lists(self) -> None:
        """Lists become tuples of their own, so that what was checked cannot change."""
        if isinstance(self.stop, str):  # as OpenAI takes it
            object.__setattr__(self, "stop", (self.stop,))
        for name, (is_one, what) in LISTS.items():
            value = getattr(self, name)
            if value is None:  # JSON's null: nothing was said
                object.__setattr__(self, name, None if name == "allowed_token_ids" else ())
                continue
            _require(isinstance(value, list | tuple | set | frozenset), name, value, f"a list of {what}")
            items = tuple(value)
            _require(all(map(is_one, items)), name, value, f"a list of {what}")
            object.__setattr__(self, name, items)
        _require(self.allowed_token_ids != (), "allowed_token_ids", (), "at least one token, or None to allow all")
        _require(len(self.stop) <= MOST_STOPS, "stop", self.stop, f"at most {MOST_STOPS} texts")
        if self.logit_bias is not None:
            _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "numbers by token id")
            fits = all(
                _is_id(token) and _is_number(bias) and -100 <= bias <= 100 for token, bias in self.logit_bias.items()
            )
            _require(fits, "logit_bias", self.logit_bias, "numbers in [-100, 100] by token id")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is the only token that can be chosen."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change with the text before them, or by token, before anything is drawn."""
        return (
            self.repetition_penalty != 1
            or any((self.presence_penalty, self.frequency_penalty, self.min_tokens, self.logit_bias))
            or self.allowed_token_ids is not None
            or any((self.bad_words, self.logits_processors))
        )

    def samples(self) -> "list[SamplingParams]":
        """The ``n`` answers as requests of their own: number i has seed + i, or none where none was given."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) % 2**64 for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def to_json(self) -> dict[str, Any]:
        """For records: what JSON gives back as it was. Callables go by their names."""
        values = _plain(self)
        values["logits_processors"] = [getattr(call, "__name__", repr(call)) for call in self.logits_processors]
        values["logit_bias"] = self.logit_bias and {str(token): bias for token, bias in self.logit_bias.items()}
        values["structured_outputs"] = self.structured_outputs and _plain(self.structured_outputs)
        values["speculative"] = _plain(self.speculative)
        return values


def _plain(wishes: Any) -> dict[str, Any]:
    values = {field.name: getattr(wishes, field.name) for field in fields(wishes)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


MOST_STOPS = 16

NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: math.isfinite(x) and x >= 0, "a number of at least 0"),
    "top_p": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    "typical_p": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "repetition_penalty": (lambda x: math.isfinite(x) and x > 0, "a number above 0"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "a number in [-2, 2]"),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


LISTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "bad_words": (lambda x: isinstance(x, str) and bool(x.strip()), "texts that are not blank"),
    "allowed_token_ids": (_is_id, "token ids"),
    "stop": (_is_text, "texts that are not empty"),
    "stop_token_ids": (_is_id, "token ids"),
    "logits_processors": (callable, "callables"),
}


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{field}={value!r} is not allowed: give {allowed}")
