"""Files of record lines in a folder: whole lines are appended, a full file is followed by the next, all are read in order.

``requests.jsonl`` is the oldest, then come ``requests.1.jsonl``, ``requests.2.jsonl``, …: no file is ever renamed or removed, so
whoever follows one never loses a line. Numbers may be missing where somebody has deleted old files.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tiercel.core.errors import UserError

REQUESTS, ROUNDS = "requests", "rounds"
"""Stems of the two kinds of files."""

OnTruncated = Callable[[str], None]
"""Hears of a last line that is cut off."""


def file_name(stem: str, number: int = 0) -> str:
    """Name of the file that comes after ``number`` others."""
    return f"{stem}.{number}.jsonl" if number else f"{stem}.jsonl"


def record_files(folder: Path, stem: str) -> list[Path]:
    """A folder's files of one stem, oldest first; empty where there is none.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return [folder / file_name(stem, number) for number in sorted(_numbers(folder, stem))]
    except OSError as error:
        raise UserError(f"cannot read records {folder}: {error.strerror}") from error


def _numbers(folder: Path, stem: str) -> list[int]:
    pattern = re.compile(rf"{stem}(?:\.([1-9][0-9]*))?\.jsonl", re.ASCII)
    return [int(found[1] or 0) for path in folder.iterdir() if (found := pattern.fullmatch(path.name))]


class RotatingFile:
    """Appends lines, each with a write of its own, so that a crash loses none that was written before it.

    Args:
        folder: exists.
        stem: of the files' names.
        max_bytes: a line that would make a file larger than this goes into the next one; None never begins another. A line
            that is larger by itself has a file of its own.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path, stem: str, max_bytes: int | None = None) -> None:
        self.folder, self.stem, self.max_bytes = folder, stem, max_bytes
        self.number = max(_numbers(folder, stem), default=0)
        if _ends_inside_a_line(self.path):  # what is appended to half a line is lost with it
            self.number += 1
        self._open()

    @property
    def path(self) -> Path:
        """The file that takes the next line, if it has room."""
        return self.folder / file_name(self.stem, self.number)

    def append(self, line: str) -> None:
        """Write a line.

        Raises:
            OSError: it could not be written; nothing of it stays in the file.
        """
        data = line.encode() + b"\n"
        if self.max_bytes is not None and self._size and self._size + len(data) > self.max_bytes:
            self._file.close()
            self.number += 1
            self._open()
        written = 0
        try:
            while written < len(data):  # a disk that gets full takes a part
                written += self._file.write(data[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += written

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        self._size = self.path.stat().st_size


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read() != b"\n"


def read_rows(path: Path, on_truncated: OnTruncated | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, one line at a time, each with its place (``FILE:LINE``).

    Args:
        path: one file.
        on_truncated: is told when the last line is cut off, which is then left out; None raises.

    Raises:
        UserError: the file cannot be read, a line is no JSON object, or the last one is cut off.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise UserError(f"{where}: no record ({error})") from error
                    _truncated(where, number - 1, on_truncated)
                    return
                if not isinstance(row, dict):
                    raise UserError(f"{where}: no record (a JSON object is needed)")
                yield where, row
    except OSError as error:
        raise UserError(f"cannot read records {path}: {error.strerror}") from error


def _truncated(where: str, whole: int, on_truncated: OnTruncated | None) -> None:
    what = f"{where}: the last line is cut off, as by a crash of its writer; the {whole} lines before it are whole"
    if on_truncated is None:
        raise UserError(f"{what}: to read those, leave it out (--skip-truncated, or on_truncated in Python)")
    on_truncated(what)
