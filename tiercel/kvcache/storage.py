"""Keys and values of one layer, by slot."""

import math

import numpy as np
import torch
from torch import Tensor


class KvStorage:
    """Keys and values of one layer: two tensors ``[num_kv_heads, num_slots, head_dim]``, zero until written.

    Head by head, so that a head's pass over its keys is one stream through memory.
    """

    def __init__(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_kv_heads, num_slots, head_dim)
        self.is_half = dtype is torch.float16
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows (``[rows, num_kv_heads, head_dim]``) at ``slots`` (int64 ``[rows]``)."""
        self.keys.index_copy_(1, slots, self._held(keys))
        self.values.index_copy_(1, slots, self._held(values))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy what lies at slots ``source`` to slots ``target`` (int64 ``[slots]`` each), as it is."""
        for held in (self.keys, self.values):
            held.index_copy_(1, target, held.index_select(1, source))

    def _held(self, rows: Tensor) -> Tensor:
        # Beyond its range float16 holds its largest number, as the CPU library has it.
        limit = torch.finfo(self.keys.dtype).max
        return (rows.clamp(-limit, limit) if self.is_half else rows).to(self.keys.dtype).transpose(0, 1)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots`` (int64 ``[batch, context]``): each ``[batch, num_kv_heads, context, head_dim]``."""
        flat = slots.flatten()
        shape = (self.keys.shape[0], *slots.shape, self.keys.shape[2])
        keys, values = (held.index_select(1, flat).view(shape).transpose(0, 1) for held in (self.keys, self.values))
        return keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only where they are written: the pool is large, and most of it is often never used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
