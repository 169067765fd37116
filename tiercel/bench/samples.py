"""What one timed answer is, and how many of them become a median with its spread."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from tiercel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt as every contender gets it: token ids, the chat template applied."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its times, in milliseconds from the moment the prompt was handed over.

    ``spec`` holds Tiercel's counts (``SpecCounts.to_metrics``), ``cpu_ms`` this process's CPU time where it was measured.
    """

    token_ids: tuple[int, ...]
    first_token_ms: float
    total_ms: float
    spec: dict[str, Any] | None = None
    cpu_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one contender to one prompt in one run."""

    contender: str
    run: int
    prompt: str
    answer: Answer

    @property
    def num_tokens(self) -> int:
        """Completion tokens: the only counter of tokens there is, whoever made them."""
        return len(self.answer.token_ids)

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return self.answer.total_ms - self.answer.first_token_ms

    def to_json(self) -> dict[str, Any]:
        """The raw sample, token ids included."""
        where = {"contender": self.contender, "run": self.run, "prompt": self.prompt}
        return where | asdict(self.answer) | {"tokens": self.num_tokens, "decode_ms": self.decode_ms}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and how far the values lie apart."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The spread of at least one value."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1], len(found))


Measure = Callable[[Sequence[Sample]], float]
"""One number from the samples of one run."""


def first_token_ms(samples: Sequence[Sample]) -> float:
    """Mean milliseconds to the first token."""
    return statistics.fmean(s.answer.first_token_ms for s in samples)


def decode_ms(samples: Sequence[Sample]) -> float:
    """Milliseconds of decoding in all."""
    return sum(s.decode_ms for s in samples)


def decode_tok_s(samples: Sequence[Sample]) -> float:
    """Tokens after the first, per second of decoding."""
    return sum(s.num_tokens - 1 for s in samples) / decode_ms(samples) * 1e3


def end_to_end_tok_s(samples: Sequence[Sample]) -> float:
    """All tokens, per second from prompt to last token."""
    return sum(s.num_tokens for s in samples) / sum(s.answer.total_ms for s in samples) * 1e3


SPEEDS: dict[str, Measure] = {
    "first_token_ms": first_token_ms,
    "decode_tok_s": decode_tok_s,
    "end_to_end_tok_s": end_to_end_tok_s,
}
"""What every benchmark reports of every contender: prefill and decoding apart, then both together."""


class Samples:
    """All samples of a benchmark, by contender and run."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.all = list(samples)
        self._runs: dict[str, dict[int, list[Sample]]] = {}
        for sample in samples:
            self._runs.setdefault(sample.contender, {}).setdefault(sample.run, []).append(sample)

    @property
    def contenders(self) -> list[str]:
        return list(self._runs)

    def of(self, contender: str) -> list[Sample]:
        """Every sample of one contender."""
        return [sample for run in self._runs[contender].values() for sample in run]

    def spread(self, contender: str, measure: Measure) -> Spread:
        """A number of each run, over the runs."""
        return Spread.of(measure(run) for run in self._runs[contender].values())

    def ratio(self, contender: str, base: str, measure: Measure) -> Spread:
        """``contender`` / ``base``, run by run: both lived through the same ups and downs of the machine."""
        ours, theirs = self._runs[contender], self._runs[base]
        return Spread.of(measure(ours[run]) / measure(theirs[run]) for run in ours)

    def speeds(self, contender: str) -> dict[str, Any]:
        """``SPEEDS`` as JSON."""
        return {name: asdict(self.spread(contender, measure)) for name, measure in SPEEDS.items()}


def check_answer(answer: Answer, contender: str, prompt: BenchPrompt, max_tokens: int) -> Answer:
    """The answer itself, if it can be compared.

    Raises:
        UserError: another number of tokens than asked for, or times that cannot be.
    """
    if len(answer.token_ids) != max_tokens:
        raise UserError(
            f"{contender} gave {len(answer.token_ids)} of {max_tokens} tokens for prompt {prompt.name}: nothing to compare"
        )
    if not 0 < answer.first_token_ms < answer.total_ms:
        raise UserError(
            f"{contender} timed prompt {prompt.name} as first token {answer.first_token_ms:.3f} ms, all {answer.total_ms:.3f} ms"
        )
    return answer
