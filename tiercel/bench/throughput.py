"""Many requests at once: tokens per second of all of them together."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tiercel.bench.engines import PLAIN
from tiercel.bench.samples import Answer, BenchPrompt, Spread, check_answer
from tiercel.bench.turns import SETTLE_S, Report


class GroupContender(Protocol):
    """Somebody who can answer many prompts at once."""

    name: str

    def answer_together(self, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[Answer]:
        """As ``Contender.answer``, for prompts handed over together; an answer's times run from then.

        Raises:
            UserError: it cannot.
        """
        ...


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One group of requests that were handed over together.

    ``wall_ms`` runs from the hand-over to the last token of the last request; ``decode_tok_s`` is the mean over requests of each
    one's own speed after its first token.
    """

    contender: str
    run: int
    concurrency: int
    tokens: int
    wall_ms: float
    first_token_ms: float
    decode_tok_s: float

    @property
    def total_tok_s(self) -> float:
        return self.tokens / self.wall_ms * 1e3


def run_groups(
    contenders: Sequence[GroupContender],
    prompts: Sequence[BenchPrompt],
    concurrencies: Sequence[int],
    max_tokens: int,
    runs: int,
    report: Report = lambda _: None,
) -> list[GroupSample]:
    """Contenders in turns, at every concurrency, ``runs`` times; one group each of the largest size is not counted (warm-up).

    Run r starts at prompt r, so that few requests do not always ask the same.

    Raises:
        UserError: a request failed or ended early.
    """
    for contender in contenders:
        report(f"warming up {contender.name}")
        _group(contender, prompts, max(concurrencies), max_tokens, 0)
    samples = []
    for run in range(runs):
        for concurrency in concurrencies:
            for contender in contenders:
                report(f"run {run + 1} of {runs}, {concurrency} requests: {contender.name}")
                time.sleep(SETTLE_S)
                samples.append(_group(contender, prompts, concurrency, max_tokens, run))
    return samples


def summary(samples: Sequence[GroupSample]) -> list[dict[str, Any]]:
    """By concurrency and contender: tokens per second of all requests, against plain, and what one request sees."""
    groups: dict[tuple[int, str], dict[int, GroupSample]] = {}
    for sample in samples:
        groups.setdefault((sample.concurrency, sample.contender), {})[sample.run] = sample
    return [
        {
            "concurrency": concurrency,
            "contender": contender,
            "total_tok_s": asdict(Spread.of(s.total_tok_s for s in runs.values())),
            "total_ratio_to_plain": asdict(
                Spread.of(s.total_tok_s / groups[concurrency, PLAIN][run].total_tok_s for run, s in runs.items())
            ),
            "first_token_ms": asdict(Spread.of(s.first_token_ms for s in runs.values())),
            "decode_tok_s": asdict(Spread.of(s.decode_tok_s for s in runs.values())),
        }
        for (concurrency, contender), runs in groups.items()
    ]


def _group(
    contender: GroupContender, prompts: Sequence[BenchPrompt], concurrency: int, max_tokens: int, run: int
) -> GroupSample:
    chosen = [prompts[(run + i) % len(prompts)] for i in range(concurrency)]
    answers = contender.answer_together(chosen, max_tokens)
    for prompt, answer in zip(chosen, answers, strict=True):
        check_answer(answer, contender.name, prompt, max_tokens)
    return GroupSample(
        contender=contender.name,
        run=run,
        concurrency=concurrency,
        tokens=sum(len(answer.token_ids) for answer in answers),
        wall_ms=max(answer.total_ms for answer in answers),
        first_token_ms=statistics.fmean(answer.first_token_ms for answer in answers),
        decode_tok_s=statistics.fmean(
            (len(answer.token_ids) - 1) / (answer.total_ms - answer.first_token_ms) * 1e3 for answer in answers
        ),
    )
