"""``tiercel report``: what the records of a run say."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tiercel.cli.json_file import check_writable, write_json
from tiercel.cli.render import save_picture
from tiercel.cli.report_tables import report_tables
from tiercel.report.analysis import make_report
from tiercel.report.page import render_page


def command(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders of --records-out, or record files; runs are put together.")
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure as JSON.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model whose tokenizer shows tokens; default: the recorded one.")
    ] = None,
    costs_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--costs-from", help="Records of the same model at other depths, or plain: for the cost model alone."
        ),
    ] = None,
    skip_truncated: Annotated[
        bool, typer.Option("--skip-truncated", help="Leave out a last line that a crash has cut off.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Save the tables as an SVG picture.")] = None,
) -> None:
    """Show acceptance, times, the worst rounds, and whether speculation pays, from records."""
    for file, option in ((html, "--html"), (json_file, "--json"), (picture, "--picture")):
        check_writable(file, option)
    report = make_report(paths, model, skip_truncated, costs_from or [])
    tables = report_tables(report)
    console = Console(highlight=False)
    for part in tables:
        console.print(part)
    if html:
        html.write_text(render_page(report), encoding="utf-8")
    write_json(json_file, asdict(report))
    if picture:
        save_picture(tables, picture, "tiercel report")
