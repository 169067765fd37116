"""Prompt files: JSON lines with ``prompt``, or Spec-Bench rows with ``turns`` (the first turn is taken)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file; ``category`` is Spec-Bench's, or empty."""

    request_id: str
    text: str
    category: str = ""


def read_prompts(path: Path) -> list[PromptRow]:
    """Rows of a prompt file, in order; ``id`` or ``question_id`` names the request, else the row's number.

    Raises:
        UserError: naming file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON text may hold U+2028, where splitlines would cut
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts {path}: {error}") from error
    rows = [_row(line, f"{path}:{number}", number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UserError(f"{path} holds no prompt: give JSON lines with a `prompt` or `turns` field")
    seen: set[str] = set()
    for row in rows:
        if row.request_id in seen:
            raise UserError(f"{path}: the id {row.request_id!r} comes twice: make ids unique or leave them out")
        seen.add(row.request_id)
    return rows


def _row(line: str, where: str, number: int) -> PromptRow:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: need a JSON object with a `prompt` or `turns` field")
    turns = row.get("turns")
    text = row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: need a non-empty text in `prompt`, or a list of texts in `turns`")
    name = row.get("id", row.get("question_id", number))
    return PromptRow(str(name), text, str(row.get("category", "")))
