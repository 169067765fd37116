"""Tiercel against other engines: what is compared with what."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tiercel.bench.engines import PLAIN
from tiercel.bench.latency import round_ms, stage_ms
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
    """What a plain step takes, and which share of the machine's limit that is.

    ``target_forward`` is the native call alone, ``round`` all that happens between two tokens.
    """
    plain = OWN + PLAIN
    forward, whole = samples.spread(plain, stage_ms("verify")), samples.spread(plain, round_ms)
    limit = roofline.limit_ms(1)
    return roofline.to_json() | {
        "plain_step_ms": {"target_forward": forward.median, "round": whole.median},
        "fraction_reached": {"target_forward": limit / forward.median, "round": limit / whole.median},
    }


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
