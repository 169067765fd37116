"""Many requests at once: tokens per second of all of them together."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

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
class Rounds:
    """Rounds of requests, each counted once per request in it: how many, the tokens they emitted, the milliseconds they took."""

    count: int
    emitted: int
    ms: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Self | None:
        """Those of our own engine's answers; None where somebody keeps no counts."""
        specs = [answer.spec for answer in answers if answer.spec is not None]
        if len(specs) < len(answers):
            return None
        return cls(
            count=sum(spec["num_spec_steps"] for spec in specs),
            emitted=sum(spec["num_emitted_tokens"] for spec in specs),
            ms=sum(ms for spec in specs for ms in spec["stage_time_ms"].values()),
        )


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One group of requests that were handed over together.

    ``wall_ms`` runs from the hand-over to the last token of the last request; ``decode_tok_s`` is the mean over requests of each
    one's own speed after its first token; ``rounds`` is there where the contender counts them.
    """

    contender: str
    run: int
    concurrency: int
    tokens: int
    wall_ms: float
    first_token_ms: float
    decode_tok_s: float
    rounds: Rounds | None = None

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
    *,
    every_prompt: bool = False,
) -> list[GroupSample]:
    """Contenders in turns, at every concurrency, ``runs`` times; one group each of the largest size is not counted (warm-up).

    Run r starts at prompt r, so that few requests do not always ask the same; with ``every_prompt`` it takes as many groups as
    it needs to ask every prompt.

    Raises:
        UserError: a request failed or ended early.
    """
    for contender in contenders:
        report(f"warming up {contender.name}")
        _group(contender, _chosen(prompts, 0, max(concurrencies)), max_tokens, 0)
    samples = []
    for run in range(runs):
        for concurrency in concurrencies:
            for start in range(run, run + (len(prompts) if every_prompt else 1), concurrency):
                chosen = _chosen(prompts, start, concurrency)
                for contender in contenders:
                    report(f"run {run + 1} of {runs}, {concurrency} requests: {contender.name}")
                    time.sleep(SETTLE_S)
                    samples.append(_group(contender, chosen, max_tokens, run))
    return samples


def summary(samples: Sequence[GroupSample]) -> list[dict[str, Any]]:
    """By concurrency and contender: tokens per second of all requests, against plain, and what one request sees.

    The total runs to the last token of all, so it also holds how unequal the requests are: where drafts are right in one and
    wrong in another, the last ones run with few others.
    """
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
            "decode_ratio_to_plain": asdict(
                Spread.of(s.decode_tok_s / groups[concurrency, PLAIN][run].decode_tok_s for run, s in runs.items())
            ),
        }
        for (concurrency, contender), runs in groups.items()
    ]


def _chosen(prompts: Sequence[BenchPrompt], start: int, count: int) -> list[BenchPrompt]:
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


def _group(contender: GroupContender, prompts: Sequence[BenchPrompt], max_tokens: int, run: int) -> GroupSample:
    answers = contender.answer_together(prompts, max_tokens)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_answer(answer, contender.name, prompt, max_tokens)
    return GroupSample(
        contender=contender.name,
        run=run,
        concurrency=len(prompts),
        tokens=sum(len(answer.token_ids) for answer in answers),
        wall_ms=max(answer.total_ms for answer in answers),
        first_token_ms=statistics.fmean(answer.first_token_ms for answer in answers),
        decode_tok_s=statistics.fmean(
            (len(answer.token_ids) - 1) / (answer.total_ms - answer.first_token_ms) * 1e3 for answer in answers
        ),
        rounds=Rounds.of(answers),
    )
