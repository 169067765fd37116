"""Dense causal attention, for training and references; serving looks over the paged KV cache (``kvcache/rows.py``)."""

from torch import Tensor
from torch.nn import functional as F


class DenseAttention:
    """Causal attention inside ``batch`` sequences of equal length, flattened row by row; nothing is stored.

    Padding goes to the right: causal rows never see it.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(self.batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)
