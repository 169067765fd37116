"""``tiercel eval-draft``: acceptance of a draft, through the serving path and teacher-forced on the same answers."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli import options
from tiercel.cli.json_file import check_writable, write_json
from tiercel.cli.prompts import PromptRow, read_prompts
from tiercel.core.acceptance import SpecCounts
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import load_target
from tiercel.engine.llm import LLM
from tiercel.engine.outputs import RequestOutput
from tiercel.models.attention import DenseAttention
from tiercel.models.decoder import Decoder
from tiercel.models.loading import load_decoder
from tiercel.models.mtp import MtpDraft
from tiercel.models.mtp_checkpoint import load_draft, resolve_draft
from tiercel.report.wording import percent
from tiercel.train.data import Conversation
from tiercel.train.objective import measure


def command(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt`, or Spec-Bench's `turns`.")],
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    num_steps: options.NumSteps = None,
    ngram_match: options.NgramMatch = 0,
    max_tokens: options.MaxTokens = 128,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    activation_bits: options.ActivationBits = 8,
    enforce_eager: options.EnforceEager = False,
    threads: options.Threads = None,
    max_batch_size: options.BatchSize = 16,
    teacher_forced: Annotated[
        int, typer.Option(min=1, help="Answers on which the layers are measured teacher-forced too.")
    ] = 40,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure greedy acceptance per category and position, as served; compare with the layers' teacher-forced accuracy."""
    rows = read_prompts(prompts)
    check_writable(json_file)
    engine = EngineConfig(
        model=model,
        dtype=dtype,
        quantization=quantization,
        activation_bits=activation_bits,
        enforce_eager=enforce_eager,
        num_threads=threads,
        max_batch_size=max_batch_size,
    )
    every_depth = max_batch_size * 64  # acceptance is measured at K, whatever that costs with so many requests at once
    spec = SpecConfig(
        draft=draft, num_steps=num_steps, max_verify_rows=every_depth, ngram_match=ngram_match, min_confidence=0
    )
    target = load_target(engine, spec)
    with LLM(engine=engine, spec=spec, target=target) as llm, Console(stderr=True).status("answering") as status:
        outputs: list[RequestOutput] = []
        ids = [row.request_id for row in rows]
        sampling = SamplingParams(max_tokens=max_tokens)
        for event in llm.stream([row.text for row in rows], sampling, request_ids=ids):
            if event.output:
                outputs.append(event.output.checked())
                status.update(f"answered {len(outputs)} of {len(rows)}")
        depth = llm.engine.worker.num_steps
        served = _served(rows, outputs, depth)
        chosen = outputs[:: max(1, len(outputs) // teacher_forced)][:teacher_forced]
        prompt_ids = {row.request_id: llm.encode(row.text) for row in rows}
    decoder = load_decoder(target.checkpoint, target.placement.dtype, target.placement.device)
    layers = load_draft(resolve_draft(draft, target.checkpoint), target.checkpoint, decoder)
    layers.layers = layers.layers[:depth]  # rounds of the walk are as deep as those that were served
    is_comparable = (
        not spec.lookup[0] and max(len(output.token_ids) for output in chosen) >= depth + 2
    )  # the last layer can hit or miss
    forced = _teacher_forced(decoder, layers, prompt_ids, chosen) if is_comparable else None
    result = {
        "num_steps": depth,
        "max_tokens": max_tokens,
        "prompts": str(prompts.name),
        "served": served,
        "teacher_forced": forced,
    }
    _print(result)
    write_json(json_file, result)


def _served(rows: list[PromptRow], outputs: list[RequestOutput], depth: int) -> dict[str, Any]:
    categories = {row.request_id: row.category or "all prompts" for row in rows}
    counts: dict[str, SpecCounts] = {}
    total = SpecCounts()
    for output in outputs:
        spec = output.record.spec
        one = _chains(spec)
        counts.setdefault(categories[output.request_id], SpecCounts()).merge(one)
        total.merge(one)
    return {name: _numbers(found, depth) for name, found in [*sorted(counts.items()), ("overall", total)]}


def _chains(spec: dict[str, Any]) -> SpecCounts:
    drafted = spec["per_step_drafted"]
    return SpecCounts(list(drafted), list(spec["per_step_accepted"]), [], depths=list(drafted))


def _numbers(counts: SpecCounts, depth: int) -> dict[str, Any]:
    return {
        "rounds": counts.num_rounds,
        "acceptance_length": counts.acceptance_length(),
        "acceptance_rate": counts.acceptance_rate(),
        "per_position_acceptance": counts.position_acceptance(depth),
        "per_position_conditional_acceptance": counts.conditional_acceptance(depth),
    }


@torch.inference_mode()
def _teacher_forced(
    decoder: Decoder, draft: MtpDraft, prompt_ids: dict[str, list[int]], outputs: list[RequestOutput]
) -> dict[str, Any]:
    answers, hidden, rounds = [], [], SpecCounts()
    for output in outputs:
        prompt = prompt_ids[output.request_id]
        ids = (*prompt, *output.token_ids)
        on_device = torch.tensor(ids, device=draft.d2t.device)
        positions = torch.arange(len(ids), device=draft.d2t.device)
        answers.append(Conversation(ids, len(prompt), greedy=True))
        hidden.append(decoder(on_device, positions, DenseAttention(1)))
        spec = output.record.spec
        rounds.merge(_chains(spec))
    found = measure(draft, answers, hidden)
    return {
        "answers": len(answers),
        "layer_accuracy": found.accuracy,
        "acceptance_length": found.length,
        "per_position_acceptance": found.position,
        "served_acceptance_length": rounds.acceptance_length(),
        "served_per_position_acceptance": rounds.position_acceptance(len(found.position)),
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"acceptance as served, greedy, K = {result['num_steps']}, {result['max_tokens']} tokens")
    for column in ("category", "rounds", "length", "rate", "by position", "by position, if reached"):
        table.add_column(column, justify="left" if column == "category" else "right")
    for name, row in result["served"].items():
        length = row["acceptance_length"]
        table.add_row(
            name,
            str(row["rounds"]),
            "–" if length is None else f"{length:.3f}",
            percent(row["acceptance_rate"]),
            " ".join(map(percent, row["per_position_acceptance"])),
            " ".join(map(percent, row["per_position_conditional_acceptance"])),
        )
    console = Console()
    console.print(table)
    forced = result["teacher_forced"]
    if forced is None:
        console.print(
            "not measured teacher-forced: prompt lookup drafted too, or no answer has the "
            f"{result['num_steps'] + 2} tokens it takes"
        )
        return
    for title, key in (
        ("accuracy of each layer, teacher-forced", "layer_accuracy"),
        ("acceptance by position, teacher-forced walk", "per_position_acceptance"),
        ("acceptance by position, as served", "served_per_position_acceptance"),
    ):
        console.print(f"{title}, on {forced['answers']} answers: " + " ".join(percent(v, 1) for v in forced[key]))
