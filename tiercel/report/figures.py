"""What a report holds: plain numbers, ready to be shown or written as JSON. Shares are in [0, 1]; None: nothing to count."""

from dataclasses import dataclass

from tiercel.core.request import SOURCE_BONUS, SOURCE_NGRAM, SOURCE_PREFILL

STAGES = ("draft", "verify", "draft_extend", "other")


def source_name(source: int) -> str:
    """What people call the source of a token; they count MTP layers from 1."""
    names = {SOURCE_PREFILL: "prefill", SOURCE_BONUS: "bonus token", SOURCE_NGRAM: "prompt lookup"}
    return names.get(source, f"MTP layer {source + 1}")


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of ``count`` values."""

    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Everything together. ``unfinished`` requests have rounds but no record of their end."""

    models: list[str]
    methods: list[str]
    clocks: list[str]
    requests: int
    unfinished: int
    finish_reasons: dict[str, int]
    preemptions: int
    prompt_tokens: int
    completion_tokens: int
    decode_steps: int
    rounds: int
    proposed: int
    correct: int
    emitted: int
    acceptance_rate: float | None
    acceptance_length: float | None
    emitted_per_round: float | None
    extend_ms: float
    decode_ms: float
    decode_tok_s: float | None
    first_token_ms: Spread | None
    token_ms: Spread | None
    e2e_ms: Spread | None


@dataclass(frozen=True, slots=True)
class Position:
    """Draft position i, from 0: ``unconditional`` among all rounds, ``conditional`` among the ``reached`` ones."""

    position: int
    proposed: int
    reached: int
    correct: int
    unconditional: float | None
    conditional: float | None


@dataclass(frozen=True, slots=True)
class Drafter:
    """Drafts of one source: ``rate`` is correct / proposed, ``conditional`` correct / reached (all drafts before it correct)."""

    source: int
    name: str
    proposed: int
    reached: int
    correct: int
    rate: float | None
    conditional: float | None


@dataclass(frozen=True, slots=True)
class Slice:
    """Rounds that belong together: a stretch of time, or contexts of similar length.

    ``first`` and ``last`` bound it: seconds of engine time, or tokens. ``ms_per_round`` is the mean wall time of the rounds'
    steps; ``tok_s`` emitted tokens per second of step time (of all requests together; None by context).
    """

    first: float
    last: float
    rounds: int
    acceptance_length: float | None
    acceptance_rate: float | None
    emitted_per_round: float | None
    ms_per_round: float
    tok_s: float | None


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the decode steps' wall time."""

    name: str
    total_ms: float
    ms_per_step: float
    share: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is shown; ``text`` is None where no tokenizer could be opened."""

    token_id: int
    text: str | None
    source: int
    is_correct: bool = True


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """One of the requests with the fewest emitted tokens per round."""

    request_id: str
    finish_reason: str
    completion_tokens: int
    rounds: int
    emitted_per_round: float
    acceptance_rate: float | None
    token_ms: float | None
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class WorstRound:
    """One of the rounds that took longest per emitted token. ``before`` are the answer's last tokens, where they are known."""

    request_id: str
    round: int
    step: int
    context_len: int
    num_requests: int
    emitted: int
    ms: float
    ms_per_token: float
    stage_ms: dict[str, float]
    before: list[Token]
    drafts: list[Token]
    bonus: Token | None


@dataclass(frozen=True, slots=True)
class VerifyPoint:
    """Verify time by rows: the median of ``steps`` steps, and what the fitted line says."""

    rows: int
    steps: int
    median_ms: float
    line_ms: float | None


@dataclass(frozen=True, slots=True)
class Depth:
    """What K drafts per round cost and bring, predicted; and measured, where the records hold such rounds.

    ``needed_length`` is the acceptance length at which this depth is as fast as plain decoding, ``needed_acceptance`` the
    conditional acceptance of each draft that gives it (None: no acceptance is enough; 0: it pays at any).
    ``is_rough``: a row count was measured in few steps, or lies beyond the measured ones.
    """

    num_steps: int
    round_ms: float
    acceptance_length: float
    tok_s: float
    speedup: float
    needed_length: float
    needed_acceptance: float | None
    is_rough: bool
    measured_steps: int
    measured_round_ms: float | None
    measured_tok_s: float | None


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Depths from 0 (plain decoding) on, for steps with this many requests; ``best`` has the highest predicted speed."""

    num_requests: int
    steps: int
    best: int
    depths: list[Depth]


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost model's answer; ``reason`` says why there is none."""

    reason: str | None
    verify: list[VerifyPoint]
    acceptance: list[float]
    batches: list[BatchCosts]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report."""

    sources: list[str]
    notes: list[str]
    totals: Totals
    positions: list[Position]
    drafters: list[Drafter]
    over_time: list[Slice]
    by_context: list[Slice]
    stages: list[Share]
    layers: list[Share]
    emitted_histogram: list[int]
    worst_requests: list[WorstRequest]
    worst_rounds: list[WorstRound]
    costs: Costs
