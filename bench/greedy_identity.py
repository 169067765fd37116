"""Greedy output with speculation against greedy output without, token for token.

    python bench/greedy_identity.py --prompts spec_bench_dev.jsonl --batch 8 --num-steps 3 --max-tokens 64

The only excuse for a difference is a tie: at the first token that differs, the plain run's two best logits must lie within
1e-4. Every difference is listed with its gap; the exit code is 1 if one is no tie.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, TypedDict

import torch
import typer

from tiercel.cli.prompts import PromptRow, read_prompts
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget, load_target
from tiercel.engine.llm import LLM
from tiercel.engine.outputs import RequestOutput
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import StepInput

TIE = 1e-4


class Difference(TypedDict):
    """Where an answer first differs: answer token ``at`` (0-based), and the target's top-2 logit gap there."""

    request_id: str
    at: int
    gap: float


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt` or `turns`.")],
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    num_steps: Annotated[list[int] | None, typer.Option(help="K; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 64,
    limit: Annotated[int, typer.Option(help="Take so many prompts, spread over the file; 0 takes all.")] = 0,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    draft: Annotated[str, typer.Option()] = "auto",
    activation_bits: Annotated[int, typer.Option(help="8 or 16.")] = 8,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="PyTorch's modules.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Compare, list, judge."""
    rows = read_prompts(prompts)
    if limit:
        rows = rows[:: max(1, len(rows) // limit)][:limit]
    engine = EngineConfig(
        model=model,
        dtype="float32",
        max_batch_size=batch,
        activation_bits=activation_bits,
        enforce_eager=enforce_eager,
    )
    target = load_target(engine, SpecConfig(draft=draft))
    plain, took = answers(LLM(engine=engine, spec=SpecConfig(method="none"), target=target), rows, max_tokens)
    print(f"plain: {len(rows)} prompts at batch {batch}, {took:.0f} s", flush=True)
    result, failed = [], False
    for depth in num_steps or [3]:
        spec = SpecConfig(draft=draft, num_steps=depth, max_verify_rows=batch * (depth + 1), min_confidence=0)
        ours, took = answers(LLM(engine=engine, spec=spec, target=target), rows, max_tokens)
        differing = [difference(target, plain[r.request_id], ours[r.request_id]) for r in rows]
        found = [d for d in differing if d]
        bad = [d for d in found if d["gap"] >= TIE]
        failed |= bool(bad)
        print(
            f"K = {depth}: {len(rows) - len(found)} of {len(rows)} equal, {len(found)} ties, {len(bad)} faults, {took:.0f} s"
        )
        for d in found:
            print(f"  {d['request_id']}: first differs at answer token {d['at']}, top-2 gap {d['gap']:.2e}", flush=True)
        result.append({"num_steps": depth, "prompts": len(rows), "differences": found, "seconds": took})
    if json_file:
        json_file.write_text(json.dumps({"batch": batch, "max_tokens": max_tokens, "runs": result}, indent=1) + "\n")
    sys.exit(failed)


def answers(llm: LLM, rows: list[PromptRow], max_tokens: int) -> tuple[dict[str, RequestOutput], float]:
    """Greedy answers by request id, and the seconds they took."""
    start = time.perf_counter()
    sampling = SamplingParams(max_tokens=max_tokens)
    outputs = llm.generate([r.text for r in rows], sampling, request_ids=[r.request_id for r in rows])
    prompt_ids.update({r.request_id: llm.encode(r.text) for r in rows})
    llm.close()
    return {o.request_id: o.checked() for o in outputs}, time.perf_counter() - start


prompt_ids: dict[str, list[int]] = {}


@torch.inference_mode()
def difference(target: LoadedTarget, plain: RequestOutput, ours: RequestOutput) -> Difference | None:
    """The first differing token and the target's top-2 gap there; None if the answers are equal."""
    if plain.token_ids == ours.token_ids and plain.finish_reason == ours.finish_reason:
        return None
    pairs = zip(plain.token_ids, ours.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.token_ids), len(ours.token_ids)))
    device = target.placement.device
    ids = torch.tensor(prompt_ids[plain.request_id] + plain.token_ids[:at], device=device)
    slots = torch.arange(len(ids))
    rows = Rows([Segment(0, len(ids), slots)], device)
    shape, dtype = target.model.description, target.placement.dtype
    storages = [KvStorage(len(ids), shape.num_kv_heads, shape.head_dim, dtype, device) for _ in range(shape.num_layers)]
    step = StepInput(rows, ids, torch.tensor([len(ids) - 1], device=device), with_logits=True)
    logits = target.model.run(step, storages).logits
    assert logits is not None
    best = logits[0].topk(2).values
    return Difference(request_id=plain.request_id, at=at, gap=float(best[0] - best[1]))


if __name__ == "__main__":
    typer.run(main)
