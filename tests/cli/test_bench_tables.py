"""Tables of measurements on a page of 80 characters: every number whole, every name complete."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console, RenderableType

from tiercel.bench.samples import Spread
from tiercel.bench.tune import Measured
from tiercel.cli import bench_tables as tables
from tiercel.cli import tune
from tiercel.core.depths import Depth, DepthTable

STAGES = ("draft", "verify", "draft_extend", "other")


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "least": 0.9 * median, "most": 1.1 * median, "count": 3}


SPEEDS = {"first_token_ms": spread(2345.6), "decode_tok_s": spread(312.3), "end_to_end_tok_s": spread(234.5)}


def printed(page: Sequence[RenderableType]) -> str:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    for part in page:
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert isinstance(text, str)
    return text


def latency() -> str:
    stages = {name: spread(12.34) for name in STAGES}
    row = SPEEDS | {
        "decode_ratio_to_plain": spread(1.25),
        "acceptance_length": 1.52,
        "stage_ms_per_round": stages,
        "ms_per_round": spread(123.45),
    }
    return printed(tables.latency({"contenders": {"default": row}}))


def throughput() -> str:
    ratios = {"total_ratio_to_plain": spread(1.25), "decode_ratio_to_plain": spread(1.25)}
    row = {"concurrency": 16, "contender": "llama.cpp batch", "total_tok_s": spread(312.3), **SPEEDS, **ratios}
    return printed(tables.throughput({"groups": [row]}))


def overhead() -> str:
    ratios = {"decode_time_ratio_to_off": spread(1.012), "cpu_time_ratio_to_off": spread(1.012)}
    return printed(tables.overhead({"contenders": {"off again": {**SPEEDS, **ratios, "below_noise": True}}}))


def peers() -> str:
    names = [f"Tiercel {name}" for name in ("plain", "lookup", "K=1", "K=2", "K=3", "default")]
    contenders = {"Transformers bf16 lookup": SPEEDS | {"equal_leading_tokens": spread(128)}}
    ratios = {us: {"Transformers bf16 lookup": {key: spread(11.5) for key in SPEEDS}} for us in names}
    return printed(tables.peers({"contenders": contenders, "ratios": ratios, "roofline": None}))


def tuning() -> str:
    row = Measured(Depth(64, 1), 1.52, *(Spread(**spread(value)) for value in (123.45, 312.3, 1.25)))
    return printed([tune._table([row], DepthTable("test", (Depth(64, 1),)))])


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        (latency, ["2111.0–2580.2", "281.1–343.5", "1.12–1.38", "111.11–135.80"]),
        (throughput, ["2111.0–2580.2", "281.1–343.5", "1.12–1.38"]),
        (overhead, ["2111.0–2580.2", "211.1–258.0", "0.911–1.113"]),
        (peers, ["2111.0–2580.2", "281.1–343.5", "115–141", "10.35–12.65"]),
        (tuning, ["111.11–135.80", "281.1–343.5", "1.12–1.38", "recommended"]),
    ],
)
def test_every_number_is_whole(page: Any, numbers: list[str]) -> None:
    text = page()
    words = set(re.split(r"\s+", text))
    assert set(numbers) <= words, text
    assert max(len(line) for line in text.splitlines()) <= 80
