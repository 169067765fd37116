"""``tiercel bench``: latency, throughput, overhead, and other engines, each measured in turns."""

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tiercel.bench import latency, overhead, peer_process, peers, roofline, throughput
from tiercel.bench.chart import bars
from tiercel.bench.peer_process import Peer, PeerContender, PeerSettings, peer_settings
from tiercel.bench.samples import Samples, decode_tok_s
from tiercel.bench.turns import Contender, Report, take_turns
from tiercel.cli import bench_tables as tables
from tiercel.cli import options
from tiercel.cli.json_file import check_writable
from tiercel.cli.measuring import (
    Json,
    Limit,
    Runs,
    Tokens,
    chosen_texts,
    new_result,
    open_with_prompts,
    reporting,
    show_result,
)
from tiercel.core.config import EngineConfig

Depth = Annotated[int | None, typer.Option("--num-steps", min=1, help="Drafts per round (K); default: all MTP layers.")]
Depths = Annotated[list[int], typer.Option("--num-steps", min=1, help="Drafts per round (K); repeatable.")]
PeersDir = Annotated[Path, typer.Option(help="Drivers and environments of the peers.")]

app = typer.Typer(
    help="Measure speed: contenders take turns, the warm-up is not counted.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("latency")
def latency_command(
    prompts: options.Prompts = None,
    limit: Limit = None,
    num_steps: Depths = [1, 2, 3],  # noqa: B006 typer copies it
    max_tokens: Tokens = 128,
    runs: Runs = 5,
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    threads: options.Threads = None,
    json_file: Json = None,
) -> None:
    """One request at a time: plain decoding and every drafter; fails if their tokens differ."""
    check_writable(json_file)
    texts = chosen_texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads)
    with ExitStack() as stack, reporting() as report:
        bench, rows = open_with_prompts(stack, engine, draft, num_steps, texts)
        samples = take_turns(bench.contenders(stack, [*num_steps, None]), rows, max_tokens, runs, report)
    different = latency.differing(samples)
    result = new_result("bench latency", engine, texts, max_tokens, runs) | {
        "contenders": latency.summary(samples),
        "differing": [{"contender": contender, "prompt": prompt} for contender, prompt in different],
        "samples": _raw(samples),
    }
    show_result(tables.latency(result), result, json_file)
    if different:
        listed = ", ".join(f"{contender} on prompt {prompt}" for contender, prompt in different)
        typer.echo(f"tiercel: tokens differ from plain decoding: {listed}", err=True)
        raise typer.Exit(1)


@app.command("throughput")
def throughput_command(
    prompts: options.Prompts = None,
    limit: Limit = None,
    concurrency: Annotated[list[int], typer.Option(min=1, help="Requests at once; repeatable.")] = [1, 4, 16],  # noqa: B006
    num_steps: Annotated[
        int | None, typer.Option(min=1, help="MTP layers (K) alone, at every load, instead of the default engine.")
    ] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Measure what `tiercel tune` has set, too.")] = False,
    max_tokens: Tokens = 128,
    runs: Runs = 3,
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    threads: options.Threads = None,
    peer: Annotated[list[str], typer.Option(help="Compare with this peer too: llama_cpp.")] = [],  # noqa: B006
    peers_dir: PeersDir = peer_process.PEERS_FOLDER,
    json_file: Json = None,
) -> None:
    """Many requests at once: tokens per second of all together, with speculation and without."""
    check_writable(json_file)
    wanted = peer_process.batching_peers(peer)
    _check_environments(wanted, peers_dir)
    texts = chosen_texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads, max_batch_size=max(concurrency))
    with ExitStack() as stack, reporting() as report:
        bench, rows = open_with_prompts(stack, engine, draft, [num_steps], texts)
        roomy = bench.with_room(rows, max_tokens)
        ours = roomy.contenders(stack, [num_steps])
        if tuned:
            ours.append(roomy.tuned(stack))
        path, workers = bench.target.checkpoint.path, torch.get_num_threads()
        ways = [
            (one, peer_settings(path, "batch", workers, rows, max_tokens, max_prompts=max(concurrency)))
            for one in wanted
        ]
        others = _open_peers(stack, ways, peers_dir, report)
        contenders: list[throughput.GroupContender] = [*ours, *others]
        samples = throughput.run_groups(contenders, rows, concurrency, max_tokens, runs, report)
    result = new_result("bench throughput", engine, texts, max_tokens, runs)
    result["versions"] |= {one.name: one.version for one in others}
    result |= {
        "groups": throughput.summary(samples),
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    show_result(tables.throughput(result), result, json_file)


@app.command("overhead")
def overhead_command(
    prompts: options.Prompts = None,
    limit: Limit = None,
    num_steps: Depth = None,
    max_tokens: Tokens = 128,
    runs: Runs = 5,
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    threads: options.Threads = None,
    json_file: Json = None,
) -> None:
    """Tracing off, at levels 1 to 3, and records to files: what each costs, beside the noise of two runs with it off."""
    check_writable(json_file)
    texts = chosen_texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads)
    with ExitStack() as stack, reporting() as report:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercel-bench-")))
        bench, rows = open_with_prompts(stack, engine, draft, [num_steps], texts)
        contenders = overhead.contenders(bench, stack, num_steps, folder)
        samples = take_turns(contenders, rows, max_tokens, runs, report)
    result = new_result("bench overhead", engine, texts, max_tokens, runs) | {
        "contenders": overhead.summary(samples),
        "samples": _raw(samples),
    }
    show_result(tables.overhead(result), result, json_file)


@app.command("peers")
def peers_command(
    prompts: options.Prompts = None,
    limit: Limit = None,
    num_steps: Depths = [1, 2, 3],  # noqa: B006
    max_tokens: Tokens = 128,
    runs: Runs = 5,
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    threads: options.Threads = None,
    peer: Annotated[
        list[str], typer.Option(help="llama_cpp, openvino or transformers; repeatable; default: all.")
    ] = [],  # noqa: B006
    lookup_tokens: Annotated[int, typer.Option(min=1, help="Drafts per round of the peers' prompt lookup.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw decoding speeds as an SVG picture.")] = None,
    setup: Annotated[list[str], typer.Option(help="Only make this peer's environment; repeatable.")] = [],  # noqa: B006
    peers_dir: PeersDir = peer_process.PEERS_FOLDER,
    json_file: Json = None,
) -> None:
    """Tiercel against llama.cpp, OpenVINO GenAI and Transformers: same file, prompts, threads and token counts."""
    if setup:
        for one in peer_process.chosen_peers(setup):
            peer_process.make_environment(one, peers_dir)
        return
    check_writable(json_file)
    check_writable(plot, "--plot")
    wanted = peer_process.chosen_peers(peer) if peer else list(peer_process.PEERS)
    _check_environments(wanted, peers_dir)
    texts = chosen_texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads)
    with ExitStack() as stack, reporting() as report:
        bench, rows = open_with_prompts(stack, engine, draft, num_steps, texts)
        ours = bench.contenders(stack, [*num_steps, None])
        for contender in ours:
            contender.name = peers.OWN + contender.name
        report("measuring the machine's limits")
        limits = roofline.measure(bench.target.model, engine.activation_bits, torch.get_num_threads())
        path, workers = bench.target.checkpoint.path, torch.get_num_threads()
        ways = [
            (one, peer_settings(path, variant, workers, rows, max_tokens, lookup_tokens=lookup_tokens))
            for one in wanted
            for variant in one.variants
        ]
        others = _open_peers(stack, ways, peers_dir, report)
        contenders: list[Contender] = [*ours, *others]
        samples = take_turns(contenders, rows, max_tokens, runs, report)
    result = new_result("bench peers", engine, texts, max_tokens, runs)
    result["settings"]["lookup_tokens"] = lookup_tokens
    result["versions"] |= {one.name: one.version for one in others}
    result |= {
        "contenders": peers.summary(samples),
        "ratios": peers.ratios(samples),
        "best_way": {one.title: peers.best_other(samples, one.title) for one in wanted},
        "roofline": peers.reached(samples, limits) if limits else None,
        "samples": _raw(samples),
    }
    show_result(tables.peers(result), result, json_file)
    if plot:
        speeds = {name: samples.spread(name, decode_tok_s) for name in samples.contenders}
        plot.write_text(bars("decoding, tokens per second", speeds, frozenset(peers.own(samples))), encoding="utf-8")


def _check_environments(wanted: Sequence[Peer], folder: Path) -> None:
    for peer in wanted:
        peer_process.interpreter(peer, folder)


def _open_peers(
    stack: ExitStack, ways: Sequence[tuple[Peer, PeerSettings]], folder: Path, report: Report
) -> list[PeerContender]:
    found = []
    for peer, settings in ways:
        report(f"starting {peer.title}, {settings.variant}")
        found.append(stack.enter_context(PeerContender(peer, settings, folder)))
    return found


def _raw(samples: Samples) -> list[dict[str, Any]]:
    return [sample.to_json() for sample in samples.all]
