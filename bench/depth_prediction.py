"""The cost model of ``tiercel report`` against the clock: depths predicted from two runs, then measured.

    python bench/depth_prediction.py --prompts prompts.jsonl --max-tokens 96

Engines at every depth take turns, prompt by prompt, on one target in memory. The model sees the records of plain decoding and
of the deepest engine alone; what it predicts for each depth is shown beside what that depth's own records say.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.prompts import read_prompts
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import load_target
from tiercel.engine.llm import LLM
from tiercel.report.analysis import make_report


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt` or `turns`.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    num_steps: Annotated[int, typer.Option(help="Deepest K.")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    draft: Annotated[str, typer.Option()] = "auto",
    out: Annotated[Path | None, typer.Option(help="Keep the records in this folder, by depth.")] = None,
) -> None:
    """Run, predict, compare."""
    rows = read_prompts(prompts)
    engine = EngineConfig(model=model, num_threads=threads)
    specs = {0: SpecConfig(method="none")}
    specs |= {k: SpecConfig(draft=draft, num_steps=k, ngram_match=0, min_confidence=0) for k in range(1, num_steps + 1)}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {k: (out or Path(temporary)) / f"k{k}" for k in specs}
        target = load_target(engine, specs[num_steps])
        engines = {
            k: LLM(engine=engine, spec=spec, trace=TraceConfig(records_out=folders[k]), target=target)
            for k, spec in specs.items()
        }
        for row in rows:
            for llm in engines.values():
                llm.generate(row.text, SamplingParams(max_tokens=max_tokens))
        for llm in engines.values():
            llm.close()
        (batch,) = make_report([folders[num_steps]], costs_from=[folders[0]]).costs.batches
        measured = {k: make_report([folder]).totals for k, folder in folders.items()}
    typer.echo(f"best depth predicted: K = {batch.best}")
    typer.echo("K  predicted: length  round ms  tok/s   measured: length  round ms  tok/s")
    for depth in batch.depths:
        found = measured[depth.num_steps]
        typer.echo(
            f"{depth.num_steps}  {depth.acceptance_length:17.2f}{depth.round_ms:10.2f}{depth.tok_s:7.0f}"
            f"{found.acceptance_length or 0:19.2f}{found.decode_ms / found.decode_steps:10.2f}{found.decode_tok_s or 0:7.0f}"
        )


if __name__ == "__main__":
    typer.run(main)
