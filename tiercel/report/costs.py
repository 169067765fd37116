"""When does speculation pay? A small cost model, fitted from recorded rounds.

A round of n requests that draft K tokens each takes

    T(n, K) = V(n (K + 1)) + E(n, K) + R(n)

- V(rows), the verify stage, is the median of the steps with that many rows; between measured row counts it is interpolated;
  beyond them the line that fits all medians (weighted by their steps) is taken, within the bounds that reading more rows takes
  neither less time nor more than in proportion. Medians of few steps, and what lies beyond the measured, are marked as rough.
- E(n, K), draft extend with K layers: the median of the steps that ran K; where none did, how long the first K layers of
  deeper ones took, and the median of what follows the last layer.
- R(n), draft and other, is a median too. A plain step is T(n, 0): a verify of one row for each request.

With a_i, the conditional acceptance of draft i, a round brings L(K) = 1 + a_1 + a_1 a_2 + … + a_1 … a_K tokens for each request
(Leviathan et al. 2023, with an a for each position), so the speed is n L(K) / T(n, K), and depth K is as fast as plain decoding
at L = T(n, K) / T(n, 0).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median

from tiercel.report.figures import BatchCosts, Costs, Depth, VerifyPoint
from tiercel.report.gather import DecodeStep

MIN_STEPS, MIN_MEASURED = 3, 20
"""A median of fewer steps is rough; a speed of fewer is not shown as measured."""
MIN_SHARE, MAX_BATCHES = 0.02, 6
"""Batch sizes that took less of the decode time are left out, and so are those beyond the most used ones."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Milliseconds, and whether they rest on few steps or none."""

    ms: float
    is_rough: bool = False


class VerifyCost:
    """V(rows) from ``(rows, ms)`` of single steps, at least one."""

    def __init__(self, samples: Sequence[tuple[int, float]]) -> None:
        times: dict[int, list[float]] = defaultdict(list)
        for rows, ms in samples:
            times[rows].append(ms)
        self.counts = {rows: len(found) for rows, found in sorted(times.items())}
        self.medians = {rows: median(times[rows]) for rows in self.counts}
        self.line = _fit_line([(rows, ms, self.counts[rows]) for rows, ms in self.medians.items()])

    def on_line(self, rows: int) -> float | None:
        """What the line says; None where one row count was seen, through which every line goes."""
        return None if self.line is None else self.line[0] + self.line[1] * rows

    def ms(self, rows: int) -> Estimate | None:
        """V(rows); None where it cannot be told."""
        if rows in self.medians:
            return Estimate(self.medians[rows], is_rough=self.counts[rows] < MIN_STEPS)
        below = max((r for r in self.medians if r < rows), default=None)
        above = min((r for r in self.medians if r > rows), default=None)
        if below is not None and above is not None:
            part = (rows - below) / (above - below)
            ms = self.medians[below] + part * (self.medians[above] - self.medians[below])
            return Estimate(ms, is_rough=min(self.counts[below], self.counts[above]) < MIN_STEPS)
        on_line = self.on_line(rows)
        if on_line is None:
            return None
        edge = above if above is not None else max(self.medians)
        bounds = sorted((self.medians[edge], self.medians[edge] * rows / edge))
        return Estimate(min(max(on_line, bounds[0]), bounds[1]), is_rough=True)


class ExtendCost:
    """E(K) from the steps of one batch size."""

    def __init__(self, steps: Sequence[DecodeStep]) -> None:
        self.stage: dict[int, list[float]] = defaultdict(list)
        self.prefix: dict[int, list[float]] = defaultdict(list)
        self.tail: list[float] = []
        for step in steps:
            ends = list(accumulate(step.layer_ms))
            if not ends:
                continue
            self.stage[len(ends)].append(step.stage_ms["draft_extend"])
            self.tail.append(step.stage_ms["draft_extend"] - ends[-1])
            for depth, ms in enumerate(ends, start=1):
                self.prefix[depth].append(ms)

    def ms(self, depth: int) -> float | None:
        """E(depth); None where so many layers never ran."""
        if depth == 0:
            return 0.0
        if len(self.stage[depth]) >= MIN_STEPS:
            return median(self.stage[depth])
        return median(self.prefix[depth]) + median(self.tail) if self.prefix[depth] else None


def cost_report(steps: Sequence[DecodeStep], acceptance: Sequence[float]) -> Costs:
    """Predict every depth for the batch sizes that took the time.

    Args:
        steps: decode steps.
        acceptance: conditional acceptance of the drafts that MTP layers made, by position, as far as it is known.
    """
    busy = [step for step in steps if step.rows]
    if not busy:
        return Costs("there is no decode step in these records", [], list(acceptance), [])
    verify = VerifyCost([(step.rows, step.stage_ms["verify"]) for step in busy])
    points = [VerifyPoint(rows, verify.counts[rows], ms, verify.on_line(rows)) for rows, ms in verify.medians.items()]
    batches = [_batch_costs(n, found, verify, acceptance) for n, found in _main_batches(busy)]
    told = [batch for batch in batches if batch is not None]
    return Costs(None if told else _reason(busy, acceptance), points, list(acceptance), told)


def _reason(steps: Sequence[DecodeStep], acceptance: Sequence[float]) -> str:
    if not acceptance:
        return "no MTP layer drafted in these records: record a run with --spec multi-layer-eagle"
    rows = sorted({step.rows for step in steps})
    if len(rows) == 1:
        return (
            f"every verify had {rows[0]} rows, which does not tell what a plain step costs: record a run with --spec none, or "
            "with another --num-steps, and name it with --costs-from"
        )
    return "the MTP layers were not timed, or no batch size has both drafts and enough steps: record a longer run"


def _main_batches(steps: Sequence[DecodeStep]) -> list[tuple[int, list[DecodeStep]]]:
    by_size: dict[int, list[DecodeStep]] = defaultdict(list)
    for step in steps:
        by_size[step.num_requests].append(step)
    total = sum(step.wall_ms for step in steps)
    shares = {n: sum(step.wall_ms for step in found) / total for n, found in by_size.items()}
    kept = [n for n in by_size if shares[n] >= MIN_SHARE and len(by_size[n]) >= MIN_STEPS]
    most = sorted(kept, key=lambda n: -shares[n])[:MAX_BATCHES]
    return [(n, by_size[n]) for n in sorted(most)]


def _batch_costs(
    n: int, steps: Sequence[DecodeStep], verify: VerifyCost, acceptance: Sequence[float]
) -> BatchCosts | None:
    extend, rest = ExtendCost(steps), median(s.stage_ms["draft"] + s.stage_ms["other"] for s in steps)
    plain = verify.ms(n)
    if plain is None:
        return None
    plain_ms = plain.ms + rest
    lengths = [1.0, *accumulate(accumulate(acceptance, mul), initial=1.0)][1:]
    depths = []
    for depth, length in enumerate(lengths):
        verified, extended = verify.ms(n * (depth + 1)), extend.ms(depth)
        if verified is None or extended is None:
            break
        round_ms = verified.ms + extended + rest
        same_depth = [s for s in steps if s.depth == depth and (depth or not s.layer_ms)]
        is_rough = verified.is_rough or plain.is_rough
        depths.append(_depth(n, depth, round_ms, plain_ms, length, is_rough, same_depth))
    if len(depths) < 2:
        return None
    best = max(depths, key=lambda d: d.tok_s).num_steps
    return BatchCosts(n, len(steps), best, depths)


def _depth(
    n: int, depth: int, round_ms: float, plain_ms: float, length: float, is_rough: bool, steps: Sequence[DecodeStep]
) -> Depth:
    measured_ms = sum(s.wall_ms for s in steps)
    is_measured = len(steps) >= MIN_MEASURED
    return Depth(
        num_steps=depth,
        round_ms=round_ms,
        acceptance_length=length,
        tok_s=n * length / round_ms * 1e3,
        speedup=length * plain_ms / round_ms,
        needed_length=round_ms / plain_ms,
        needed_acceptance=needed_acceptance(round_ms / plain_ms, depth),
        is_rough=is_rough,
        measured_steps=len(steps),
        measured_round_ms=measured_ms / len(steps) if is_measured else None,
        measured_tok_s=sum(s.emitted for s in steps) / measured_ms * 1e3 if is_measured else None,
    )


def needed_acceptance(length: float, depth: int) -> float | None:
    """The a in [0, 1] with 1 + a + … + a**depth = ``length``; None where no a is enough, 0 where none is needed."""
    if length <= 1:
        return 0.0
    if length > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):  # the sum grows with a
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < length else (low, middle)
    return (low + high) / 2


def _fit_line(points: Sequence[tuple[int, float, int]]) -> tuple[float, float] | None:
    """Weighted least squares through ``(x, y, weight)``: intercept and a slope of at least 0."""
    if len(points) < 2:
        return None
    total = sum(w for *_, w in points)
    mean_x, mean_y = sum(x * w for x, _, w in points) / total, sum(y * w for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread)
    return mean_y - slope * mean_x, slope
