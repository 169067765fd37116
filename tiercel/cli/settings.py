"""The options that say what runs, who drafts and what is recorded: the same for every command that answers requests."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tiercel.cli import options
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig


class Settings(NamedTuple):
    """The three configuration objects."""

    engine: EngineConfig
    spec: SpecConfig
    trace: TraceConfig


def settings_of(
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
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    activation_bits: options.ActivationBits = 8,
    kv_dtype: options.KvDtype = "auto",
    enforce_eager: options.EnforceEager = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_batch_size: options.BatchSize = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Context in tokens; default: the model's own.")] = None,
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
    adaptive: Annotated[
        bool | None,
        typer.Option(
            "--adaptive/--no-adaptive",
            help="Choose K while running, by measured costs and acceptance; default: unless --num-steps or --topk is given.",
        ),
    ] = None,
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
    *,
    metrics: bool = False,
) -> Settings:
    """The configuration that the options ask for; ``metrics`` counts for Prometheus in any case.

    Raises:
        UserError: a value is outside its range or contradicts another.
    """
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
        max_model_len=max_model_len,
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
        adaptive=adaptive,
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
        metrics=metrics,
        metrics_port=metrics_port,
        metrics_vllm_names=metrics_vllm_names,
    )
    return Settings(engine, speculation, trace)


def takes_settings(*, metrics: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all of these options; it gets what they say as its argument ``settings``."""
    shared = [one for one in inspect.signature(settings_of).parameters.values() if one.name != "metrics"]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(command).parameters.values() if one.name != "settings"]

        @functools.wraps(command)
        def whole(**given: Any) -> None:
            about_settings = {one.name: given.pop(one.name) for one in shared}
            command(**given, settings=settings_of(**about_settings, metrics=metrics))

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
        whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        return whole

    return decorate
