"""``tiercel train``: train MTP layers for a frozen target."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tiercel.cli import options
from tiercel.core.errors import UserError
from tiercel.models.hub import resolve_model
from tiercel.models.loading import load_decoder
from tiercel.models.opening import open_checkpoint
from tiercel.train import trainer
from tiercel.train.data import read_conversations

_DEFAULTS = trainer.TrainConfig()


def command(
    data: Annotated[
        list[Path], typer.Option(help="JSON lines with prompt_token_ids and response_token_ids; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and log; resumes if it holds a run.")],
    target: Annotated[str, typer.Option(help="The model to draft for.")] = options.DEFAULT,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder of hidden states, OUT/cache by default; runs with other data may share it."),
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Start from this draft's layers: a folder, or the name of a shipped draft.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="MTP layers.")] = _DEFAULTS.layers,
    tokens: Annotated[int, typer.Option(min=1, help="Trained tokens in all.")] = _DEFAULTS.tokens,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = _DEFAULTS.learning_rate,
    untie_at: Annotated[
        float, typer.Option(help="Share of the tokens after which the layers part.")
    ] = _DEFAULTS.untie_at,
    decay: Annotated[float, typer.Option(help="Share of the tokens over which the rate falls.")] = _DEFAULTS.decay,
    prompt_share: Annotated[
        float, typer.Option(help="Share of prompt tokens whose prediction counts, beside all of the answer's.")
    ] = _DEFAULTS.prompt_share,
    batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens per step, about.")] = _DEFAULTS.batch_tokens,
    draft_vocab_size: Annotated[
        int, typer.Option(min=1, help="Tokens the draft can propose.")
    ] = _DEFAULTS.draft_vocab_size,
    held_out: Annotated[int, typer.Option(min=1, help="Greedy conversations to measure on.")] = _DEFAULTS.held_out,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = _DEFAULTS.evaluate_every,
    seed: Annotated[int, typer.Option(help="Order of the batches.")] = _DEFAULTS.seed,
    threads: options.Threads = None,
) -> None:
    """Train MTP layers on the target's own answers; the best by held-out acceptance is kept in OUT/best."""
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = open_checkpoint(resolve_model(target))
    vocab_size = checkpoint.description.vocab_size
    if draft_vocab_size > vocab_size:
        raise UserError(f"draft_vocab_size={draft_vocab_size} exceeds the target's vocabulary of {vocab_size}")
    config = trainer.TrainConfig(
        layers=layers,
        tokens=tokens,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        untie_at=untie_at,
        decay=decay,
        draft_vocab_size=draft_vocab_size,
        held_out=held_out,
        evaluate_every=evaluate_every,
        seed=seed,
        init=init,
        prompt_share=prompt_share,
    )
    conversations = read_conversations(data, vocab_size, config.max_length)
    decoder = load_decoder(checkpoint, torch.bfloat16, torch.device("cpu"))
    run = trainer.Trainer(
        checkpoint, decoder, conversations, out, cache or out / "cache", config, [path.name for path in data]
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=tokens, completed=run.tokens)

        def report(now: trainer.Progress) -> None:
            progress.update(task, completed=now.tokens, description=_describe(now))
            if now.acceptance:
                shares = " ".join(f"{100 * p:.1f}%" for p in now.acceptance.position)
                progress.print(
                    f"step {now.step}, {now.tokens} tokens: acceptance length {now.acceptance.length:.3f}, by position {shares}"
                )

        run.run(report)
    typer.echo(f"best acceptance length {run.best_length:.3f}: {out / 'best'}")


def _describe(now: trainer.Progress) -> str:
    losses = " ".join(f"{loss:.2f}" for loss in now.losses.cross_entropy)
    agree = " ".join(f"{100 * share:.0f}%" for share in now.losses.agreement)
    return (
        f"step {now.step}  loss {losses}  agree {agree}  best {now.best_length:.3f}  {now.tokens_per_second:.0f} tok/s"
    )
