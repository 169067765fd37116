"""Trees against chains: emitted per round and milliseconds per round, greedy, one request at a time.

    python bench/trees.py --prompts spec_bench_dev.jsonl --limit 8

Prompt lookup and early stop are off. Every answer must equal plain decoding's; the exit code is 1 if one does not.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.prompts import read_prompts
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import load_target
from tiercel.engine.llm import LLM

SHAPES = ((1, 1, None), (3, 1, None), (3, 2, 4), (3, 2, 6), (3, 3, 7))
"""Steps, top-k, drafts at most."""


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt` or `turns`.")],
    limit: Annotated[int, typer.Option(help="Take so many prompts, spread over the file.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 48,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    draft: Annotated[str, typer.Option()] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Measure each shape."""
    rows = read_prompts(prompts)
    rows = rows[:: max(1, len(rows) // limit)][:limit]
    engine = EngineConfig(model=model, num_threads=threads)
    specs = {"plain": SpecConfig(method="none")}
    for steps, topk, most in SHAPES:
        name = f"K = {steps}" + (f", top-{topk}, {most} drafts" if topk > 1 else "")
        specs[name] = SpecConfig(
            draft=draft,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=most,
            max_verify_rows=64,
            min_confidence=0,
            ngram_match=0,
        )
    target, failed = load_target(engine, SpecConfig(draft=draft)), False
    answers: list[list[int]] = []
    for name, spec in specs.items():
        with LLM(engine=engine, spec=spec, target=target) as llm:
            wish = SamplingParams(max_tokens=max_tokens)
            outputs = [llm.generate([row.text], wish)[0].checked() for row in rows]
        found = [output.record.spec for output in outputs]
        emitted, rounds = (sum(spec[f"num_{what}"] for spec in found) for what in ("emitted_tokens", "spec_steps"))
        ms = sum(sum(spec["stage_time_ms"].values()) for spec in found)
        tokens = [output.token_ids for output in outputs]
        answers = answers or tokens
        failed |= tokens != answers
        print(
            f"{name}: {emitted / rounds:.2f} emitted per round, {ms / rounds:.1f} ms, {emitted / ms * 1e3:.0f} tokens/s"
        )
    sys.exit(failed)


if __name__ == "__main__":
    typer.run(main)
