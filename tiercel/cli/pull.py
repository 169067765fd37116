"""``tiercel pull``: bring a model onto this computer."""

from typing import Annotated

import typer
from rich.console import Console

from tiercel.cli import options
from tiercel.models.hub import pull


def command(model: Annotated[str, typer.Argument(help="smollm2-135m or hf:ORG/NAME.")] = options.DEFAULT) -> None:
    """Bring a model onto this computer; at once if it is here already."""
    console = Console(stderr=True)
    with console.status(f"pulling {model}"):
        path = pull(model)
    typer.echo(path)
