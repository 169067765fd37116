"""A report as one self-contained HTML page: style and charts are inside it, nothing is fetched, no script runs."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tiercel.core.palette import PALETTE
from tiercel.core.request import SOURCE_BONUS, SOURCE_NGRAM, SOURCE_PREFILL
from tiercel.report import wording
from tiercel.report.charts import Part, Series, bars, legend, line, stacks
from tiercel.report.figures import BatchCosts, Drafter, Report, Slice, Token, source_name

NUM_LAYER_LOOKS = 4
"""Colours for MTP layers; more layers start over."""

FATES = (("correct", "a"), ("rejected", "b"), ("not reached", "other"))
"""What becomes of a draft, and its CSS class."""


def look(source: int) -> str:
    """CSS class of a token's source."""
    named = {SOURCE_PREFILL: "prefill", SOURCE_BONUS: "bonus", SOURCE_NGRAM: "lookup"}
    return named.get(source, f"layer{source % NUM_LAYER_LOOKS + 1}")


def render_page(report: Report) -> str:
    """The page's text: HTML that is well-formed XML too."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=wording.percent, number=wording.number, duration=wording.duration, look=look)
    environment.globals.update(w=wording, source_name=source_name)
    return environment.get_template("page.html").render(
        report=report,
        css=Markup("".join(path.read_text(encoding="utf-8") for path in (PALETTE, folder / "page.css"))),
        charts=_charts(report),
        sources=_sources(report),
    )


def _charts(report: Report) -> dict[str, Markup]:
    """Charts by section; a section without data has none."""
    found: dict[str, Markup] = {}
    if report.positions:
        labels = [f"draft {p.position + 1}" for p in report.positions]
        among_all = Series("unconditional", "a", [p.unconditional for p in report.positions])
        if_reached = Series("conditional", "b", [p.conditional for p in report.positions])
        about = "acceptance by draft position"
        found["positions"] = bars(labels, [among_all, if_reached], wording.percent, about, top=1.0)
    if report.over_time:
        places = [(part.first + part.last) / 2 for part in report.over_time]
        found["acceptance_over_time"] = line(places, _lengths(report.over_time), _two, "s", "acceptance over time")
        speed = Series("tokens per second, all requests together", "c", [part.tok_s for part in report.over_time])
        found["speed_over_time"] = line(places, [speed], wording.number, "s", "speed over time")
    if report.by_context:
        labels = [wording.context(part) for part in report.by_context]
        found["by_context"] = bars(labels, _lengths(report.by_context), _two, "tokens per round by context length")
    if report.drafters:
        rows = [(drafter.name, _fates(drafter)) for drafter in report.drafters]
        found["drafters"] = stacks(rows, "what became of the drafts of each source") + legend(FATES)
    if report.stages:
        parts = [
            Part(wording.STAGE_NAMES[s.name], s.name, s.share, f"{s.ms_per_step:.2f} ms · {s.share:.1%}")
            for s in report.stages
        ]
        found["stages"] = stacks([("", parts)], "wall time of decode steps by stage") + legend(
            [(f"{p.name} {p.text}", p.look) for p in parts]
        )
    if report.emitted_histogram:
        labels = [str(count + 1) for count in range(len(report.emitted_histogram))]
        shares = [count / report.totals.rounds for count in report.emitted_histogram]
        found["emitted"] = bars(
            labels, [Series("share of rounds", "a", shares)], wording.percent, "rounds by emitted tokens"
        )
    for batch in report.costs.batches:
        found[f"speed at {batch.num_requests}"] = _speed(batch)
    return found


def _fates(drafter: Drafter) -> list[Part]:
    counts = (drafter.correct, drafter.reached - drafter.correct, drafter.proposed - drafter.reached)
    return [
        Part(name, style, count / drafter.proposed, wording.number(count))
        for (name, style), count in zip(FATES, counts, strict=True)
    ]


def _lengths(parts: Sequence[Slice]) -> list[Series]:
    accepted = Series("acceptance length", "a", [part.acceptance_length for part in parts])
    return [accepted, Series("emitted per round", "b", [part.emitted_per_round for part in parts])]


def _speed(batch: BatchCosts) -> Markup:
    labels = ["plain" if d.num_steps == 0 else f"K = {d.num_steps}" for d in batch.depths]
    series = [Series("predicted tok/s", "a", [d.tok_s for d in batch.depths])]
    if any(d.measured_tok_s is not None for d in batch.depths):
        series.append(Series("measured tok/s", "c", [d.measured_tok_s for d in batch.depths]))
    return bars(labels, series, wording.number, "tokens per second by depth")


def _sources(report: Report) -> list[int]:
    """Sources of the tokens that are shown, in the order of a legend."""
    tokens: list[Token] = [token for request in report.worst_requests for token in request.tokens]
    for one in report.worst_rounds:
        tokens += [*one.before, *one.drafts, *([one.bonus] if one.bonus else [])]
    return sorted({token.source for token in tokens}, key=lambda source: (source >= 0, source))


def _two(value: float | None) -> str:
    return wording.number(value, 2)
