"""From what was gathered to the figures of a report."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tiercel.core.acceptance import SpecCounts
from tiercel.core.batch import RequestRound, StepRecord
from tiercel.core.request import SOURCE_BONUS
from tiercel.observability.records import RequestRecord
from tiercel.report.costs import cost_report
from tiercel.report.figures import (
    STAGES,
    Drafter,
    Position,
    Report,
    Share,
    Slice,
    Spread,
    Token,
    Totals,
    WorstRequest,
    WorstRound,
    source_name,
)
from tiercel.report.gather import DecodeStep, Gathered, Name, RoundFacts, gather, token_ms
from tiercel.report.tokens import TokenTexts

MAX_SLICES = 30
FIRST_CONTEXT = 64
"""Contexts shorter than this are one slice; each further slice reaches twice as far."""
MAX_ANSWER_TOKENS, NUM_BEFORE = 400, 12
"""Tokens shown of a worst request, and in front of a worst round."""


def make_report(
    paths: Sequence[Path], model: str | None = None, skip_truncated: bool = False, costs_from: Sequence[Path] = ()
) -> Report:
    """The report on record folders and files.

    Args:
        paths: see ``gather``.
        model: whose tokenizer shows the tokens; None takes the models that the records name.
        skip_truncated: see ``gather``.
        costs_from: further records, of which only the cost model learns: plain decoding and other depths.

    Raises:
        UserError: a path holds no records, a line is broken, or ``model`` cannot be opened.
    """
    found, beside = gather(paths, skip_truncated), gather(costs_from, skip_truncated)
    texts = TokenTexts(model)
    worst_requests = [_worst_request(record, texts) for record in found.worst_requests.items()]
    worst_rounds = [_worst_round(found, name, record, part, texts) for name, record, part in found.worst_rounds.items()]
    return Report(
        sources=found.sources,
        notes=[*found.notes, *beside.notes, *_notes(found), *texts.notes],
        totals=_totals(found),
        positions=_positions(found.counts),
        drafters=_drafters(found),
        over_time=_over_time(found),
        by_context=_by_context(found),
        stages=_stages(found.steps),
        layers=_layers(found.steps),
        emitted_histogram=[int(n) for n in np.bincount([r.emitted for r in found.rounds] or [0])][1:],
        worst_requests=worst_requests,
        worst_rounds=worst_rounds,
        costs=cost_report([*found.steps, *beside.steps], _layer_acceptance(found.rounds)),
    )


def _notes(found: Gathered) -> Iterable[str]:
    if not found.requests:
        yield "no request records: totals of requests and the worst requests are missing, tokens are shown as ids"
    if not found.steps:
        yield "no decode step: figures of rounds are missing"
    recorded = sum(count for name, count in found.rounds_by_name.items() if name in found.records_by_name)
    if found.steps and found.claimed_rounds != recorded:
        yield (
            f"finished requests count {found.claimed_rounds} rounds, the step records hold {recorded} of theirs: some were "
            "dropped, or files are missing"
        )
    for error, count in found.errors.most_common(5):
        yield f"{count} requests failed: {error}"
    if len(found.models) > 1 or len(found.methods) > 1:
        several = ", ".join([*sorted(found.models), *sorted(found.methods)])
        yield f"runs of several models or methods are put together here ({several}): all figures are theirs on average"
    if "host-synchronized" in found.clocks:
        yield "stage times were read on the host's clock after waiting for the device"


def _totals(found: Gathered) -> Totals:
    counts, decode_ms = found.counts, sum(step.wall_ms for step in found.steps)
    emitted = sum(counts.emitted)
    return Totals(
        models=sorted(found.models),
        methods=sorted(found.methods),
        clocks=sorted(found.clocks),
        requests=len(found.requests),
        unfinished=len(found.rounds_by_name.keys() - found.records_by_name.keys()),
        finish_reasons=dict(sorted(found.finish_reasons.items())),
        preemptions=found.tokens["preemptions"],
        prompt_tokens=found.tokens["prompt"],
        completion_tokens=found.tokens["completion"],
        decode_steps=len(found.steps),
        rounds=counts.num_rounds,
        proposed=sum(counts.proposed),
        correct=sum(counts.correct),
        emitted=emitted,
        acceptance_rate=counts.acceptance_rate(),
        acceptance_length=counts.acceptance_length(),
        emitted_per_round=counts.emitted_per_round(),
        extend_ms=found.extend_ms,
        decode_ms=decode_ms,
        decode_tok_s=emitted / decode_ms * 1e3 if decode_ms else None,
        first_token_ms=_spread(r.first_token_ms for r in found.requests),
        token_ms=_spread(r.token_ms for r in found.requests),
        e2e_ms=_spread(r.e2e_ms for r in found.requests),
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (float(q) for q in np.quantile(known, (0.5, 0.9, 0.99)))
    return Spread(len(known), p50, p90, p99)


def _positions(counts: SpecCounts) -> list[Position]:
    depth = counts.max_depth
    shares = zip(counts.position_acceptance(depth), counts.conditional_acceptance(depth), strict=True)
    pairs = list(zip(counts.depths, counts.correct, strict=True))
    return [
        Position(
            position=i,
            proposed=sum(p > i for p, _ in pairs),
            reached=sum(p > i and c >= i for p, c in pairs),
            correct=sum(c > i for _, c in pairs),
            unconditional=unconditional,
            conditional=conditional,
        )
        for i, (unconditional, conditional) in enumerate(shares)
    ]


def _drafters(found: Gathered) -> list[Drafter]:
    return [
        Drafter(
            source=source,
            name=source_name(source),
            proposed=counts["proposed"],
            reached=counts["reached"],
            correct=counts["correct"],
            rate=counts["correct"] / counts["proposed"],
            conditional=counts["correct"] / counts["reached"] if counts["reached"] else None,
        )
        for source, counts in sorted(found.drafters.items(), key=lambda item: (item[0] < 0, item[0]))
    ]


def _layer_acceptance(rounds: Sequence[RoundFacts]) -> list[float]:
    """Conditional acceptance by position of what MTP layers drafted, up to the first position that was never reached."""
    counts = SpecCounts()
    for facts in rounds:
        if facts.source is not None and facts.source >= 0:
            counts.add_round(facts.proposed, facts.correct, facts.emitted, facts.depth)
    found: list[float] = []
    for share in counts.conditional_acceptance(counts.max_depth):
        if share is None:
            break
        found.append(share)
    return found


def _over_time(found: Gathered) -> list[Slice]:
    """Stretches of equally many decode steps."""
    if not found.rounds:
        return []
    steps = found.steps
    edges = np.linspace(0, len(steps), min(MAX_SLICES, len(steps)) + 1).astype(int).tolist()
    groups: list[list[RoundFacts]] = [[] for _ in edges[1:]]
    places = np.searchsorted(edges, [facts.step for facts in found.rounds], side="right") - 1
    for facts, place in zip(found.rounds, places.tolist(), strict=True):
        groups[place].append(facts)
    slices = []
    for first, last, group in zip(edges[:-1], edges[1:], groups, strict=True):
        part = steps[first:last]
        begins = part[0].end_s - part[0].wall_ms / 1e3
        tok_s = sum(s.emitted for s in part) / sum(s.wall_ms for s in part) * 1e3
        slices += [_slice(begins, part[-1].end_s, group, steps, tok_s)] if group else []
    return slices


def _by_context(found: Gathered) -> list[Slice]:
    groups: dict[int, list[RoundFacts]] = {}
    for facts in found.rounds:
        groups.setdefault(max(0, (facts.context_len // FIRST_CONTEXT).bit_length()), []).append(facts)
    return [
        _slice(FIRST_CONTEXT << i - 1 if i else 0, (FIRST_CONTEXT << i) - 1, group, found.steps, None)
        for i, group in sorted(groups.items())
    ]


def _slice(
    first: float, last: float, group: Sequence[RoundFacts], steps: Sequence[DecodeStep], tok_s: float | None
) -> Slice:
    counts = SpecCounts()
    for facts in group:
        counts.add_round(facts.proposed, facts.correct, facts.emitted, facts.depth)
    return Slice(
        first=first,
        last=last,
        rounds=len(group),
        acceptance_length=counts.acceptance_length(),
        acceptance_rate=counts.acceptance_rate(),
        emitted_per_round=counts.emitted_per_round(),
        ms_per_round=sum(steps[facts.step].wall_ms for facts in group) / len(group),
        tok_s=tok_s,
    )


def _stages(steps: Sequence[DecodeStep]) -> list[Share]:
    wall = sum(step.wall_ms for step in steps)
    totals = {stage: sum(step.stage_ms[stage] for step in steps) for stage in STAGES}
    return [Share(stage, ms, ms / len(steps), ms / wall) for stage, ms in totals.items()] if wall else []


def _layers(steps: Sequence[DecodeStep]) -> list[Share]:
    """What each MTP layer took of the decode steps' wall time, inside the draft extend; and the rest of that stage."""
    wall, timed = sum(step.wall_ms for step in steps), [step for step in steps if step.layer_ms]
    depth = max((len(step.layer_ms) for step in timed), default=0)
    totals = {source_name(i): sum(step.layer_ms[i] for step in timed if len(step.layer_ms) > i) for i in range(depth)}
    if totals:
        totals["rest of draft extend"] = sum(step.stage_ms["draft_extend"] for step in steps) - sum(totals.values())
    return [Share(name, ms, ms / len(steps), ms / wall) for name, ms in totals.items()]


def _worst_request(record: RequestRecord, texts: TokenTexts) -> WorstRequest:
    ids, sources = record.token_ids[:MAX_ANSWER_TOKENS], record.token_sources[:MAX_ANSWER_TOKENS]
    rounds = record.spec["num_spec_steps"]
    return WorstRequest(
        request_id=record.request_id,
        finish_reason=record.finish_reason,
        completion_tokens=record.completion_tokens,
        rounds=rounds,
        emitted_per_round=record.spec["num_emitted_tokens"] / rounds,
        acceptance_rate=record.spec["draft_acceptance_rate"],
        token_ms=token_ms(record),
        tokens=[Token(*token) for token in zip(ids, texts.of(record.model, ids), sources, strict=True)],
    )


def _worst_round(found: Gathered, name: Name, step: StepRecord, part: RequestRound, texts: TokenTexts) -> WorstRound:
    wall_ms = (step.end_ns - step.start_ns) / 1e6
    owner, model = _owner(found, name), next(iter(found.models)) if len(found.models) == 1 else ""
    before: list[Token] = []
    if owner is not None:
        model, end = owner.model, part.context_len - owner.prompt_tokens
        ids, sources = owner.token_ids[:end][-NUM_BEFORE:], owner.token_sources[:end][-NUM_BEFORE:]
        before = [Token(*token) for token in zip(ids, texts.of(model, ids), sources, strict=True)]
    context = [token.token_id for token in before]
    correct = part.num_correct_drafts
    drafts = [
        Token(token_id, text, layer, is_correct=i < correct)
        for i, (token_id, text, layer) in enumerate(
            zip(
                part.draft_token_ids,
                _texts(texts, model, part.draft_token_ids, context),
                part.draft_layers,
                strict=True,
            )
        )
    ]
    bonus = None
    if part.bonus_token_id >= 0:
        ahead = [*context, *part.draft_token_ids[:correct]]
        (text,) = _texts(texts, model, [part.bonus_token_id], ahead)
        bonus = Token(part.bonus_token_id, text, SOURCE_BONUS, is_correct=part.num_emitted_tokens > correct)
    return WorstRound(
        request_id=part.request_id,
        round=part.round,
        step=step.step,
        context_len=part.context_len,
        num_requests=len(step.rounds),
        emitted=part.num_emitted_tokens,
        ms=wall_ms,
        ms_per_token=wall_ms / part.num_emitted_tokens,
        stage_ms={stage: ns / 1e6 for stage, ns in step.stage_ns.items()},
        before=before,
        drafts=drafts,
        bonus=bonus,
    )


def _owner(found: Gathered, name: Name) -> RequestRecord | None:
    """The request of a round; None where it has no record, or several runs in one folder used its id."""
    return found.records_of_worst_rounds.get(name) if found.records_by_name[name] == 1 else None


def _texts(texts: TokenTexts, model: str, ids: Sequence[int], before: Sequence[int]) -> list[str | None]:
    return texts.of(model, ids, before) if model else [None] * len(ids)
