"""Tiercel against other engines: what is compared with what."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tiercel.bench.engines import PLAIN
from tiercel.bench.latency import round_ms, rows_per_round, stage_ms
from tiercel.bench.roofline import Roofline
from tiercel.bench.samples import SPEEDS, Sample, Samples, Spread, decode_tok_s

OWN = "Tiercel "
"""Begins the names of our contenders."""


def summary(samples: Samples) -> dict[str, Any]:
    """By contender: speeds, and how many leading tokens of an answer are those of our plain decoding."""
    reference: dict[str, tuple[int, ...]] = {}
    for sample in samples.of(OWN + PLAIN):
        reference.setdefault(sample.prompt, sample.answer.token_ids)
    return {
        name: samples.speeds(name) | {"equal_leading_tokens": asdict(_agreement(samples.of(name), reference))}
        for name in samples.contenders
    }


def ratios(samples: Samples) -> dict[str, dict[str, dict[str, Any]]]:
    """For each of our contenders: its speed / that of our plain decoding and of each other, run by run (times: theirs / ours)."""
    ours = own(samples)
    others = [OWN + PLAIN, *(name for name in samples.contenders if name not in ours)]
    return {us: {them: _ratios(samples, us, them) for them in others} for us in ours}


def own(samples: Samples) -> list[str]:
    """Our contenders."""
    return [name for name in samples.contenders if name.startswith(OWN)]


def reached(samples: Samples, roofline: Roofline) -> dict[str, Any]:
    """The machine's limit beside what a step takes, for each of our contenders.

    The limit is that of the target's own matrices over as many rows as a round verified, on average. ``target_forward`` is the
    verify stage alone; ``round`` all that happens from one round to the next, MTP layers included.
    """
    found = {}
    for name in own(samples):
        rows = rows_per_round(samples.of(name))
        limit = roofline.limit_ms(rows)
        times = {"target_forward": stage_ms("verify"), "round": round_ms}
        medians = {what: samples.spread(name, measure).median for what, measure in times.items()}
        shares = {what: limit / ms for what, ms in medians.items()}
        found[name] = {"rows": rows, "limit_ms": limit, "median_ms": medians, "fraction_reached": shares}
    return roofline.to_json() | {"steps": found}


def _ratios(samples: Samples, us: str, them: str) -> dict[str, Any]:
    found = {name: samples.ratio(us, them, measure) for name, measure in SPEEDS.items() if name.endswith("tok_s")}
    found["first_token_ms"] = samples.ratio(them, us, SPEEDS["first_token_ms"])
    return {name: asdict(spread) for name, spread in found.items()}


def best_other(samples: Samples, title: str) -> str:
    """The fastest way, by median decoding speed, that a peer was run in."""
    ways = [name for name in samples.contenders if name.startswith(f"{title} ")]
    return max(ways, key=lambda name: samples.spread(name, decode_tok_s).median)


def _agreement(samples: Sequence[Sample], reference: dict[str, tuple[int, ...]]) -> Spread:
    return Spread.of(equal_leading_tokens(s.answer.token_ids, reference[s.prompt]) for s in samples)


def equal_leading_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
