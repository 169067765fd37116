"""Batch 1: plain decoding against multi-layer EAGLE at several depths, with the time of every stage."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tiercel.bench.engines import PLAIN
from tiercel.bench.samples import Measure, Sample, Samples, decode_tok_s

STAGES = ("draft", "verify", "draft_extend", "other")


def stage_ms(stage: str) -> Measure:
    """Milliseconds per round that a stage took."""

    def measure(samples: Sequence[Sample]) -> float:
        total: float = sum(_spec(s)["stage_time_ms"][stage] for s in samples)
        return total / _rounds(samples)

    return measure


def round_ms(samples: Sequence[Sample]) -> float:
    """Milliseconds per round, all stages together."""
    return sum(stage_ms(stage)(samples) for stage in STAGES)


def acceptance_length(samples: Sequence[Sample]) -> float:
    """1 + correct drafts / rounds, over all answers."""
    correct: int = sum(_spec(s)["num_accepted_draft_tokens"] for s in samples)
    return 1 + correct / _rounds(samples)


def rows_per_round(samples: Sequence[Sample]) -> float:
    """Rows that one verify held for a request: its last token and its drafts."""
    drafts: int = sum(_spec(s)["num_draft_tokens"] for s in samples)
    return 1 + drafts / _rounds(samples)


def summary(samples: Samples) -> dict[str, Any]:
    """By contender: speeds, milliseconds per round by stage, acceptance length, decoding speed against plain."""
    return {
        name: samples.speeds(name)
        | {
            "stage_ms_per_round": {stage: asdict(samples.spread(name, stage_ms(stage))) for stage in STAGES},
            "ms_per_round": asdict(samples.spread(name, round_ms)),
            "acceptance_length": acceptance_length(samples.of(name)),
            "decode_ratio_to_plain": asdict(samples.ratio(name, PLAIN, decode_tok_s)),
        }
        for name in samples.contenders
    }


def differing(samples: Samples) -> list[tuple[str, str]]:
    """(contender, prompt) of every answer whose tokens are not those of plain decoding's first run, each pair once."""
    reference: dict[str, tuple[int, ...]] = {}
    for sample in samples.of(PLAIN):
        reference.setdefault(sample.prompt, sample.answer.token_ids)
    found = [(s.contender, s.prompt) for s in samples.all if s.answer.token_ids != reference[s.prompt]]
    return list(dict.fromkeys(found))


def _spec(sample: Sample) -> dict[str, Any]:
    if sample.answer.spec is None:
        raise ValueError(f"{sample.contender} keeps no counts of rounds")
    return sample.answer.spec


def _rounds(samples: Sequence[Sample]) -> int:
    return sum(_spec(s)["num_spec_steps"] for s in samples)
