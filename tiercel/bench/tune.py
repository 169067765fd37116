"""Which depth pays at which load: every one of them measured in turns, and the table of the best."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from tiercel.bench.engines import Bench
from tiercel.bench.samples import Spread
from tiercel.bench.throughput import GroupSample
from tiercel.bench.turns import TiercelContender
from tiercel.core.config import SpecConfig
from tiercel.core.depths import Depth, DepthTable

MARGIN = 1.02
"""What drafting must win: a median ratio to plain decoding below it is noise."""
LOADS = (1, 2, 4, 8, 16, 32, 64)
PLAIN = Depth(None, 0, lookup=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one choice gave at one load.

    Args:
        depth: the choice, with the load as its ``requests``.
        emitted_per_round: Σ emitted / rounds, over all runs.
        round_ms: milliseconds per round, over the runs.
        total_tok_s: tokens of all requests per second, first hand-over to last token, over the runs.
        ratio_to_plain: ``total_tok_s`` against plain decoding's of the same run, over the runs.
    """

    depth: Depth
    emitted_per_round: float
    round_ms: Spread
    total_tok_s: Spread
    ratio_to_plain: Spread

    def to_json(self) -> dict[str, Any]:
        """Every field by name, and the drafter's."""
        return {"drafter": self.depth.drafter, **asdict(self)}


def choices(num_layers: int) -> list[Depth]:
    """Plain decoding, prompt lookup alone, then each number of MTP layers with it, as engines run them by default."""
    return [PLAIN, *(Depth(None, num_steps) for num_steps in range(num_layers + 1))]


def contenders(bench: Bench, stack: ExitStack, num_layers: int) -> list[TiercelContender]:
    """An engine for each of ``choices``, set to it at every load."""
    plain = TiercelContender(PLAIN.drafter, bench.open(stack, 0))
    found = [plain]
    for depth in choices(num_layers)[1:]:
        spec = SpecConfig(draft=bench.draft, depths=DepthTable("measured", (depth,)))
        found.append(TiercelContender(depth.drafter, bench.open_with(stack, spec)))
    return found


def measured(samples: Sequence[GroupSample], num_layers: int) -> list[Measured]:
    """What ``run_groups`` found with ``contenders``, by load and then by choice."""
    by_name = {depth.drafter: depth for depth in choices(num_layers)}
    groups: dict[tuple[int, str], dict[int, list[GroupSample]]] = {}
    for sample in samples:
        groups.setdefault((sample.concurrency, sample.contender), {}).setdefault(sample.run, []).append(sample)
    found = []
    for load in sorted({load for load, _ in groups}):
        plain = groups[load, PLAIN.drafter]
        for name, depth in by_name.items():
            runs = groups[load, name]
            all_rounds = [_rounds(run) for run in runs.values()]
            found.append(
                Measured(
                    depth=Depth(load, depth.num_steps, depth.lookup),
                    emitted_per_round=sum(r[1] for r in all_rounds) / sum(r[0] for r in all_rounds),
                    round_ms=Spread.of(ms / count for count, _, ms in all_rounds),
                    total_tok_s=Spread.of(_speed(run) for run in runs.values()),
                    ratio_to_plain=Spread.of(_speed(run) / _speed(plain[number]) for number, run in runs.items()),
                )
            )
    return found


def recommend(rows: Sequence[Measured]) -> DepthTable:
    """At every load the choice with the best median ratio to plain decoding; plain where that wins less than ``MARGIN``.

    Args:
        rows: by load, each with plain decoding among its choices.
    """
    best: list[Depth] = []
    for _, group in groupby(rows, key=lambda row: row.depth.requests):
        row = _best(list(group))
        if best and (best[-1].num_steps, best[-1].lookup) == (row.depth.num_steps, row.depth.lookup):
            best.pop()
        best.append(row.depth)
    return DepthTable("recommended", tuple(best))


def _best(rows: list[Measured]) -> Measured:
    fastest = max(rows, key=lambda row: row.ratio_to_plain.median)
    if fastest.ratio_to_plain.median >= MARGIN:
        return fastest
    return next(row for row in rows if row.depth.drafter == PLAIN.drafter)


def _speed(samples: list[GroupSample]) -> float:
    return sum(sample.tokens for sample in samples) / sum(sample.wall_ms for sample in samples) * 1e3


def _rounds(samples: list[GroupSample]) -> tuple[int, int, float]:
    """Rounds, tokens emitted, and milliseconds of one run."""
    found = [sample.rounds for sample in samples if sample.rounds is not None]
    return sum(r.count for r in found), sum(r.emitted for r in found), sum(r.ms for r in found)
