"""How one request wants its tokens chosen."""

import math
from dataclasses import dataclass

from tiercel.core.config import at_least
from tiercel.core.errors import UserError

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the choice is the argmax: the softmax has collapsed to one token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request choices, checked when built.

    Args:
        max_tokens: completion tokens at most, the first (prefill) token included.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.
        top_k: number of tokens kept; 0 keeps everything.
        seed: the token at position p is drawn from (seed, p) alone, so the same seed gives the same
            tokens alone, in a batch, and with or without speculation. None draws a seed at arrival.
        ignore_eos: go on to ``max_tokens`` even where the model ends its answer.

    Raises:
        UserError: a value is outside its range; the message names the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        at_least("max_tokens", self.max_tokens, 1)
        at_least("top_k", self.top_k, 0)
        warm = _is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0
        _require(warm, "temperature", self.temperature, "a number of at least 0")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        seed_fits = self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**64)
        _require(seed_fits, "seed", self.seed, "an integer in [0, 2**64)")

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is the only token that can be chosen."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{field}={value!r} is not allowed: give {allowed}")
