"""The benchmarks' results as tables for people."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tiercel.bench.latency import STAGES
from tiercel.bench.peers import OWN
from tiercel.bench.samples import Spread
from tiercel.report.wording import percent

SPEED_COLUMNS = {
    "first token ms": "first_token_ms",
    "decode tok/s": "decode_tok_s",
    "end-to-end tok/s": "end_to_end_tok_s",
}
TITLE_WIDTH = 10
"""Of a column: a page of 80 characters holds seven."""
SPREAD = "median, least–most of the runs"


def latency(result: dict[str, Any]) -> list[RenderableType]:
    """Speeds and ratios, then milliseconds per round by stage."""
    speeds = new_table("batch 1", ["contender", *SPEED_COLUMNS, "decode / plain", "acceptance length"])
    rounds = new_table("milliseconds per round", ["contender", *(s.replace("_", " ") for s in STAGES), "round"])
    for name, row in result["contenders"].items():
        length = f"{row['acceptance_length']:.2f}"
        speeds.add_row(name, *_speeds(row), show(row["decode_ratio_to_plain"], 2), length)
        stages = row["stage_ms_per_round"]
        rounds.add_row(name, *(show(stages[stage], 2) for stage in STAGES), show(row["ms_per_round"], 2))
    return [speeds, rounds]


def throughput(result: dict[str, Any]) -> list[RenderableType]:
    """All requests together, then what one request sees."""
    columns = [
        "requests",
        "contender",
        "total tok/s",
        "total / plain",
        "first token ms",
        "decode tok/s of one",
        "of one / plain",
    ]
    table = new_table("requests at once", columns, left=2)
    for row in result["groups"]:
        numbers = (show(row["total_tok_s"]), show(row["total_ratio_to_plain"], 2))
        one = (show(row["first_token_ms"]), show(row["decode_tok_s"]), show(row["decode_ratio_to_plain"], 2))
        table.add_row(str(row["concurrency"]), row["contender"], *numbers, *one)
    return [table]


def overhead(result: dict[str, Any]) -> list[RenderableType]:
    """Cost of each way of looking."""
    table = new_table(
        "cost of tracing", ["tracing", *SPEED_COLUMNS, "decode time / off", "above noise", "CPU time / off"]
    )
    for name, row in result["contenders"].items():
        verdict = "no" if row["below_noise"] else "yes"
        times = (show(row["decode_time_ratio_to_off"], 3), verdict, show(row["cpu_time_ratio_to_off"], 3))
        table.add_row(name, *_speeds(row), *times)
    return [table]


def peers(result: dict[str, Any]) -> list[RenderableType]:
    """Speeds of everybody, how many times faster we are, and the roofline."""
    speeds = new_table("same prompts, same number of tokens", ["contender", *SPEED_COLUMNS, "equal leading tokens"])
    for name, row in result["contenders"].items():
        speeds.add_row(name, *_speeds(row), show(row["equal_leading_tokens"], 0))
    ratios = result["ratios"]
    found: list[RenderableType] = [speeds]
    for title, measure in SPEED_COLUMNS.items():
        way = "theirs / ours" if measure == "first_token_ms" else "ours / theirs"
        ours = [name.removeprefix(OWN) for name in ratios]
        table = new_table(f"Tiercel times faster, {title} ({way})", ["than", *ours])
        for them in next(iter(ratios.values())):
            table.add_row(them, *(show(row[them][measure], 2) for row in ratios.values()))
        found.append(table)
    return [*found, *_roofline(result["roofline"])]


def hardware_line(result: dict[str, Any]) -> str:
    """On what, with what."""
    found = result["hardware"]
    memory = f"{found['memory_bytes'] / 2**30:.0f} GiB" if found["memory_bytes"] else "memory unknown"
    path = found["code_path"] or "PyTorch, CPU library not built"
    versions = ", ".join(dict.fromkeys(_version(name, number) for name, number in result["versions"].items()))
    return f"{found['cpu']}, {found['cores']} cores, {memory}; threads: {found['threads']}; {path}; {versions}"


def new_table(heading: str, columns: Sequence[str], left: int = 1) -> Table:
    """An empty table whose first ``left`` columns hold text, the others numbers: those never break, their titles do."""
    table = Table(title=heading, title_justify="left", caption=SPREAD, caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.padding = False, 0
    for number, column in enumerate(columns):
        is_text = number < left
        title = column if is_text else "\n".join(wrap(column, TITLE_WIDTH))
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def show(spread: dict[str, Any], digits: int = 1) -> Text:
    """A spread from a result: the median above, least and most below it."""
    found = Spread(**spread)
    below = f"\n{found.least:.{digits}f}–{found.most:.{digits}f}" if found.count > 1 else ""
    return Text.assemble(f"{found.median:.{digits}f}", (below, "dim"))


def _version(name: str, number: str) -> str:
    return number if " " in number else f"{name} {number}"  # peers name their package themselves


def _roofline(found: dict[str, Any] | None) -> list[RenderableType]:
    if found is None:
        return ["no roofline: the target does not run in the CPU library"]
    work = found["work"]
    table = new_table(
        "roofline", ["step", "rows", "limit ms", "target forward ms", "of the limit", "round ms", "of the limit"]
    )
    for name, step in found["steps"].items():
        cells = [f"{step['limit_ms']:.2f}"]
        for what, ms in step["median_ms"].items():
            cells += [f"{ms:.2f}", percent(step["fraction_reached"][what])]
        table.add_row(name, f"{step['rows']:.2f}", *cells)
    line = (
        f"measured: reading {found['bytes_per_s'] / 1e9:.1f} GB/s, multiplying with {work['format']} in the cache "
        f"{found['operations_per_s'] / 1e9:.0f} G operations/s; a step reads {work['weight_bytes'] / 1e6:.1f} MB of weights, "
        f"{work['operations_per_row'] / 1e9:.3f} G operations a row"
    )
    table.caption = None
    return [table, line]


def _speeds(row: dict[str, Any]) -> list[Text]:
    return [show(row[key]) for key in SPEED_COLUMNS.values()]
