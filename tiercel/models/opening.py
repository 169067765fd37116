"""Which kind of checkpoint lies at a path."""

from pathlib import Path

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.gguf_checkpoint import open_gguf
from tiercel.models.hf_checkpoint import open_hf_folder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` file, or a folder in Hugging Face layout (or holding one ``.gguf`` file).

    Raises:
        UserError: nothing there, an unknown layout, or a model we cannot run; says which.
    """
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return open_hf_folder(path)
        inside = sorted(path.glob("*.gguf"))
        if len(inside) == 1:
            return open_gguf(inside[0])
        raise UserError(
            f"model folder {path} holds no config.json and {len(inside)} .gguf files: name one file, or another folder"
        )
    raise UserError(f"model {path} does not exist, or is neither a folder nor a .gguf file")
