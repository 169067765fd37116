"""The parts every layer is built from: norm, rotary embedding, attention block, MLP, decoder layer.

Rows are flat: ``[rows, hidden]``, whatever requests they belong to. Which rows see each other is the business of the
``Attention`` that the caller passes in, so serving (paged KV cache) and training (dense, causal) run the same layer.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiercel.device.parallel import current_tp_group
from tiercel.models.description import ModelDescription


class Attention(Protocol):
    """Who sees whom: stores this layer's keys and values, then lets every row look at the rows it may see."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            layer: index of the KV storage (a layer of the target, or an MTP layer).
            q: ``[rows, num_heads, head_dim]``, already rotated.
            k: ``[rows, num_kv_heads, head_dim]``, already rotated.
            v: ``[rows, num_kv_heads, head_dim]``.

        Returns:
            ``[rows, num_heads * head_dim]``.
        """
        ...


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich, 2019), accumulated in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Rotary:
    """Cosines and sines of positions (RoPE, Su et al. 2021), in Hugging Face's half-split layout.

    Angles are formed in float64 for the rows at hand: no table, so the context length costs no memory.
    """

    def __init__(self, description: ModelDescription) -> None:
        self.head_dim, self.theta = description.head_dim, description.rope_theta

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``positions`` (int64 ``[rows]``), each float32 ``[rows, 1, head_dim]``."""
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=positions.device) / self.head_dim
        angles = (positions.unsqueeze(-1) * self.theta**-steps).repeat(1, 2).unsqueeze(1)
        return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` (``[rows, heads, head_dim]``) by its rows' positions; computed in float32."""
    cos, sin = rotary
    wide = x.float()
    half = x.shape[-1] // 2
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


class AttentionBlock(nn.Module):
    """Grouped-query attention with one fused projection for queries, keys and values, of inputs ``input_size`` wide."""

    def __init__(self, description: ModelDescription, input_size: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = description.num_heads, description.num_kv_heads
        self.head_dim = description.head_dim
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(input_size or description.hidden_size, rows, bias=description.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, description.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attention: Attention) -> Tensor:
        rows = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        rotated = rotate(rows[:, : self.num_heads + self.num_kv_heads], rotary)
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        out: Tensor = self.o_proj(attention(layer, q, k, rows[:, self.num_heads + self.num_kv_heads :]))
        return current_tp_group().all_reduce(out)


class Mlp(nn.Module):
    """SwiGLU (Shazeer, 2020) with gate and up fused into one projection."""

    def __init__(self, description: ModelDescription) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(description.hidden_size, 2 * description.intermediate_size, bias=False)
        self.down_proj = nn.Linear(description.intermediate_size, description.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return current_tp_group().all_reduce(out)


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer: the target is a stack of them, and each MTP layer holds one."""

    def __init__(self, description: ModelDescription) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(description.hidden_size, description.rms_norm_eps)
        self.self_attn = AttentionBlock(description)
        self.post_attention_layernorm = RMSNorm(description.hidden_size, description.rms_norm_eps)
        self.mlp = Mlp(description)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attention: Attention) -> Tensor:
        """``hidden`` is ``[rows, hidden_size]``; so is the result."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, layer, attention)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
