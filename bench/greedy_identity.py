"""Greedy output with speculation against greedy output without, token for token, for every drafter.

    python bench/greedy_identity.py --prompts spec_bench_dev.jsonl --limit 8 --max-tokens 24

plays every drafter with chains and trees, K = 1, 2, 3, 1, 3 and 8 requests at once, and prompts read 7 and 16 tokens at a time
and whole. Some drafts are made right on purpose, so that every accept pattern occurs (``--unplanted`` leaves them alone). EAGLE-3
has random weights unless ``--eagle3-draft`` names a head; the standalone draft model is the target itself unless
``--standalone-draft`` names one.

The only excuse for a difference is a tie: at the first token that differs, the plain run's two best logits must lie within
1e-4. Every difference is listed with its gap; the exit code is 1 if one is no tie.
"""

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypedDict

import torch
import typer

from tiercel.bench.planted import plant
from tiercel.bench.untrained import random_eagle3, unchained
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
WHOLE = 4096
"""Prompt tokens in a step where prompts are read whole."""
MTP, EAGLE = "multi-layer-eagle", "eagle"
DRAFTERS: dict[str, dict[str, Any]] = {
    MTP: {"method": MTP, "ngram_match": 0},
    "multi-layer-eagle-unchained": {"method": MTP, "ngram_match": 0},
    "multi-layer-eagle-ngram": {"method": MTP},
    "ngram": {"method": "ngram"},
    EAGLE: {"method": EAGLE},
    "eagle3": {"method": "eagle3"},
    "standalone": {"method": "standalone"},
}


class Difference(TypedDict):
    """Where an answer first differs: answer token ``at`` (0-based), and the target's top-2 logit gap there."""

    request_id: str
    at: int
    gap: float


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt` or `turns`.")],
    drafter: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(DRAFTERS)}.")] = None,
    num_steps: Annotated[list[int] | None, typer.Option(help="K; repeatable.")] = None,
    topk: Annotated[list[int] | None, typer.Option(help="1: chains; above: trees. Repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at once; repeatable.")] = None,
    chunk: Annotated[list[int] | None, typer.Option(help="Prompt tokens per step, 0: whole; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 64,
    limit: Annotated[int, typer.Option(help="Take so many prompts, spread over the file; 0 takes all.")] = 0,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help="MTP layers.")] = "auto",
    eagle3_draft: Annotated[str | None, typer.Option(help="EAGLE-3 head.")] = None,
    standalone_draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    planted: Annotated[bool, typer.Option("--planted/--unplanted", help="Make some drafts right.")] = True,
    quantization: Annotated[str, typer.Option(help="`none`: float32 weights.")] = "auto",
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
        quantization=quantization,
        activation_bits=activation_bits,
        enforce_eager=enforce_eager,
    )
    target = load_target(engine, SpecConfig(method="none"))
    plain, took = answers(LLM(engine=engine, spec=SpecConfig(method="none"), target=target), rows, max_tokens, None)
    print(f"plain: {len(rows)} prompts, {took:.0f} s", flush=True)
    result: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        drafts = {
            MTP: draft,
            "multi-layer-eagle-unchained": str(unchained(draft, target.checkpoint, Path(folder) / "unchained")),
            "multi-layer-eagle-ngram": draft,
            EAGLE: draft,
            "eagle3": eagle3_draft or str(random_eagle3(target.checkpoint, Path(folder) / "eagle3")),
            "standalone": standalone_draft or model,
        }
        grid = itertools.product(drafter or DRAFTERS, num_steps or [1, 2, 3], topk or [1, 2])
        for name, depth, width in grid:
            if name == "ngram" and width > 1:
                continue
            for at_once, size in itertools.product(batch or [1, 3, 8], chunk or [7, 16, 0]):
                config = replace(engine, max_batch_size=at_once, max_prefill_tokens=size or WHOLE)
                spec = spec_for(name, drafts.get(name, "auto"), depth, width)
                llm = LLM(engine=config, spec=spec, target=target)
                ours, took = answers(llm, rows, max_tokens, plain if planted else None)
                row = compared(target, plain, ours)
                row |= {"drafter": name, "num_steps": depth, "topk": width, "batch": at_once, "chunk": size}
                show(row, took)
                result.append(row)
    totals = Counter(
        kind for row in result for kind in ["equal"] * row["equal"] + ["different"] * len(row["differences"])
    )
    print(f"{len(result)} runs: {totals['equal']} answers equal, {totals['different']} different, ties and faults")
    if json_file:
        json_file.write_text(
            json.dumps({"max_tokens": max_tokens, "planted": planted, "runs": result}, indent=1) + "\n"
        )
    sys.exit(any(is_fault(d) for row in result for d in row["differences"]))


def spec_for(name: str, draft: str, depth: int, width: int) -> SpecConfig:
    """Draft to the full depth, whatever it costs."""
    given = {**DRAFTERS[name], "max_verify_rows": WHOLE, "min_confidence": 0}
    if name == "ngram":
        return SpecConfig(**given, ngram_match=1, ngram_tokens=depth)
    return SpecConfig(**given, draft=draft, num_steps=depth, topk=width)


def answers(
    llm: LLM, rows: list[PromptRow], max_tokens: int, planted: Mapping[str, RequestOutput] | None
) -> tuple[dict[str, RequestOutput], float]:
    """Greedy answers by request id, and the seconds they took."""
    start = time.perf_counter()
    if planted is not None:
        plant(llm.engine.worker, {name: output.token_ids for name, output in planted.items()})
    sampling = SamplingParams(max_tokens=max_tokens)
    outputs = llm.generate([r.text for r in rows], sampling, request_ids=[r.request_id for r in rows])
    prompt_ids.update({r.request_id: llm.encode(r.text) for r in rows})
    llm.close()
    return {o.request_id: o.checked() for o in outputs}, time.perf_counter() - start


def compared(
    target: LoadedTarget, plain: Mapping[str, RequestOutput], ours: Mapping[str, RequestOutput]
) -> dict[str, Any]:
    """How many answers are equal, every difference, and what share of the drafts was accepted."""
    found = [difference(target, output, ours[name]) for name, output in plain.items()]
    specs = [output.record.spec for output in ours.values()]
    proposed, accepted = (sum(spec[f"num_{what}draft_tokens"] for spec in specs) for what in ("", "accepted_"))
    differences = [d for d in found if d]
    return {
        "equal": len(found) - len(differences),
        "differences": differences,
        "proposed": proposed,
        "accepted": accepted,
    }


def is_fault(difference: Difference) -> bool:
    """Whether it is no tie."""
    return difference["gap"] >= TIE


def show(row: dict[str, Any], took: float) -> None:
    """One line per run, and one per difference."""
    shape = "chain" if row["topk"] == 1 else f"top-{row['topk']} tree"
    faults = sum(map(is_fault, row["differences"]))
    print(
        f"{row['drafter']}, K = {row['num_steps']}, {shape}, batch {row['batch']}, chunk {row['chunk'] or 'whole'}: "
        f"{row['equal']} equal, {len(row['differences']) - faults} ties, {faults} faults, "
        f"{row['accepted']} of {row['proposed']} drafts right, {took:.0f} s",
        flush=True,
    )
    for d in row["differences"]:
        print(f"  {d['request_id']}: first differs at answer token {d['at']}, top-2 gap {d['gap']:.2e}", flush=True)


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
