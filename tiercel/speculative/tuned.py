"""The depths that ``tiercel tune`` measured: a file per machine, model, draft and precision, found by what it was measured on."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiercel.core.config import EngineConfig
from tiercel.core.depths import DepthTable
from tiercel.core.errors import UserError
from tiercel.device.placement import Placement
from tiercel.device.processor import processor
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.step import Target

FOLDER_VARIABLE = "TIERCEL_TUNE_DIR"
WEIGHT_FILES = (".safetensors", ".gguf")


def tune_folder() -> Path:
    """Where tuned depths lie: ``TIERCEL_TUNE_DIR``, else ``tiercel/tune`` in ``XDG_STATE_HOME`` or ``~/.local/state``."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tiercel" / "tune"


@dataclass(frozen=True, slots=True)
class TuneKey:
    """What tuned depths hold for: whatever changes what a round costs or how often drafts are right.

    Args:
        target: ``Checkpoint.fingerprint``.
        weights_bytes: size of the target's files, which tells its formats apart.
        draft: hash of the draft's files.
        dtype: of the weights that are not quantised.
        quantization: see ``EngineConfig``.
        activation_bits: see ``EngineConfig``.
        kv_dtype: see ``EngineConfig``.
        recorded: whether recorded steps of the CPU library run, not PyTorch's modules.
        processor: name of the device that computes.
        threads: CPU threads.
    """

    target: str
    weights_bytes: int
    draft: str
    dtype: str
    quantization: str
    activation_bits: int
    kv_dtype: str
    recorded: bool
    processor: str
    threads: int

    @property
    def path(self) -> Path:
        """The file that belongs to this key."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return tune_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def tune_key(
    checkpoint: Checkpoint, target: Target, placement: Placement, engine: EngineConfig, draft: Path
) -> TuneKey:
    """The key of what runs here: ``target`` with the draft in folder ``draft``."""
    return TuneKey(
        target=checkpoint.fingerprint,
        weights_bytes=_weights_bytes(checkpoint.path),
        draft=_draft_hash(draft),
        dtype=str(placement.dtype).removeprefix("torch."),
        quantization=engine.quantization,
        activation_bits=engine.activation_bits,
        kv_dtype=engine.kv_dtype,
        recorded=target.is_graph,
        processor=processor(placement.device),
        threads=torch.get_num_threads(),
    )


def read_tuned(path: Path) -> DepthTable | None:
    """The depths in a file that ``write_tuned`` made; None if there is no such file.

    Raises:
        UserError: it cannot be read, or is not of this format; names the file and the remedy.
    """
    try:
        return DepthTable.from_json(json.loads(path.read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"tuned depths {path}: {error}; run `tiercel tune` again, or delete the file") from error


def write_tuned(key: TuneKey, table: DepthTable, measured: dict[str, Any]) -> Path:
    """Put depths where an engine with this key finds them; the file appears whole or not at all.

    Args:
        key: what they hold for.
        table: the depths.
        measured: what they were taken from, for people.

    Raises:
        UserError: the folder cannot be written to.
    """
    part = prepare_folder() / f"{key.path.name}.{os.getpid()}.part"
    content = {**table.to_json(), "key": key.to_json(), "measured": measured}
    try:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, key.path)
    except OSError as error:
        raise _unwritable(part.parent, error.strerror) from error
    return key.path


def prepare_folder() -> Path:
    """``tune_folder``, made if missing: whoever measures for minutes knows before that the result can be kept.

    Raises:
        UserError: it cannot be made or written to.
    """
    folder = tune_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    if not os.access(folder, os.W_OK):
        raise _unwritable(folder, "no permission")
    return folder


def _unwritable(folder: Path, reason: str | None) -> UserError:
    return UserError(f"cannot write to {folder} ({reason}): set {FOLDER_VARIABLE} to a folder you own")


def _weights_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in WEIGHT_FILES]
    return sum(file.stat().st_size for file in files)


def _draft_hash(folder: Path) -> str:
    found = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]
