"""One forward over rows, whoever computes it: what goes in, what comes out, and the eager implementation."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from tiercel.kvcache.rows import PagedAttention, Rows
from tiercel.kvcache.storage import KvStorage
from tiercel.models.decoder import Decoder
from tiercel.models.description import ModelDescription, MtpDescription
from tiercel.models.mtp import MtpDraft


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one forward reads.

    Args:
        rows: whose rows, at which positions, in which KV slots.
        token_ids: int64 ``[rows]``.
        wanted: rows whose next token is asked for, int64 ``[wanted]``.
        with_logits: whether all logits of those rows are needed, or the argmax does.
        target_hidden: what an MTP layer pairs with its embeddings: ``[rows, target_hidden_size]``.
        with_confidence: whether the probability of each argmax is needed.
        taps: of a target, where hidden states are wanted beside the last ones: each the number of layers that have run.
    """

    rows: Rows
    token_ids: Tensor
    wanted: Tensor
    with_logits: bool = False
    target_hidden: Tensor | None = None
    with_confidence: bool = False
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward gives.

    ``hidden`` is ``[rows, hidden_size]``, before the final norm. ``best`` (int64 ``[wanted]``) is the argmax of each wanted
    row's logits as an index into the head's vocabulary, -1 where a logit is NaN. ``logits`` is float32 ``[wanted, vocab]``, or
    None where nobody asked; so is ``confidence``, the softmax's probability of ``best`` (float32 ``[wanted]``, 0 beside -1).
    ``tapped`` is ``[rows, taps * hidden_size]``: the hidden states at the taps side by side.
    """

    hidden: Tensor
    best: Tensor
    logits: Tensor | None
    confidence: Tensor | None = None
    tapped: Tensor | None = None


class StepModel(Protocol):
    """A target, or one MTP layer, that can play a step."""

    is_graph: ClassVar[bool]
    """Whether a step is the replay of a recorded program rather than a walk through the modules."""

    def run(self, step: StepInput, storages: list[KvStorage]) -> StepOutput:
        """Play one step; the rows' keys and values go into ``storages`` (one per layer)."""
        ...


class Target(StepModel, Protocol):
    """A whole target."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """What suits it for keys and values."""
        ...


class DraftTokens(NamedTuple):
    """What MTP layers proposed: target ids int64 ``[depth, requests]``, each one's probability in its layer's own eyes (float32,
    same shape), and when each layer ended (``perf_counter_ns``).
    """

    token_ids: Tensor
    confidence: Tensor
    end_ns: list[int]


class DraftChain(Protocol):
    """MTP layers that run one after the other in one call, each proposing greedily what the next one reads."""

    def __call__(
        self,
        rows: Rows,
        token_ids: Tensor,
        last: Tensor,
        known: Tensor,
        target_hidden: Tensor,
        storages: list[list[KvStorage]],
    ) -> DraftTokens:
        """Run as many layers as ``known`` has rows.

        Args:
            rows: whose rows.
            token_ids: int64 ``[rows]``: x[t] of every row; layer i reads x[t + 1 + i].
            last: each request's last row, int64 ``[requests]``.
            known: int64 ``[depth, requests]``: the token that layer i reads in a request's last row, -1 where it is
                the draft of the layer before.
            target_hidden: ``[rows, target_hidden_size]``.
            storages: of each layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft ready to run.

    ``layers[i]`` is MTP layer i; ``target_ids`` (int64 ``[draft_vocab_size]``) are the target's ids of the draft's;
    ``chain`` runs the layers in one call where that is possible.
    """

    description: MtpDescription
    layers: list[StepModel]
    target_ids: Tensor
    chain: DraftChain | None = None


class EagerTarget:
    """The target as PyTorch modules: the reference that recorded steps are tested against, and what a GPU runs."""

    is_graph: ClassVar[bool] = False

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.description = decoder, decoder.description
        self.kv_dtype = decoder.norm.weight.dtype

    @torch.inference_mode()
    def run(self, step: StepInput, storages: list[KvStorage]) -> StepOutput:
        """See ``StepModel``."""
        attention = PagedAttention(step.rows, storages, self.description.num_heads // self.description.num_kv_heads)
        found: dict[int, Tensor] = {}
        hidden = self.decoder(step.token_ids, step.rows.positions, attention, found if step.taps else None)
        tapped = torch.cat([found[tap] for tap in step.taps], dim=-1) if step.taps else None
        return step_output(step, hidden, self.decoder.logits(hidden[step.wanted]), tapped)


class EagerMtpLayer:
    """One MTP layer as PyTorch modules."""

    is_graph: ClassVar[bool] = False

    def __init__(self, draft: MtpDraft, index: int) -> None:
        self.draft, self.index = draft, index

    @torch.inference_mode()
    def run(self, step: StepInput, storages: list[KvStorage]) -> StepOutput:
        """See ``StepModel``."""
        body = self.draft.description.body
        attention = PagedAttention(step.rows, storages, body.num_heads // body.num_kv_heads)
        rotary, embeddings = self.draft.rotary(step.rows.positions), self.draft.embed(step.token_ids)
        hidden = self.draft.layers[self.index](embeddings, step.target_hidden, rotary, 0, attention)
        return step_output(step, hidden, self.draft.logits(self.index, hidden[step.wanted]))


def eager_draft(draft: MtpDraft) -> DraftModel:
    """``draft`` as modules."""
    layers: list[StepModel] = [EagerMtpLayer(draft, i) for i in range(draft.description.num_layers)]
    return DraftModel(draft.description, layers, draft.target_ids)


def step_output(step: StepInput, hidden: Tensor, logits: Tensor, tapped: Tensor | None = None) -> StepOutput:
    """The output that modules give, from hidden states and the wanted rows' logits."""
    confidence = logits.softmax(-1).amax(-1).nan_to_num(0.0) if step.with_confidence else None
    return StepOutput(hidden, best_ids(logits), logits, confidence, tapped)


def best_ids(logits: Tensor) -> Tensor:
    """Argmax of each row, -1 where it holds NaN: float32 ``[rows, vocab]`` to int64 ``[rows]``."""
    best, ids = logits.max(dim=-1)
    return torch.where(best.isnan(), -1, ids)
