"""The target: one decoder, described by data."""

import torch
from torch import Tensor, nn

from tiercel.models.description import ModelDescription
from tiercel.models.layers import Attention, DecoderLayer, RMSNorm, Rotary


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm, head.

    ``forward`` gives the hidden state **before** the final norm, because MTP layers read it there; ``logits`` applies the
    final norm and the head, only to the rows that somebody asks for.
    """

    def __init__(self, description: ModelDescription) -> None:
        super().__init__()
        self.description = description
        # Not nn.Embedding(…): its random start takes seconds, and on the meta device it even imports PyTorch's compiler.
        empty = torch.empty(description.vocab_size, description.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(DecoderLayer(description) for _ in range(description.num_layers))
        self.norm = RMSNorm(description.hidden_size, description.rms_norm_eps)
        self.lm_head = nn.Linear(description.hidden_size, description.vocab_size, bias=False)
        if description.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(description)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, found: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Run every layer.

        Args:
            token_ids: int64 ``[rows]``.
            positions: int64 ``[rows]``.
            attention: who sees whom.
            found: if given, gets the hidden state after every number of layers.

        Returns:
            Hidden states before the final norm, ``[rows, hidden_size]``.
        """
        hidden: Tensor = self.embed_tokens(token_ids)
        rotary = self.rotary(positions)
        for index, layer in enumerate(self.layers):
            if found is not None:
                found[index] = hidden
            hidden = layer(hidden, rotary, index, attention)
        if found is not None:
            found[len(self.layers)] = hidden
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states taken before the final norm: ``[rows, hidden_size]`` to float32 ``[rows, vocab_size]``."""
        scores: Tensor = self.lm_head(self.norm(hidden))
        return scores.float()


def empty_decoder(description: ModelDescription, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder whose weights are allocated and not yet set (on ``device``, in ``dtype``), in inference mode."""
    with torch.device("meta"):
        decoder = Decoder(description)
    decoder = decoder.to(dtype).to_empty(device=device)
    if description.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    return decoder.requires_grad_(False).eval()
