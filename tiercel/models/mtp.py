"""MTP layers: the draft. Each holds one decoder layer; embedding and head are the target's."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiercel.models.decoder import Decoder
from tiercel.models.description import MtpDescription
from tiercel.models.layers import Attention, DecoderLayer, RMSNorm, Rotary


class MtpLayer(nn.Module):
    """One MTP layer (DeepSeek-V3, section 2.2): ``eh_proj`` over normed embedding and hidden state, then a decoder layer."""

    def __init__(self, description: MtpDescription) -> None:
        super().__init__()
        body = description.body
        self.embedding_first = description.embedding_first
        self.enorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.hnorm = RMSNorm(description.target_hidden_size, body.rms_norm_eps)
        self.eh_proj = nn.Linear(body.hidden_size + description.target_hidden_size, body.hidden_size, bias=False)
        self.body = DecoderLayer(body)
        self.final_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attention: Attention
    ) -> Tensor:
        """Run the layer on rows that pair token ``x[t + 1 + layer]`` with a hidden state of row t.

        Args:
            embeddings: ``[rows, hidden_size]``.
            hidden: ``[rows, target_hidden_size]``: the target's, or the layer before's output.
            rotary: cosines and sines of the rows' positions t.
            layer: index of this layer, and of its KV storage.
            attention: who sees whom.

        Returns:
            Output before ``final_layernorm``, ``[rows, hidden_size]``.
        """
        pair = (self.enorm(embeddings), self.hnorm(hidden))
        joined = torch.cat(pair if self.embedding_first else pair[::-1], dim=-1)
        out: Tensor = self.body(self.eh_proj(joined), rotary, layer, attention)
        return out


class MtpDraft(nn.Module):
    """All MTP layers of one draft, with the target's embedding and the target's head restricted to the draft vocabulary.

    ``d2t`` (int64 ``[draft_vocab_size]``) holds offsets, as in EAGLE-3 checkpoints: draft id i is target id ``i + d2t[i]``.
    """

    d2t: Tensor

    def __init__(self, description: MtpDescription, d2t: Tensor) -> None:
        super().__init__()
        self.description = description
        self.layers = nn.ModuleList(MtpLayer(description) for _ in range(description.num_layers))
        self.rotary = Rotary(description.body)
        self.register_buffer("d2t", d2t, persistent=False)
        self.embedding: Tensor | None = None
        self.head: Tensor | None = None

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, int64 ``[draft_vocab_size]``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def share(self, target: Decoder) -> None:
        """Take the target's embedding (the same storage) and head (its rows of the draft vocabulary)."""
        self.embedding = target.embed_tokens.weight
        head = target.lm_head.weight
        self.head = head if len(self.d2t) == len(head) else head[self.target_ids].contiguous()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of target token ids, ``[rows, hidden_size]``."""
        return F.embedding(token_ids, _shared(self.embedding))

    def logits(self, layer: int, out: Tensor) -> Tensor:
        """Scores of layer ``layer`` over the draft vocabulary: float32 ``[rows, draft_vocab_size]``."""
        return F.linear(self.layers[layer].final_layernorm(out), _shared(self.head)).float()  # type: ignore[operator]


def _shared(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("MtpDraft.share(target) was not called")
    return tensor
