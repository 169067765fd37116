"""``tiercel demo``: see speculation at work on a real model, with its true speed beside plain decoding."""

import os
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tiercel.cli import options
from tiercel.cli.render import counts_table, legend, save_picture, stages_table, styled
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import load_target
from tiercel.engine.llm import LLM
from tiercel.engine.outputs import RequestOutput
from tiercel.observability.record_files import REQUESTS, ROUNDS, file_name, record_files

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "A baker sells 12 loaves a day at 3 dollars each. How much does she earn in a week? Think step by step.",
    "List three animals that live in the sea and say one thing about each.",
)
PROMPT_VARIABLE = "TIERCEL_DEMO_PROMPT"


def command(
    prompt: Annotated[str | None, typer.Option(help=f"A prompt of your own (or in {PROMPT_VARIABLE}).")] = None,
    max_tokens: options.MaxTokens = 64,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt, with and without speculation.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the trace and the records.")] = Path("demo-out"),
    model: options.Model = options.DEFAULT,
    draft: options.Draft = "auto",
    num_steps: options.NumSteps = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    picture: Annotated[Path | None, typer.Option(help="Save what was shown as an SVG picture.")] = None,
) -> None:
    """Answer a few prompts with coloured tokens, then show acceptance, stage times, and speed with and without speculation."""
    console = Console(highlight=False)
    own = prompt or os.environ.get(PROMPT_VARIABLE)
    prompts = {f"prompt {i + 1}": text for i, text in enumerate(PROMPTS)} | ({"yours": own} if own else {})
    engine = EngineConfig(model=model, dtype=dtype, num_threads=threads)
    spec = SpecConfig(draft=draft, num_steps=num_steps)
    trace = TraceConfig(trace_out=out / "trace.json", records_out=out / "records")
    with console.status("loading the model"):
        target = load_target(engine, spec)
        _remove_old_records(out / "records")
        drafting = LLM(engine=engine, spec=spec, trace=trace, target=target)
        plain = LLM(engine=engine, spec=SpecConfig(method="none"), target=target)
    with drafting, plain:
        num_layers = drafting.engine.worker.num_layers
        page: list[RenderableType] = [legend(num_layers, with_lookup=bool(spec.lookup[0]))]
        console.print(page[0])
        sampling = SamplingParams(max_tokens=max_tokens)
        shown, speeds = [], []
        plain.generate(PROMPTS[0], SamplingParams(max_tokens=2))  # warm, as the shown run warms the other
        for name, text in prompts.items():
            console.print(f"\n[bold]{name}:[/] ", end="")
            console.print(text, markup=False, soft_wrap=True)
            output, answer = _stream(console, drafting, name, text, sampling)
            shown.append(output)
            page += [Text.assemble("\n", (f"{name}: ", "bold"), text), answer]
            speeds.append(_compare(console, drafting, plain, name, text, sampling, runs))
    console.print()
    tables = [counts_table(shown, num_layers), stages_table(shown), _speed_table(list(prompts), speeds)]
    for table in tables:
        console.print(table)
    files = (trace.trace_out, *(out / "records" / file_name(stem) for stem in (REQUESTS, ROUNDS)))
    console.print("wrote " + ", ".join(map(str, files)) + " (open the trace at ui.perfetto.dev)", soft_wrap=True)
    if picture:
        save_picture([*page, "", *tables], picture, "tiercel demo")


def _remove_old_records(folder: Path) -> None:
    """Records are appended to; a demo shows one run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stem in (REQUESTS, ROUNDS):
            for path in record_files(folder, stem):
                path.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error


def _stream(console: Console, llm: LLM, name: str, text: str, sampling: SamplingParams) -> tuple[RequestOutput, Text]:
    answer = Text()
    for event in llm.stream(text, sampling, request_ids=[name]):
        piece = styled(event.text, event.source)
        console.print(piece, end="", soft_wrap=True)
        answer.append_text(piece)
        if event.output:
            console.print()
            return event.output.checked(), answer
    raise RuntimeError(f"the stream of {name} ended without a result")


def _compare(
    console: Console, drafting: LLM, plain: LLM, name: str, text: str, sampling: SamplingParams, runs: int
) -> tuple[list[float], list[float]]:
    """Tokens per second with and without speculation, interleaved run by run; says so if an output differs."""
    with_spec, without = [], []
    with console.status(f"timing {name}, with and without speculation"):
        for run in range(runs):
            ours = drafting.generate(text, sampling, request_ids=[f"{name} run {run + 1}"])[0].checked()
            reference = plain.generate(text, sampling)[0].checked()
            if ours.token_ids != reference.token_ids:
                console.print(
                    f"[red]{name}: the output differs from plain decoding[/] (a tie between two tokens, or a fault)"
                )
            with_spec.append(ours.record.tokens_per_second or 0.0)
            without.append(reference.record.tokens_per_second or 0.0)
    return with_spec, without


def _speed_table(names: list[str], speeds: list[tuple[list[float], list[float]]]) -> Table:
    table = Table(title="tokens per second: median (least – most) of interleaved runs", title_justify="left")
    for column in ("request", "with speculation", "without", "ratio"):
        table.add_column(column, justify="left" if column == "request" else "right")
    ratios = []
    for name, (ours, plain) in zip(names, speeds, strict=True):
        pairs = [a / b for a, b in zip(ours, plain, strict=True) if b]
        ratios += pairs
        table.add_row(name, _spread(ours, 1), _spread(plain, 1), _spread(pairs, 2))
    table.add_row("all", "", "", _spread(ratios, 2), end_section=True)
    return table


def _spread(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"
