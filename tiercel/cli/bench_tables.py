"""The benchmarks' results as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tiercel.bench.latency import STAGES
from tiercel.bench.samples import Spread
from tiercel.cli.render import percent

SPEED_COLUMNS = {
    "first token ms": "first_token_ms",
    "decode tok/s": "decode_tok_s",
    "end-to-end tok/s": "end_to_end_tok_s",
}
SPREAD = "median (least – most) of the runs"


def latency(result: dict[str, Any]) -> list[RenderableType]:
    """Speeds and ratios, then milliseconds per round by stage."""
    rows = result["contenders"]
    speeds = _table(f"batch 1: {SPREAD}", ["contender", *SPEED_COLUMNS, "decode / plain", "acceptance length"])
    rounds = _table(f"milliseconds per round: {SPREAD}", ["contender", *(s.replace("_", " ") for s in STAGES), "round"])
    for name, row in rows.items():
        length = f"{row['acceptance_length']:.2f}"
        speeds.add_row(name, *_speeds(row), show(row["decode_ratio_to_plain"], 2), length)
        stages = row["stage_ms_per_round"]
        rounds.add_row(name, *(show(stages[stage], 2) for stage in STAGES), show(row["ms_per_round"], 2))
    return [speeds, rounds]


def throughput(result: dict[str, Any]) -> list[RenderableType]:
    """All requests together, then what one request sees."""
    columns = ["requests", "contender", "total tok/s", "total / plain", "first token ms", "decode tok/s of one"]
    table = _table(f"requests at once: {SPREAD}", columns, left=2)
    for row in result["groups"]:
        numbers = (show(row["total_tok_s"]), show(row["total_ratio_to_plain"], 2))
        one = (show(row["first_token_ms"]), show(row["decode_tok_s"]))
        table.add_row(str(row["concurrency"]), row["contender"], *numbers, *one)
    return [table]


def overhead(result: dict[str, Any]) -> list[RenderableType]:
    """Cost of each way of looking."""
    columns = ["tracing", *SPEED_COLUMNS, "decode time / off", "", "CPU time / off"]
    table = _table(f"cost of tracing: {SPREAD}", columns)
    for name, row in result["contenders"].items():
        verdict = "within the noise" if row["below_noise"] else "above the noise"
        times = (show(row["decode_time_ratio_to_off"], 3), verdict, show(row["cpu_time_ratio_to_off"], 3))
        table.add_row(name, *_speeds(row), *times)
    return [table]


def peers(result: dict[str, Any]) -> list[RenderableType]:
    """Speeds of everybody, our ratios, and the roofline."""
    speeds = _table(f"same prompts, same tokens: {SPREAD}", ["contender", *SPEED_COLUMNS, "equal leading tokens"])
    for name, row in result["contenders"].items():
        speeds.add_row(name, *_speeds(row), show(row["equal_leading_tokens"], 0))
    others = list(next(iter(result["ratios"].values())))
    found: list[RenderableType] = [speeds]
    for title, measure in SPEED_COLUMNS.items():
        way = "(theirs / ours)" if measure == "first_token_ms" else "(ours / theirs)"
        table = _table(f"how many times faster by {title} {way}: {SPREAD}", ["ours", *others])
        for us, row in result["ratios"].items():
            table.add_row(us, *(show(row[them][measure], 2) for them in others))
        found.append(table)
    return [*found, _roofline(result["roofline"])]


def hardware_line(result: dict[str, Any]) -> str:
    """On what, with what."""
    found = result["hardware"]
    memory = f"{found['memory_bytes'] / 2**30:.0f} GiB" if found["memory_bytes"] else "memory unknown"
    path = found["code_path"] or "PyTorch, CPU library not built"
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{found['cpu']}, {found['cores']} cores, {memory}; {found['threads']} threads, {path}; {versions}"


def show(spread: dict[str, Any], digits: int = 1) -> str:
    """A spread from a result."""
    return Spread(**spread).show(digits)


def _roofline(found: dict[str, Any] | None) -> RenderableType:
    if found is None:
        return "no roofline: the target does not run in the CPU library"
    step, share, work = found["plain_step_ms"], found["fraction_reached"], found["work"]
    table = _table("roofline of a plain step", ["quantity", "value"])
    table.add_row("reading memory", f"{found['bytes_per_s'] / 1e9:.1f} GB/s")
    table.add_row(f"multiplying, {found['format']} in cache", f"{found['operations_per_s'] / 1e9:.0f} G operations/s")
    table.add_row("weights per step", f"{work['weight_bytes'] / 1e6:.1f} MB")
    table.add_row("operations per row", f"{work['operations_per_row'] / 1e9:.3f} G")
    table.add_row("limit for one row", f"{found['limit_ms_1_row']:.2f} ms")
    table.add_row("target forward", f"{step['target_forward']:.2f} ms: {percent(share['target_forward'])} of the limit")
    table.add_row("whole round", f"{step['round']:.2f} ms: {percent(share['round'])} of the limit")
    return table


def _speeds(row: dict[str, Any]) -> list[str]:
    return [show(row[key]) for key in SPEED_COLUMNS.values()]


def _table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table
