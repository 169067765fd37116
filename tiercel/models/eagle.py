"""EAGLE layers (Li et al., 2024): one layer that pairs tokens with hidden states and reads its own output where it drafts on."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tiercel.models.description import ModelDescription
from tiercel.models.step import StepModel


@dataclass(frozen=True, slots=True)
class EagleModel:
    """An EAGLE layer ready to run.

    Args:
        layer: reads rows of (token ``x[t + 1]``, hidden state of row t) at position t; its ``hidden`` is what it reads
            itself, with a draft, in the row after.
        body: its one decoder layer.
        target_ids: the target's ids of those that it can propose, int64 ``[draft_vocab_size]``.
        prepare: the target's hidden states to what the layer pairs with embeddings: ``[rows, …]`` to ``[rows, hidden_size]``.
    """

    layer: StepModel
    body: ModelDescription
    target_ids: Tensor
    prepare: Callable[[Tensor], Tensor]
