"""What the trials share: a step over some rows of one request, and contenders timed in turns."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tiercel.bench import hardware
from tiercel.bench.samples import Spread
from tiercel.bench.turns import SETTLE_S
from tiercel.cli.bench_tables import hardware_line, new_table, show
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import StepInput, StepOutput, Target

CONTEXT = 128
"""Positions that the rows look back on."""
REPEATS = 5
CPU = torch.device("cpu")

Times = dict[int, dict[str, Spread]]
"""Milliseconds by number of rows, then by contender."""


class Request:
    """One request of ``target`` whose first ``CONTEXT`` positions are computed; ``count`` rows follow them.

    ``step`` reads those rows and asks for each one's best token, as a verify does; ``storages`` hold keys and values.
    """

    def __init__(self, target: Target, count: int) -> None:
        shape, end = target.description, CONTEXT + count
        self.storages = [
            KvStorage(end, shape.num_kv_heads, shape.head_dim, target.kv_dtype, CPU) for _ in range(shape.num_layers)
        ]
        token_ids, slots = torch.arange(1000, 1000 + end), torch.arange(end)
        before = Rows([Segment(0, CONTEXT, slots)], CPU)
        target.run(StepInput(before, token_ids[:CONTEXT], torch.tensor([CONTEXT - 1])), self.storages)
        self.target, rows = target, Rows([Segment(CONTEXT, end, slots)], CPU)
        self.step = StepInput(rows, token_ids[CONTEXT:], torch.arange(count))

    def __call__(self) -> StepOutput:
        return self.target.run(self.step, self.storages)


def in_turns(contenders: Mapping[str, Callable[[], object]], runs: int) -> dict[str, Spread]:
    """Milliseconds per call: the mean of ``REPEATS`` calls after one that is not counted, over the runs."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, work in contenders.items():
            time.sleep(SETTLE_S)
            work()
            start = time.perf_counter()
            for _ in range(REPEATS):
                work()
            times[name].append((time.perf_counter() - start) / REPEATS * 1e3)
    return {name: Spread.of(found) for name, found in times.items()}


def report(title: str, times: Times, versions: dict[str, str], json_file: Path | None, **more: Any) -> None:
    """Print a table of ``times`` and the hardware, and write all of it to the file if one was asked for."""
    result = {
        "times_ms": {rows: {name: dataclasses.asdict(s) for name, s in found.items()} for rows, found in times.items()},
        "hardware": hardware.describe(),
        "versions": hardware.versions() | versions,
        **more,
    }
    table = new_table(title, ["ms per step", *(f"{rows} rows" if rows > 1 else "1 row" for rows in times)])
    for name in next(iter(times.values())):
        table.add_row(name, *(show(dataclasses.asdict(found[name])) for found in times.values()))
    console = Console(highlight=False)
    console.print(table)
    console.print(hardware_line(result), soft_wrap=True, markup=False)
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
