"""Keys and values of one layer, by slot."""

import math

import numpy as np
import torch
from torch import Tensor


class KvStorage:
    """Keys and values of one layer: two tensors ``[num_slots, num_kv_heads, head_dim]``, zero until written."""

    def __init__(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_slots, num_kv_heads, head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows (``[rows, num_kv_heads, head_dim]``) at ``slots`` (int64 ``[rows]``)."""
        self.keys.index_copy_(0, slots, keys)
        self.values.index_copy_(0, slots, values)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots`` (int64 ``[batch, context]``): each ``[batch, context, num_kv_heads, head_dim]``."""
        flat = slots.flatten()
        shape = (*slots.shape, *self.keys.shape[1:])
        return self.keys.index_select(0, flat).view(shape), self.values.index_select(0, flat).view(shape)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only where they are written: the pool is large, and most of it is often never used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
