"""``tiercel``: the commands, and the one place where a user's mistake becomes one line and exit code 2."""

import sys
from importlib import import_module

import typer
from rich.console import Console
from rich.markup import escape

from tiercel import __version__
from tiercel.cli import bench
from tiercel.core.errors import UserError

app = typer.Typer(
    help="Multi-layer EAGLE speculative decoding in which every round of every request can be seen.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name in ("pull", "inspect", "generate", "demo", "train", "eval_draft", "report", "tune", "serve"):
    app.command(_name.replace("_", "-"))(import_module(f"tiercel.cli.{_name}").command)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tiercel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Entry point of the ``tiercel`` command."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]tiercel:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
