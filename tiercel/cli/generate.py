"""``tiercel generate``: answer prompts."""

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli import options
from tiercel.cli.prompts import PromptRow, read_prompts
from tiercel.cli.settings import Settings, takes_settings
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.llm import LLM
from tiercel.engine.outputs import RequestOutput
from tiercel.observability.metrics_server import HOST


@takes_settings()
def command(
    prompt: Annotated[str | None, typer.Argument(help="One prompt; or use --prompts.")] = None,
    prompts: options.Prompts = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per request, in the prompts' order.")
    ] = False,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens kept; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Token that ends the answer; may be given again.")
    ] = None,
    include_stop_str: Annotated[
        bool, typer.Option("--include-stop-str-in-output", help="Show what stopped the answer.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    *,
    settings: Settings,
) -> None:
    """Answer one prompt (streamed) or a file of prompts (in continuous batches)."""
    if (prompt is None) == (prompts is None):
        raise UserError("give one prompt, or a file with --prompts (not both)")
    sampling = SamplingParams(
        max_tokens,
        temperature,
        top_p,
        top_k,
        seed,
        ignore_eos,
        stop=stop or (),
        stop_token_ids=stop_token_ids or (),
        include_stop_str_in_output=include_stop_str,
    )
    rows = read_prompts(prompts) if prompts else [PromptRow("req-0", prompt or "")]
    with LLM(engine=settings.engine, spec=settings.spec, trace=settings.trace) as llm:
        if metrics := llm.engine.pipeline.metrics:
            typer.echo(f"metrics: http://{HOST}:{metrics.port}/metrics", err=True)
        if llm.depths and isinstance(llm.depths.source, Path):
            typer.echo(f"drafting as tuned: {llm.depths} ({llm.depths.source})", err=True)
        show = _print_json if as_json else (_print_stream if prompt is not None else _print_texts)
        show(llm, rows, sampling, chat=not raw)


def _print_json(llm: LLM, rows: list[PromptRow], sampling: SamplingParams, *, chat: bool) -> None:
    for output in _in_order(llm, rows, sampling, chat=chat):
        typer.echo(json.dumps(output.to_json(), ensure_ascii=False))


def _print_texts(llm: LLM, rows: list[PromptRow], sampling: SamplingParams, *, chat: bool) -> None:
    for output in _in_order(llm, rows, sampling, chat=chat):
        typer.echo(f"=== {output.request_id} ({output.finish_reason})\n{output.text}\n")


def _print_stream(llm: LLM, rows: list[PromptRow], sampling: SamplingParams, *, chat: bool) -> None:
    for event in llm.stream([row.text for row in rows], sampling, chat=chat):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        if event.output:
            typer.echo()
            event.output.checked()


def _in_order(llm: LLM, rows: list[PromptRow], sampling: SamplingParams, *, chat: bool) -> Iterator[RequestOutput]:
    """Results in the prompts' order, each as soon as those before it are done; then, an error if one of them failed."""
    ids = deque(row.request_id for row in rows)
    done: dict[str, RequestOutput] = {}
    failed: list[RequestOutput] = []
    for event in llm.stream([row.text for row in rows], sampling, chat=chat, request_ids=list(ids)):
        if event.output:
            done[event.request_id] = event.output
            if event.output.record.error:
                failed.append(event.output)
            while ids and ids[0] in done:
                yield done.pop(ids.popleft())
    if failed:
        raise UserError(
            f"{len(failed)} of {len(rows)} requests failed; {failed[0].request_id}: {failed[0].record.error}"
        )
