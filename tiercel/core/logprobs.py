"""How sure the target was of a token."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position's log-probabilities in the model's own eyes: before bias, penalties, temperature and filters.

    Args:
        token_id: the token that was chosen.
        logprob: its natural-logarithm probability.
        top: ids and log-probabilities of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """For ``tiercel generate --json``."""
        top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in self.top]
        return {"token_id": self.token_id, "logprob": self.logprob, "top": top}
