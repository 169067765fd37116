"""``tiercel tune``: how much to draft at which load on this machine, measured, and kept where engines find it."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from tiercel.bench import tune
from tiercel.bench.throughput import run_groups
from tiercel.cli import options
from tiercel.cli.bench_tables import new_table, show
from tiercel.cli.json_file import check_writable
from tiercel.cli.measuring import (
    Json,
    Limit,
    Runs,
    Tokens,
    chosen_texts,
    new_result,
    open_with_prompts,
    reporting,
    show_result,
)
from tiercel.core.config import EngineConfig
from tiercel.core.depths import Depth, DepthTable
from tiercel.models.mtp_checkpoint import read_description, resolve_draft
from tiercel.speculative.tuned import prepare_folder, write_tuned


def command(
    prompts: options.Prompts = None,
    limit: Limit = None,
    concurrency: Annotated[list[int], typer.Option(min=1, help="Requests at once; repeatable.")] = list(tune.LOADS),  # noqa: B006
    max_tokens: Tokens = 64,
    runs: Runs = 3,
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    activation_bits: options.ActivationBits = 8,
    kv_dtype: options.KvDtype = "auto",
    enforce_eager: options.EnforceEager = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and recommend; keep nothing.")] = False,
    json_file: Json = None,
) -> None:
    """Measure every depth at every load, and keep the fastest where `generate` and Python's `LLM` find it."""
    check_writable(json_file)
    texts = chosen_texts(prompts, limit)
    loads = sorted(set(concurrency))
    engine = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        activation_bits=activation_bits,
        kv_dtype=kv_dtype,
        enforce_eager=enforce_eager,
        num_threads=threads,
        max_batch_size=loads[-1],
    )
    with ExitStack() as stack, reporting() as report:
        bench, rows = open_with_prompts(stack, engine, draft, [None], texts)
        if not dry_run:
            prepare_folder()
        num_layers = read_description(resolve_draft(draft, bench.target.checkpoint)).num_layers
        contenders = tune.contenders(bench.with_room(rows, max_tokens), stack, num_layers)
        samples = run_groups(contenders, rows, loads, max_tokens, runs, report, every_prompt=True)
    measured = tune.measured(samples, num_layers)
    table = tune.recommend(measured)
    result = new_result("tune", engine, texts, max_tokens, runs) | {
        "depths": [row.to_json() for row in measured],
        "recommended": table.to_json(),
    }
    key = bench.tune_key()
    path = None if dry_run else write_tuned(key, table, result)
    result |= {
        "key": key.to_json(),
        "file": path and str(path),
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    show_result([_table(measured, table), f"recommended: {table}"], result, json_file)
    typer.echo("dry run: nothing kept" if path is None else f"kept in {path}")


def _table(rows: Sequence[tune.Measured], table: DepthTable) -> Table:
    columns = ("requests", "drafter", "emitted per round", "round ms", "total tok/s", "total / plain", "")
    found = new_table("drafting by load", columns, left=2)
    for _, group in groupby(rows, key=lambda row: row.depth.requests):
        found.add_section()
        for row in group:
            found.add_row(*_cells(row), "recommended" if _is_chosen(row.depth, table) else "")
    return found


def _cells(row: tune.Measured) -> list[str | Text]:
    numbers = ((row.round_ms, 2), (row.total_tok_s, 1), (row.ratio_to_plain, 2))
    spreads = [show(dataclasses.asdict(spread), digits) for spread, digits in numbers]
    return [str(row.depth.requests), row.depth.drafter, f"{row.emitted_per_round:.2f}", *spreads]


def _is_chosen(depth: Depth, table: DepthTable) -> bool:
    chosen = table.at(depth.requests or 0)
    return (chosen.num_steps, chosen.lookup) == (depth.num_steps, depth.lookup)
