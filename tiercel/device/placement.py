"""Choose device, dtype and threads once, at start."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tiercel.core.config import EngineConfig
from tiercel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype that weights and KV cache share."""

    device: torch.device
    dtype: torch.dtype

    @property
    def clock(self) -> str:
        """What stage times are made of: the host's clock, on a GPU after waiting for the device."""
        return "host-synchronized" if self.device.type == "cuda" else "host"

    def synchronize(self) -> None:
        """Wait for the device, so that a host clock read marks the end of its work; nothing to wait for on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def integers(values: ArrayLike, device: torch.device) -> Tensor:
    """An int64 tensor on ``device``; through NumPy, which reads a list ten times as fast as ``torch.tensor``."""
    found = torch.from_numpy(np.array(values, dtype=np.int64))
    return found if device.type == "cpu" else found.to(device)


def place(config: EngineConfig) -> Placement:
    """Resolve ``auto`` and set PyTorch's threads.

    ``auto`` dtype is float32 on a CPU, where outputs with and without speculation are then equal but for exact ties,
    and bfloat16 on a GPU.

    Raises:
        UserError: a GPU is asked for and none is there.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda', but PyTorch sees no CUDA GPU here: choose device='cpu' or install a CUDA build")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    default = "bfloat16" if use_cuda else "float32"
    dtype = getattr(torch, default if config.dtype == "auto" else config.dtype)
    return Placement(torch.device("cuda" if use_cuda else "cpu"), dtype)
