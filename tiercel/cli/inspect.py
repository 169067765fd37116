"""``tiercel inspect``: what a checkpoint holds, and what would become of it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tiercel.cli.json_file import check_writable, write_json
from tiercel.models.hub import resolve_model
from tiercel.models.inspection import Inspection, MtpFound, inspect_checkpoint
from tiercel.models.mtp_checkpoint import SHIPPED

SHOWN = 20
"""Names in a list; ``--json`` has them all."""


def command(
    path: Annotated[str, typer.Argument(help="A model's name, a model or draft folder, or a .gguf file.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
) -> None:
    """Show what a checkpoint holds, what would be loaded where, and why it would be refused; weights are not read."""
    check_writable(json_file)
    found = inspect_checkpoint(SHIPPED.get(path) or resolve_model(path))
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(found))
    for title, names in (("missing", found.missing), ("not used", found.unused)):
        if names:
            more = f" and {len(names) - SHOWN} more (--json lists them)" if len(names) > SHOWN else ""
            console.print(escape(f"{title}: {', '.join(names[:SHOWN])}{more}"))
    fits = (
        "it can be loaded"
        if found.kind.endswith(("folder", "file"))
        else "whether it fits is decided beside its target"
    )
    console.print(escape(f"refused: {found.refusal}" if found.refusal else fits))
    write_json(json_file, asdict(found))


def _table(found: Inspection) -> Table:
    table = Table("", "", show_header=False, box=None)
    rows = [("kind", found.kind), ("family", found.family)]
    if found.num_layers is not None:
        rows.append(("layers", str(found.num_layers)))
    if found.window is not None:
        rows.append(("window", f"{found.window} tokens"))
    rows += _mtp_rows(found.mtp) if found.mtp else [("MTP layers", "none")] if found.kind != "EAGLE head" else []
    for part in found.parts:
        rows.append((part.name, f"{part.num_tensors} tensors, {_mb(part.num_bytes)} in the file → {part.goes_to}"))
    held = ", ".join(f"{_mb(size)} {'as stored' if how == 'file' else how}" for how, size in found.memory.items())
    rows.append(("memory", f"{found.num_parameters:,} parameters: {held}"))
    if found.kv_bytes_per_token is not None:
        rows.append(("KV cache", f"{found.kv_bytes_per_token:,} bytes per token in float16"))
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table


def _mtp_rows(mtp: MtpFound) -> list[tuple[str, str]]:
    def said(value: bool | None, yes: str, no: str) -> str:
        return "not said" if value is None else yes if value else no

    declared = "" if mtp.declared is None else f", {mtp.declared} declared"
    return [
        ("MTP layers", f"{mtp.num_layers} held{declared} ({mtp.layout})"),
        ("  chained", said(mtp.chained, "yes", "no: each reads the target's hidden state")),
        ("  projection reads", said(mtp.embedding_first, "[embedding; hidden]", "[hidden; embedding]")),
        ("  hidden state", said(mtp.hidden_before_final_norm, "before the final norm", "after the final norm")),
        ("  head", "stored with them" if mtp.holds_head else "the target's"),
        ("  embedding", "stored with them" if mtp.holds_embedding else "the target's"),
    ]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
