"""Which kind of checkpoint lies at a path, and which implementation runs it."""

import warnings
from pathlib import Path

import torch

from tiercel.core.config import EngineConfig
from tiercel.core.errors import UserError
from tiercel.device.placement import Placement
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.gguf_checkpoint import open_gguf
from tiercel.models.hf_checkpoint import open_hf_folder
from tiercel.models.loading import load_decoder
from tiercel.models.native_step import load_native_target
from tiercel.models.step import EagerTarget, Target
from tiercel.native.library import library


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


def load_model(checkpoint: Checkpoint, config: EngineConfig, placement: Placement) -> Target:
    """Read the weights: into the CPU library where it can run them, else into PyTorch modules.

    Raises:
        UserError: a tensor is missing, unknown, of the wrong shape, or holds NaN or infinity; or ``q8_0`` cannot be had here.
    """
    suits = placement.device.type == "cpu" and placement.dtype == torch.float32 and not config.enforce_eager
    if suits and library() is not None:
        return load_native_target(checkpoint, config.quantization, config.activation_bits)
    if config.quantization == "q8_0":
        raise UserError("quantization='q8_0' needs the CPU library, which runs on a CPU and is built by a C++ compiler")
    if suits:
        warnings.warn(
            "tiercel's CPU library was not built (no C++ compiler when the package was installed): running on PyTorch "
            "alone, several times slower; install a compiler and the package again",
            RuntimeWarning,
            stacklevel=2,
        )
    return EagerTarget(load_decoder(checkpoint, placement.dtype, placement.device))
