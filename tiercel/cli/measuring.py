"""What commands that measure share: options, prompts, progress on stderr, and the result for people and as JSON."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from tiercel.bench import hardware
from tiercel.bench.engines import Bench, encode, open_bench
from tiercel.bench.samples import BenchPrompt
from tiercel.bench.turns import Report
from tiercel.cli.bench_tables import hardware_line
from tiercel.cli.demo import PROMPTS
from tiercel.cli.json_file import write_json
from tiercel.cli.prompts import read_prompts
from tiercel.core.config import EngineConfig

SCHEMA_VERSION = 1

Limit = Annotated[int | None, typer.Option(min=1, help="Take so many prompts, spread over the file.")]
Runs = Annotated[int, typer.Option(min=1, help="Timed runs over all prompts, after a warm-up.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Completion tokens of every answer.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write results and every raw sample to this file.")]


def chosen_texts(prompts: Path | None, limit: int | None) -> dict[str, str]:
    """Prompts by name, ``limit`` of them spread over the file; the demo's without a file.

    Raises:
        UserError: see ``read_prompts``.
    """
    if prompts is None:
        texts = {str(number): text for number, text in enumerate(PROMPTS, start=1)}
    else:
        texts = {row.request_id: row.text for row in read_prompts(prompts)}
    if limit is None or limit >= len(texts):
        return texts
    names = list(texts)
    return {names[i * len(names) // limit]: texts[names[i * len(names) // limit]] for i in range(limit)}


def open_with_prompts(
    stack: ExitStack, engine: EngineConfig, draft: str, depths: Sequence[int | None], texts: dict[str, str]
) -> tuple[Bench, list[BenchPrompt]]:
    """The target in memory, and the prompts as token ids.

    Raises:
        UserError: see ``open_bench``.
    """
    bench = open_bench(engine, draft, depths)
    return bench, encode(bench.open(stack, 0), texts)


@contextmanager
def reporting() -> Iterator[Report]:
    """How far it has come, on stderr."""
    with Console(stderr=True).status("loading the model") as status:
        yield status.update


def new_result(command: str, engine: EngineConfig, texts: dict[str, str], max_tokens: int, runs: int) -> dict[str, Any]:
    """What every result says: settings, hardware, versions."""
    settings = {"max_tokens": max_tokens, "runs": runs, "prompts": list(texts), "engine": dataclasses.asdict(engine)}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "settings": settings,
        "hardware": hardware.describe(),
        "versions": hardware.versions(),
    }


def show_result(page: Sequence[RenderableType], result: dict[str, Any], json_file: Path | None) -> None:
    """Print tables and the hardware, and write the file if one was asked for."""
    console = Console(highlight=False)
    for part in page:
        console.print(part)
    console.print(hardware_line(result), soft_wrap=True, markup=False)
    write_json(json_file, result)
