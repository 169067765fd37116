"""Many requests at once: tokens per second of all of them together."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiercel.bench.engines import PLAIN
from tiercel.bench.samples import BenchPrompt, Spread
from tiercel.bench.turns import SETTLE_S, Report, TiercelContender
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams


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
    contenders: Sequence[TiercelContender],
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
    contender: TiercelContender, prompts: Sequence[BenchPrompt], concurrency: int, max_tokens: int, run: int
) -> GroupSample:
    chosen = [list(prompts[(run + i) % len(prompts)].token_ids) for i in range(concurrency)]
    start = time.perf_counter()
    outputs = contender.llm.generate(chosen, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    wall_ms = (time.perf_counter() - start) * 1e3
    counts = [len(output.checked().token_ids) for output in outputs]
    if min(counts) != max_tokens:
        raise UserError(f"{contender.name}: a request ended after {min(counts)} of {max_tokens} tokens")
    return GroupSample(
        contender=contender.name,
        run=run,
        concurrency=concurrency,
        tokens=sum(counts),
        wall_ms=wall_ms,
        first_token_ms=statistics.fmean(o.record.time_to_first_token_ms or 0.0 for o in outputs),
        decode_tok_s=statistics.fmean(o.tokens_per_second or 0.0 for o in outputs),
    )
