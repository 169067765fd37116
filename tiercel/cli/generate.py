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
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.llm import LLM
from tiercel.engine.outputs import RequestOutput
from tiercel.observability.metrics_server import HOST


def command(
    prompt: Annotated[str | None, typer.Argument(help="One prompt; or use --prompts.")] = None,
    prompts: options.Prompts = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per request, in the prompts' order.")
    ] = False,
    model: options.Model = options.DEFAULT,
    spec: options.Spec = "multi-layer-eagle",
    draft: options.Draft = "auto",
    num_steps: options.NumSteps = None,
    ngram_match: options.NgramMatch = None,
    ngram_tokens: Annotated[
        int | None, typer.Option(help="Drafts per round at most from prompt lookup; default: 7.")
    ] = None,
    min_confidence: options.MinConfidence = None,
    topk: options.Topk = 1,
    num_draft_tokens: options.NumDraftTokens = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens kept; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    activation_bits: options.ActivationBits = 8,
    kv_dtype: options.KvDtype = "auto",
    enforce_eager: options.EnforceEager = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_batch_size: options.BatchSize = 16,
    kv_tokens: Annotated[int, typer.Option(help="KV slots in the pool.")] = 16384,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens per step; longer prompts are cut in chunks.")
    ] = 512,
    max_verify_rows: Annotated[
        int | None, typer.Option(help="Rows one verify may hold; with many requests each then drafts less.")
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="Draft as `tiercel tune` measured here, if it did.")
    ] = True,
    exact_kv: Annotated[
        bool, typer.Option("--exact-kv/--stale-kv", help="Recompute draft KV made from wrong drafts.")
    ] = True,
    trace_out: options.TraceOut = None,
    records_out: options.RecordsOut = None,
    records_max_mb: options.RecordsMaxMb = None,
    metrics_port: options.MetricsPort = None,
    metrics_vllm_names: options.MetricsVllmNames = False,
    enable_trace: Annotated[bool, typer.Option("--enable-trace", help="Make OpenTelemetry spans.")] = False,
    trace_level: Annotated[int, typer.Option(help="0 off … 3 everything.")] = 3,
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="Collector, e.g. http://localhost:4317.")] = None,
    otlp_protocol: Annotated[str, typer.Option(help="grpc or http/protobuf.")] = "grpc",
    otlp_file: Annotated[Path | None, typer.Option(help="OTLP-JSON file for spans.")] = None,
    trace_legacy_names: Annotated[
        bool, typer.Option("--trace-legacy-names", help="Older gen_ai.* names on root spans as well.")
    ] = False,
) -> None:
    """Answer one prompt (streamed) or a file of prompts (in continuous batches)."""
    if (prompt is None) == (prompts is None):
        raise UserError("give one prompt, or a file with --prompts (not both)")
    sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed, ignore_eos)
    engine = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        activation_bits=activation_bits,
        kv_dtype=kv_dtype,
        enforce_eager=enforce_eager,
        num_threads=threads,
        max_batch_size=max_batch_size,
        kv_tokens=kv_tokens,
        max_prefill_tokens=max_prefill_tokens,
    )
    speculation = SpecConfig(
        method=spec,
        draft=draft,
        num_steps=num_steps,
        exact_kv=exact_kv,
        max_verify_rows=max_verify_rows,
        ngram_match=ngram_match,
        ngram_tokens=ngram_tokens,
        min_confidence=min_confidence,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        tuned=tuned,
    )
    trace = TraceConfig(
        enable_trace=enable_trace,
        trace_level=trace_level,
        otlp_endpoint=otlp_traces_endpoint,
        otlp_protocol=otlp_protocol,
        otlp_file=otlp_file,
        trace_legacy_names=trace_legacy_names,
        trace_out=trace_out,
        records_out=records_out,
        records_max_mb=records_max_mb,
        metrics_port=metrics_port,
        metrics_vllm_names=metrics_vllm_names,
    )
    rows = read_prompts(prompts) if prompts else [PromptRow("req-0", prompt or "")]
    with LLM(spec=speculation, engine=engine, trace=trace) as llm:
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
