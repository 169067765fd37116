"""How figures are written, and the sentences of a report: the page and the terminal say the same."""

from tiercel.report.figures import BatchCosts, Depth, Slice, Totals

NONE = "–"
"""Stands where nothing was counted."""

STAGE_NAMES = {"draft": "draft", "verify": "verify", "draft_extend": "draft extend", "other": "other"}

ABOUT = {
    "positions": "How often draft i of a round is right: among all rounds (unconditional), and among the rounds that came to it "
    "because every draft before it was right (conditional).",
    "drafters": "What became of each source's drafts. Rejected: the target chose another token; not reached: a draft before "
    "it was wrong.",
    "over_time": "Stretches of equally many decode steps, in seconds of engine time; several runs are laid one after another.",
    "by_context": "By the tokens that the request had before the round.",
    "stages": "Decode steps only. Stages exclude each other and sum to the wall time; MTP layers are part of draft extend.",
    "emitted": "Tokens that a request received in one round, the bonus token included.",
    "costs": "A round costs its verify (by rows), its draft extend (by layers) and the rest, fitted from these records; "
    "acceptance by position is what MTP layers reached in them. A plain step is a verify of one row per request. "
    "Break-even: the acceptance at which a depth is as fast as plain decoding. ~ marks what rests on few steps or none.",
    "worst_requests": "Fewest tokens per round, of requests with at least four rounds; those that drafted come first. Colours "
    "say where a token came from.",
    "worst_rounds": "Most time per emitted token; one round of a step. Struck-out drafts were rejected; in front of them stands "
    "what the answer ended with.",
}
EMPTY = {
    "positions": "Nothing was drafted: plain decoding, or answers of one token.",
    "rounds": "No round was played.",
    "worst_requests": "No finished request had four rounds.",
}


def percent(value: float | None, digits: int = 0) -> str:
    """A share."""
    return NONE if value is None else f"{100 * value:.{digits}f}%"


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands set apart by a thin space."""
    return NONE if value is None else f"{value:,.{digits}f}".replace(",", "\u2009")


def duration(ms: float | None) -> str:
    """Milliseconds, or seconds where there are many."""
    if ms is None:
        return NONE
    if ms >= 1000:
        return f"{number(ms / 1e3, 0 if ms >= 1e5 else 2)} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.2f} ms"


def tiles(totals: Totals) -> list[tuple[str, str, str]]:
    """Name, value and detail of the totals that come first."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in totals.finish_reasons.items()) or "none finished"
    unfinished = f", {totals.unfinished} unfinished" if totals.unfinished else ""
    first, each = totals.first_token_ms, totals.token_ms
    return [
        ("requests", number(totals.requests), reasons + unfinished),
        ("tokens", number(totals.completion_tokens), f"{number(totals.prompt_tokens)} prompt tokens"),
        ("decode speed", f"{number(totals.decode_tok_s, 1)} tok/s", f"{duration(totals.decode_ms)} in decode steps"),
        ("acceptance length", number(totals.acceptance_length, 2), "1 + correct drafts / rounds"),
        (
            "acceptance rate",
            percent(totals.acceptance_rate, 1),
            f"{number(totals.correct)} of {number(totals.proposed)} drafts",
        ),
        ("emitted per round", number(totals.emitted_per_round, 2), f"{number(totals.rounds)} rounds"),
        ("first token", duration(first.p50 if first else None), f"p90 {duration(first.p90 if first else None)}"),
        ("time per token", duration(each.p50 if each else None), f"p90 {duration(each.p90 if each else None)}"),
    ]


def context(part: Slice) -> str:
    """The bounds of a slice of contexts."""
    return f"{part.first:.0f}–{part.last:.0f}"


def recorded_depth(batch: BatchCosts) -> Depth:
    """The depth above 0 that most recorded steps had; the deepest where none had one."""
    return max(batch.depths[1:], key=lambda d: (d.measured_steps, d.num_steps))


def verdict(batch: BatchCosts) -> str:
    """What the cost model says for one batch size."""
    who = "1 request at once" if batch.num_requests == 1 else f"{batch.num_requests} requests at once"
    best, depth = batch.depths[batch.best], recorded_depth(batch)
    fastest = (
        f"plain decoding is fastest (predicted {number(best.tok_s)} tok/s)"
        if batch.best == 0
        else f"K = {batch.best} is fastest (predicted {number(best.tok_s)} tok/s, {best.speedup:.2f} × plain decoding)"
    )
    if depth.needed_acceptance is None:
        pays = f"no acceptance is enough (a round costs {depth.needed_length:.2f} plain steps)"
    else:
        pays = (
            f"speculation stops paying below an acceptance length of {depth.needed_length:.2f}, "
            f"that is {percent(depth.needed_acceptance)} of the drafts that are reached"
        )
    rough = " Rough: few steps, or none, had a row count that this needs." if depth.is_rough or best.is_rough else ""
    return f"{who}: {fastest}. At K = {depth.num_steps} {pays}; here it is {depth.acceptance_length:.2f}.{rough}"
