"""What a person sees: tokens coloured by where they came from, and a table per run."""

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tiercel.core.errors import UserError
from tiercel.core.request import SOURCE_BONUS, SOURCE_NGRAM, SOURCE_PREFILL
from tiercel.engine.outputs import RequestOutput
from tiercel.report.wording import percent

LAYER_STYLES = ("bold green", "bold yellow", "bold magenta", "bold cyan")
"""Style of the tokens that MTP layer 1, 2, 3, … proposed; more layers start over."""


def source_style(source: int) -> str:
    """Rich style of a token's source."""
    if source == SOURCE_PREFILL:
        return "dim"
    if source == SOURCE_BONUS:
        return "default"
    if source == SOURCE_NGRAM:
        return "bold blue"
    return LAYER_STYLES[source % len(LAYER_STYLES)]


def legend(num_layers: int, *, with_lookup: bool) -> Text:
    """One line that explains the colours."""
    parts = [("prefill", source_style(SOURCE_PREFILL)), ("bonus token", source_style(SOURCE_BONUS))]
    parts += [(f"MTP layer {i + 1}", source_style(i)) for i in range(num_layers)]
    parts += [("prompt lookup", source_style(SOURCE_NGRAM))] if with_lookup else []
    line = Text("tokens from: ")
    for name, style in parts:
        line.append(f" {name} ", style)
    return line


def styled(text: str, source: int | None) -> Text:
    """A piece of a stream in its source's colour."""
    return Text(text, style="default" if source is None else source_style(source))


def save_picture(page: Sequence[RenderableType], path: Path, title: str) -> None:
    """Draw a page anew as an SVG picture, its long lines wrapped; a terminal does that itself, a picture cuts them off.

    Raises:
        UserError: the file cannot be written.
    """
    console = Console(record=True, file=io.StringIO(), width=100, highlight=False)
    for part in page:
        console.print(part)
    try:
        console.save_svg(str(path), title=title)
    except OSError as error:
        raise UserError(f"cannot write the picture {path}: {error.strerror}") from error


def counts_table(outputs: list[RequestOutput], num_layers: int) -> Table:
    """Tokens, rounds and acceptance of each request; positions after the MTP layers' only up to the last that was accepted."""
    table = Table(title="acceptance", title_justify="left")
    for name in ("request", "tokens", "rounds", "rate", "length", "by position", "if reached"):
        is_list = name in ("by position", "if reached")
        table.add_column(name, justify="left" if name == "request" or is_list else "right", no_wrap=not is_list)
    histograms = [output.record.spec["acceptance_histogram"] for output in outputs]
    most_correct = max((i for counts in histograms for i, rounds in enumerate(counts) if rounds), default=0)
    positions = max(num_layers, most_correct)
    for output in outputs:
        spec = output.record.spec
        length = spec["mean_acceptance_length"]
        table.add_row(
            output.request_id,
            str(output.record.completion_tokens),
            str(spec["num_spec_steps"]),
            percent(spec["draft_acceptance_rate"]),
            "–" if length is None else f"{length:.2f}",
            " ".join(percent(p) for p in spec["per_position_acceptance"][:positions]),
            " ".join(percent(p) for p in spec["per_position_conditional_acceptance"][:positions]),
        )
    return table


def stages_table(outputs: list[RequestOutput]) -> Table:
    """Where the rounds' time went, in milliseconds and shares."""
    table = Table(title="time in rounds", title_justify="left")
    table.add_column("request")
    stages = ("draft", "verify", "draft_extend", "other")
    for stage in stages:
        table.add_column(stage.replace("_", " "), justify="right")
    table.add_column("ms per round", justify="right")
    for output in outputs:
        times, rounds = output.record.spec["stage_time_ms"], output.record.spec["num_spec_steps"]
        total = sum(times.values())
        cells = [f"{times[s]:.0f} ms {percent(times[s] / total if total else None)}" for s in stages]
        table.add_row(output.request_id, *cells, f"{total / rounds:.1f}" if rounds else "–")
    return table
