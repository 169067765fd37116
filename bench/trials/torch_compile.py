"""torch.compile over the PyTorch modules against the CPU library's step, in turns; and how long compiling takes.

    PYTHONPATH=. .venv/bin/python bench/trials/torch_compile.py

Needs a C++ compiler. Every number of rows is compiled for itself (``dynamic=False``), the whole forward as one graph, with
attention over a context of fixed length: what suits torch.compile best. Its caches are off, so the times are those of a first
start. Compiled logits are checked against the modules' own.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import torch._inductor.config
import typer
from torch import Tensor

from bench.trials.steps import Request, Times, in_turns, report
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.device.parallel import SINGLE
from tiercel.engine.engine import load_target
from tiercel.kvcache.rows import PagedAttention
from tiercel.models import layers
from tiercel.models.step import EagerTarget

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def forward_of(request: Request) -> Callable[[], Tensor]:
    """The modules' forward over the request's rows, to their logits (float32 ``[rows, vocab]``), and nothing else."""
    target, step = request.target, request.step
    assert isinstance(target, EagerTarget)
    decoder, shape, positions = target.decoder, target.description, step.rows.positions
    attention = PagedAttention(step.rows, request.storages, shape.num_heads // shape.num_kv_heads)

    def forward() -> Tensor:
        return decoder.logits(decoder(step.token_ids, positions, attention))

    return forward


def main(
    rows: Annotated[list[int], typer.Option(help="Rows of a step; repeatable.")] = [1, 4],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="float32 or bfloat16; repeatable.")] = ["float32", "bfloat16"],  # noqa: B006
    runs: Annotated[int, typer.Option(help="Turns of each contender.")] = 20,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Compile, check, measure."""
    torch._inductor.config.force_disable_caches = True
    native = load_target(EngineConfig(model=model), SpecConfig(method="none")).model
    eager = {
        name: load_target(EngineConfig(model=model, dtype=name, enforce_eager=True), SpecConfig(method="none")).model
        for name in dtype
    }
    times: Times = {}
    compile_s: dict[str, dict[int, float]] = {name: {} for name in dtype}
    # The group comes from a context variable, which cannot be traced.
    with torch.inference_mode(), patch.object(layers, "current_tp_group", lambda: SINGLE):
        for count in rows:
            contenders: dict[str, Callable[[], object]] = {"Tiercel, whole step": Request(native, count)}
            for name, target in eager.items():
                forward = forward_of(Request(target, count))
                compiled = torch.compile(forward, fullgraph=True, dynamic=False)
                start = time.perf_counter()
                found = compiled()
                compile_s[name][count] = time.perf_counter() - start
                expected = forward()
                error = float((found - expected).norm() / expected.norm())
                print(f"{name}, {count} rows: compiled in {compile_s[name][count]:.0f} s, relative error {error:.1e}")
                if not error < TOLERANCE[name]:
                    raise SystemExit("the compiled forward computes something else")
                contenders |= {f"modules, {name}": forward, f"torch.compile, {name}": compiled}
            times[count] = in_turns(contenders, runs)
    report("torch.compile", times, {}, json_file, compile_s=compile_s)


if __name__ == "__main__":
    typer.run(main)
