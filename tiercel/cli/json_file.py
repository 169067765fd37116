"""``--json FILE``: refused before the measuring, written after it."""

import json
import os
from pathlib import Path
from typing import Any

from tiercel.core.errors import UserError


def check_writable(file: Path | None, option: str = "--json") -> None:
    """Refuse a file that could not be written later.

    Raises:
        UserError: naming the file and the option.
    """
    if file is None:
        return
    in_a_folder = file.parent.is_dir() and not file.is_dir()
    if not (in_a_folder and os.access(file if file.exists() else file.parent, os.W_OK)):
        raise UserError(f"cannot write {file}: give {option} a file in a folder that exists and can be written")


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """Write ``result``, if a file was asked for."""
    if file:
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
