"""What the trials share: a step over some rows of one request, and contenders timed in turns."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

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

Times = dict[int, dict[str, list[float]]]
"""Milliseconds by number of rows, then by contender: one number per run."""


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


def in_turns(contenders: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Milliseconds per call: the mean of ``REPEATS`` calls after one that is not counted, run by run."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, work in contenders.items():
            time.sleep(SETTLE_S)
            work()
            start = time.perf_counter()
            for _ in range(REPEATS):
                work()
            times[name].append((time.perf_counter() - start) / REPEATS * 1e3)
    return times


def report(title: str, times: Times, versions: dict[str, str], json_file: Path | None, **more: Any) -> None:
    """Print times, their ratios to the first contender's of the same run, and the hardware; write all to the file, if any."""
    result = {"times_ms": times, "hardware": hardware.describe(), "versions": hardware.versions() | versions, **more}
    columns = [f"{rows} rows" if rows > 1 else "1 row" for rows in times]
    names = list(next(iter(times.values())))
    speeds = new_table(f"{title}: ms per step", ["", *columns])
    ratios = new_table(f"times as long as {names[0]}, run by run", ["", *columns])
    for name in names:
        speeds.add_row(name, *(_spread(found[name]) for found in times.values()))
        pairs = [zip(found[name], found[names[0]], strict=True) for found in times.values()]
        ratios.add_row(name, *(_spread([ours / first for ours, first in pair]) for pair in pairs))
    console = Console(highlight=False)
    console.print(speeds, ratios)
    console.print(hardware_line(result), soft_wrap=True, markup=False)
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _spread(values: list[float]) -> Text:
    return show(dataclasses.asdict(Spread.of(values)), 2)
