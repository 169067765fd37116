"""A report as tables for people."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tiercel.cli.render import source_style
from tiercel.report import wording
from tiercel.report.figures import BatchCosts, Report, Slice, Token, WorstRequest, WorstRound, source_name
from tiercel.report.wording import duration, number, percent

BLOCKS = "▁▂▃▄▅▆▇█"


def report_tables(report: Report) -> list[RenderableType]:
    """Everything that the page shows, section by section; a section without data says so."""
    return [
        *(Text(f"note: {note}", "yellow") for note in report.notes),
        _totals(report),
        *_acceptance(report),
        *_course(report),
        *_times(report),
        *_costs(report),
        *_worst(report),
    ]


def _totals(report: Report) -> Table:
    table = _table("totals", ["", "", ""], left=3)
    for name, value, detail in wording.tiles(report.totals):
        table.add_row(name, Text(value, "bold"), Text(detail, "dim"))
    return table


def _acceptance(report: Report) -> Iterator[RenderableType]:
    if not report.positions:
        yield _nothing("acceptance", wording.EMPTY["positions"])
        return
    by_position = _table(
        "acceptance by position", ["draft", "proposed", "reached", "correct", "of all rounds", "if reached"]
    )
    for p in report.positions:
        counts = (number(p.proposed), number(p.reached), number(p.correct))
        by_position.add_row(str(p.position + 1), *counts, percent(p.unconditional, 1), percent(p.conditional, 1))
    yield by_position
    by_source = _table("acceptance by MTP layer", ["from", "proposed", "reached", "correct", "rate", "if reached"])
    for d in report.drafters:
        counts = (number(d.proposed), number(d.reached), number(d.correct))
        by_source.add_row(Text(d.name, source_style(d.source)), *counts, percent(d.rate, 1), percent(d.conditional, 1))
    yield by_source


def _course(report: Report) -> Iterator[RenderableType]:
    if not report.over_time:
        yield _nothing("over time", wording.EMPTY["rounds"])
        return
    first, last = report.over_time[0].first, report.over_time[-1].last
    course = _table(f"over time, {first:.1f} to {last:.1f} s", ["", "course", "least", "most"], left=2)
    course.add_row(*_spark("acceptance length", [part.acceptance_length for part in report.over_time], 2))
    course.add_row(*_spark("tokens per second", [part.tok_s for part in report.over_time], 0))
    yield course
    contexts = _table("by context length", ["tokens", "rounds", "rate", "acceptance length", "emitted", "ms per round"])
    for part in report.by_context:
        contexts.add_row(wording.context(part), number(part.rounds), percent(part.acceptance_rate, 1), *_lengths(part))
    yield contexts
    emitted = _table("emitted tokens per round", ["tokens", "rounds", "share", ""])
    for count, rounds in enumerate(report.emitted_histogram, start=1):
        share = rounds / report.totals.rounds
        emitted.add_row(str(count), number(rounds), percent(share, 1), Text("█" * round(share * 40), "green"))
    emitted.columns[-1].justify = "left"
    yield emitted


def _lengths(part: Slice) -> tuple[str, str, str]:
    return number(part.acceptance_length, 2), number(part.emitted_per_round, 2), number(part.ms_per_round, 2)


def _times(report: Report) -> Iterator[RenderableType]:
    if not report.stages:
        yield _nothing("time of decode steps", wording.EMPTY["rounds"])
        return
    table = _table("time of decode steps", ["part", "total", "ms per step", "share"])
    for part in report.stages:
        name = wording.STAGE_NAMES[part.name]
        table.add_row(name, duration(part.total_ms), number(part.ms_per_step, 3), percent(part.share, 1))
        for layer in report.layers if part.name == "draft_extend" else ():
            cells = (f"  {layer.name}", duration(layer.total_ms), number(layer.ms_per_step, 3), percent(layer.share, 1))
            table.add_row(*(Text(cell, "dim") for cell in cells))
    table.add_section()
    totals = report.totals
    table.add_row("all", duration(totals.decode_ms), number(totals.decode_ms / totals.decode_steps, 3), "100%")
    yield table


def _costs(report: Report) -> Iterator[RenderableType]:
    if report.costs.reason:
        yield _nothing("does speculation pay?", f"No answer: {report.costs.reason}.")
    for batch in report.costs.batches:
        yield _depths(batch)
        yield Text(wording.verdict(batch) + "\n")


def _depths(batch: BatchCosts) -> Table:
    requests = "1 request" if batch.num_requests == 1 else f"{batch.num_requests} requests"
    columns = ["K", "round ms", "length", "tok/s", "× plain", "break-even", "if reached", "measured ms"]
    table = _table(f"does speculation pay? predicted for {requests} at once", columns)
    for d in batch.depths:
        needed = (
            "never" if d.needed_acceptance is None else percent(d.needed_acceptance) if d.num_steps else wording.NONE
        )
        table.add_row(
            f"{d.num_steps}{' ~' if d.is_rough else ''}",
            number(d.round_ms, 2),
            number(d.acceptance_length, 2),
            number(d.tok_s),
            number(d.speedup, 2),
            number(d.needed_length, 2),
            needed,
            number(d.measured_round_ms, 2),
            style="bold" if d.num_steps == batch.best else None,
        )
    return table


def _worst(report: Report) -> Iterator[RenderableType]:
    if not report.worst_requests:
        yield _nothing("worst requests", wording.EMPTY["worst_requests"])
    else:
        yield Text("worst requests: fewest tokens per round", "italic")
    for request in report.worst_requests:
        yield _request_line(request)
        yield _tokens(request.tokens)
    if not report.worst_rounds:
        yield _nothing("worst rounds", wording.EMPTY["rounds"])
    else:
        yield Text("\nworst rounds: most time per emitted token; rejected drafts are struck out", "italic")
    for one in report.worst_rounds:
        yield _round_line(one)
        drafts = [*one.drafts, *([one.bonus] if one.bonus else [])]
        yield Text.assemble(_tokens(one.before, "dim"), (" ▸ ", "bold"), _tokens(drafts))
    if sources := _sources(report):
        yield Text.assemble("\ntokens from: ", *((f" {source_name(s)} ", source_style(s)) for s in sources))


def _request_line(one: WorstRequest) -> Text:
    facts = (
        f"{number(one.emitted_per_round, 2)} tokens per round, {number(one.rounds)} rounds, "
        f"rate {percent(one.acceptance_rate, 1)}, {duration(one.token_ms)} per token, ended by {one.finish_reason}"
    )
    return Text.assemble((one.request_id, "bold"), ": ", (facts, "dim"))


def _round_line(one: WorstRound) -> Text:
    stages = ", ".join(f"{wording.STAGE_NAMES[stage]} {number(ms, 2)}" for stage, ms in one.stage_ms.items())
    facts = (
        f"{duration(one.ms_per_token)} per token ({stages} ms), step {one.step}, {one.num_requests} at once, "
        f"context {number(one.context_len)}"
    )
    return Text.assemble((f"{one.request_id}, round {one.round}", "bold"), ": ", (facts, "dim"))


def _tokens(tokens: Sequence[Token], style: str | None = None) -> Text:
    line = Text()
    for token in tokens:
        text = f"{token.token_id} " if token.text is None else token.text
        line.append(text, style or f"{source_style(token.source)}{'' if token.is_correct else ' strike'}")
    return line


def _sources(report: Report) -> list[int]:
    shown = {token.source for request in report.worst_requests for token in request.tokens}
    shown |= {
        token.source for one in report.worst_rounds for token in (*one.drafts, *([one.bonus] if one.bonus else []))
    }
    return sorted(shown, key=lambda source: (source >= 0, source))


def _spark(name: str, values: Sequence[float | None], digits: int) -> tuple[str, str, str, str]:
    """A row of blocks as high as the values, from 0 to the highest."""
    known = [value for value in values if value is not None]
    most = max(known, default=0)
    course = "".join(" " if v is None else BLOCKS[round(v / most * (len(BLOCKS) - 1)) if most else 0] for v in values)
    return name, course, number(min(known, default=None), digits), number(max(known, default=None), digits)


def _table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def _nothing(title: str, reason: str) -> Text:
    return Text.assemble((f"{title}: ", "italic"), (reason, "dim"))
