"""``tiercel bench``: latency, throughput, overhead, and other engines, each measured in turns."""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType

from tiercel.bench import hardware, latency, overhead, peer_process, peers, roofline, throughput
from tiercel.bench.chart import bars
from tiercel.bench.engines import Bench, encode, open_bench
from tiercel.bench.peer_process import Peer, PeerContender, PeerSettings, peer_settings
from tiercel.bench.samples import BenchPrompt, Samples, decode_tok_s
from tiercel.bench.turns import Contender, Report, take_turns
from tiercel.cli import bench_tables as tables
from tiercel.cli import options
from tiercel.cli.demo import PROMPTS
from tiercel.cli.json_file import check_writable, write_json
from tiercel.cli.prompts import read_prompts
from tiercel.core.config import EngineConfig

SCHEMA_VERSION = 1

Limit = Annotated[int | None, typer.Option(min=1, help="Take so many prompts, spread over the file.")]
Runs = Annotated[int, typer.Option(min=1, help="Timed runs over all prompts, after a warm-up.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Completion tokens of every answer.")]
Depth = Annotated[int | None, typer.Option("--num-steps", min=1, help="Drafts per round (K); default: all MTP layers.")]
Depths = Annotated[list[int], typer.Option("--num-steps", min=1, help="Drafts per round (K); repeatable.")]
PeersDir = Annotated[Path, typer.Option(help="Drivers and environments of the peers.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write results and every raw sample to this file.")]

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
    """One request at a time: plain decoding and each K; fails if their tokens differ."""
    check_writable(json_file)
    texts = _texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads)
    with ExitStack() as stack, _reporting() as report:
        bench, rows = _open(stack, engine, draft, num_steps, texts)
        samples = take_turns(bench.contenders(stack, num_steps), rows, max_tokens, runs, report)
    different = latency.differing(samples)
    result = _result("latency", engine, texts, max_tokens, runs) | {
        "contenders": latency.summary(samples),
        "differing": [{"contender": contender, "prompt": prompt} for contender, prompt in different],
        "samples": _raw(samples),
    }
    _show(tables.latency(result), result, json_file)
    if different:
        listed = ", ".join(f"{contender} on prompt {prompt}" for contender, prompt in different)
        typer.echo(f"tiercel: tokens differ from plain decoding: {listed}", err=True)
        raise typer.Exit(1)


@app.command("throughput")
def throughput_command(
    prompts: options.Prompts = None,
    limit: Limit = None,
    concurrency: Annotated[list[int], typer.Option(min=1, help="Requests at once; repeatable.")] = [1, 4, 16],  # noqa: B006
    num_steps: Depth = None,
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
    texts = _texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads, max_batch_size=max(concurrency))
    with ExitStack() as stack, _reporting() as report:
        bench, rows = _open(stack, engine, draft, [num_steps], texts)
        roomy = dataclasses.replace(bench, engine=_with_room(engine, rows, max_tokens))
        ours = roomy.contenders(stack, [num_steps])
        path, workers = bench.target.checkpoint.path, torch.get_num_threads()
        ways = [
            (one, peer_settings(path, "batch", workers, rows, max_tokens, max_prompts=max(concurrency)))
            for one in wanted
        ]
        others = _open_peers(stack, ways, peers_dir, report)
        contenders: list[throughput.GroupContender] = [*ours, *others]
        samples = throughput.run_groups(contenders, rows, concurrency, max_tokens, runs, report)
    result = _result("throughput", engine, texts, max_tokens, runs)
    result["versions"] |= {one.name: one.version for one in others}
    result |= {
        "groups": throughput.summary(samples),
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    _show(tables.throughput(result), result, json_file)


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
    texts = _texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads)
    with ExitStack() as stack, _reporting() as report:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercel-bench-")))
        bench, rows = _open(stack, engine, draft, [num_steps], texts)
        contenders = overhead.contenders(bench, stack, num_steps, folder)
        samples = take_turns(contenders, rows, max_tokens, runs, report)
    result = _result("overhead", engine, texts, max_tokens, runs) | {
        "contenders": overhead.summary(samples),
        "samples": _raw(samples),
    }
    _show(tables.overhead(result), result, json_file)


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
    texts = _texts(prompts, limit)
    engine = EngineConfig(model=model, num_threads=threads)
    with ExitStack() as stack, _reporting() as report:
        bench, rows = _open(stack, engine, draft, num_steps, texts)
        ours = bench.contenders(stack, num_steps)
        for contender in ours:
            contender.name = peers.OWN + contender.name
        depths = {contender.name: contender.llm.engine.worker.num_steps for contender in ours}
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
    result = _result("peers", engine, texts, max_tokens, runs)
    result["settings"]["lookup_tokens"] = lookup_tokens
    result["versions"] |= {one.name: one.version for one in others}
    result |= {
        "contenders": peers.summary(samples),
        "ratios": peers.ratios(samples),
        "best_way": {one.title: peers.best_other(samples, one.title) for one in wanted},
        "roofline": peers.reached(samples, limits, depths) if limits else None,
        "samples": _raw(samples),
    }
    _show(tables.peers(result), result, json_file)
    if plot:
        speeds = {name: samples.spread(name, decode_tok_s) for name in samples.contenders}
        plot.write_text(bars("decoding, tokens per second", speeds, frozenset(peers.own(samples))), encoding="utf-8")


def _texts(prompts: Path | None, limit: int | None) -> dict[str, str]:
    """Prompts by name, ``limit`` of them spread over the file."""
    if prompts is None:
        texts = {str(number): text for number, text in enumerate(PROMPTS, start=1)}
    else:
        texts = {row.request_id: row.text for row in read_prompts(prompts)}
    if limit is None or limit >= len(texts):
        return texts
    names = list(texts)
    return {names[i * len(names) // limit]: texts[names[i * len(names) // limit]] for i in range(limit)}


def _open(
    stack: ExitStack, engine: EngineConfig, draft: str, depths: Sequence[int | None], texts: dict[str, str]
) -> tuple[Bench, list[BenchPrompt]]:
    bench = open_bench(engine, draft, depths)
    return bench, encode(bench.open(stack, 0), texts)


def _with_room(engine: EngineConfig, rows: Sequence[BenchPrompt], max_tokens: int) -> EngineConfig:
    """KV slots for every request at once, so that none has to wait for another's."""
    longest = max(len(row.token_ids) for row in rows) + max_tokens
    whole_pages = -(-longest // engine.page_size) * engine.page_size
    return dataclasses.replace(engine, kv_tokens=max(engine.kv_tokens, whole_pages * engine.max_batch_size))


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


@contextmanager
def _reporting() -> Iterator[Report]:
    with Console(stderr=True).status("loading the model") as status:
        yield status.update


def _result(command: str, engine: EngineConfig, texts: dict[str, str], max_tokens: int, runs: int) -> dict[str, Any]:
    settings = {"max_tokens": max_tokens, "runs": runs, "prompts": list(texts), "engine": dataclasses.asdict(engine)}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": f"bench {command}",
        "settings": settings,
        "hardware": hardware.describe(),
        "versions": hardware.versions(),
    }


def _raw(samples: Samples) -> list[dict[str, Any]]:
    return [sample.to_json() for sample in samples.all]


def _show(page: Sequence[RenderableType], result: dict[str, Any], json_file: Path | None) -> None:
    console = Console(highlight=False)
    for part in page:
        console.print(part)
    console.print(tables.hardware_line(result), soft_wrap=True, markup=False)
    write_json(json_file, result)
