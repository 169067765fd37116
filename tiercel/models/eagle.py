"""EAGLE layers: one layer that pairs tokens with hidden states, and reads its own output where it drafts on.

EAGLE and EAGLE-2 (Li et al., 2024) join both in ``fc``, in front of a decoder layer without its first norm, and use the target's
head. EAGLE-3 (Li et al., 2025) joins them in front of its attention, reads hidden states from several depths of the target, fused
by ``fc``, and has a norm and a head of its own over a reduced vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiercel.kvcache.rows import PagedAttention
from tiercel.kvcache.storage import KvStorage
from tiercel.models.description import ModelDescription
from tiercel.models.layers import Attention, AttentionBlock, Mlp, RMSNorm, Rotary
from tiercel.models.native_step import NativeTarget
from tiercel.models.step import EagerTarget, StepInput, StepModel, StepOutput, Target, step_output


@dataclass(frozen=True, slots=True)
class EagleDescription:
    """Sizes and conventions of one EAGLE layer.

    Args:
        is_eagle3: EAGLE-3, or else EAGLE (EAGLE-2 is the same layer).
        body: sizes of its decoder layer; ``vocab_size`` are the tokens it reads.
        target_hidden_size: width of the target's hidden states.
        taps: where EAGLE-3's hidden states are taken: each the number of the target's layers that have run (0: the embedding).
            Empty for EAGLE, which reads the target's hidden state after its final norm.
        draft_vocab_size: tokens that it can propose.
        fc_bias: whether ``fc`` has a bias.
        norm_before_residual: the residual around EAGLE-3's attention is the hidden state after ``hidden_norm``.
        norm_output: what EAGLE-3 reads of its own output is taken after its final norm.
        owns_embedding: it has an embedding of its own; else it shares the target's.
        owns_head: likewise its head.
    """

    is_eagle3: bool
    body: ModelDescription
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    owns_embedding: bool = False
    owns_head: bool = False


@dataclass(frozen=True, slots=True)
class EagleModel:
    """An EAGLE layer ready to run.

    Args:
        layer: reads rows of (token ``x[t + 1]``, hidden state of row t) at position t; its ``hidden`` is what it reads
            itself, with a draft, in the row after.
        body: its one decoder layer.
        target_ids: the target's ids of those that it can propose, int64 ``[draft_vocab_size]``.
        prepare: the target's hidden states to what the layer pairs with embeddings: ``[rows, …]`` to ``[rows, hidden_size]``.
        taps: see ``EagleDescription``; empty: the target's last hidden state, before its final norm.
    """

    layer: StepModel
    body: ModelDescription
    target_ids: Tensor
    prepare: Callable[[Tensor], Tensor]
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a draft may share with its target, however that runs.

    Args:
        embed: int64 ``[rows]`` to ``[rows, hidden_size]``.
        norm: the final norm.
        head: normed ``[rows, hidden_size]`` to ``[rows, vocab_size]``.
    """

    embed: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


def target_parts(target: Target) -> TargetParts:
    """Embedding, final norm and head of ``target``."""
    if isinstance(target, EagerTarget):
        return TargetParts(target.decoder.embed_tokens, target.decoder.norm, target.decoder.lm_head)
    assert isinstance(target, NativeTarget)
    embedding, model, weight = target.embedding, target.model, torch.from_numpy(target.model.norm)

    def embed(token_ids: Tensor) -> Tensor:
        return torch.stack([torch.from_numpy(embedding.row(token)) for token in token_ids.tolist()])

    def norm(hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, model.shape.eps)

    def head(hidden: Tensor) -> Tensor:
        if not len(hidden):
            return hidden.new_empty(0, model.head.rows)
        return torch.from_numpy(model.head.apply(hidden.numpy(), torch.get_num_threads(), model.bits))

    return TargetParts(embed, norm, head)


class EagleLayer(nn.Module):
    """The decoder layer of an EAGLE head."""

    def __init__(self, description: EagleDescription) -> None:
        super().__init__()
        body = description.body
        size, eps = body.hidden_size, body.rms_norm_eps
        self.norm_before_residual = description.norm_before_residual
        self.joins = description.is_eagle3
        if self.joins:
            self.input_layernorm = RMSNorm(size, eps)
            self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = AttentionBlock(body, 2 * size if self.joins else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = Mlp(body)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """``hidden`` is ``[rows, hidden_size]``; so is the result. Only EAGLE-3 reads ``embeddings`` here."""
        seen = hidden
        if self.joins:
            normed = self.hidden_norm(hidden)
            seen = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
            hidden = normed if self.norm_before_residual else hidden
        hidden = hidden + self.self_attn(seen, rotary, 0, attention)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleHead(nn.Module):
    """An EAGLE head: ``fc``, the layer, and what it does not share with the target."""

    def __init__(self, description: EagleDescription) -> None:
        super().__init__()
        self.description = description
        body = description.body
        joined = (
            len(description.taps) * description.target_hidden_size if description.is_eagle3 else 2 * body.hidden_size
        )
        self.fc = nn.Linear(joined, body.hidden_size, bias=description.fc_bias)
        self.layer = EagleLayer(description)
        self.norm = RMSNorm(body.hidden_size, body.rms_norm_eps) if description.is_eagle3 else None
        if description.owns_embedding:
            empty = torch.empty(body.vocab_size, body.hidden_size)
            self.embed_tokens = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        if description.owns_head:
            self.lm_head = nn.Linear(body.hidden_size, description.draft_vocab_size, bias=False)
        self.rotary = Rotary(body)

    def share(self, parts: TargetParts) -> None:
        """Take from the target what the checkpoint does not hold."""
        self.embed = self.embed_tokens if self.description.owns_embedding else parts.embed
        self.head = self.lm_head if self.description.owns_head else parts.head
        self.target_norm = parts.norm

    def prepare(self, target_hidden: Tensor) -> Tensor:
        """See ``EagleModel.prepare``."""
        found: Tensor = self.fc(target_hidden) if self.description.is_eagle3 else self.target_norm(target_hidden)
        return found

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            token_ids: int64 ``[rows]``.
            hidden: what is paired with them: ``prepare``'s, or the layer's own of the row before. ``[rows, hidden_size]``.
            positions: int64 ``[rows]``.
            attention: who sees whom.

        Returns:
            What the layer reads itself, and what the head reads: each ``[rows, hidden_size]``.
        """
        embeddings, rotary = self.embed(token_ids), self.rotary(positions)
        if self.norm is None:
            out = self.layer(embeddings, self.fc(torch.cat((embeddings, hidden), dim=-1)), rotary, attention)
            return out, out
        out = self.layer(embeddings, hidden, rotary, attention)
        normed = self.norm(out)
        return (normed if self.description.norm_output else out), normed


class EagerEagle:
    """An EAGLE head as PyTorch modules."""

    is_graph: ClassVar[bool] = False

    def __init__(self, head: EagleHead) -> None:
        self.head = head

    @torch.inference_mode()
    def run(self, step: StepInput, storages: list[KvStorage]) -> StepOutput:
        """See ``StepModel``."""
        body = self.head.description.body
        attention = PagedAttention(step.rows, storages, body.num_heads // body.num_kv_heads)
        assert step.target_hidden is not None
        own, normed = self.head(step.token_ids, step.target_hidden, step.rows.positions, attention)
        return step_output(step, own, self.head.head(normed[step.wanted]).float())

    @torch.inference_mode()
    def prepare(self, target_hidden: Tensor) -> Tensor:
        """See ``EagleModel.prepare``."""
        return self.head.prepare(target_hidden)
