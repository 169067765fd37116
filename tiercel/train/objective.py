"""What the MTP layers learn, and how well they know it: the loss per layer, and acceptance along real answers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tiercel.models.attention import DenseAttention
from tiercel.models.decoder import Decoder
from tiercel.models.mtp import MtpDraft
from tiercel.train.data import Conversation

POSITION_WEIGHTS = (1.0, 0.6, 0.4)
"""Loss weight of layer i; layers beyond the table take its last entry. Early drafts decide whether later ones count."""
REGRESSION_WEIGHT = 0.5
CHUNK = 256
"""Rows per slice of the head: the scores of one slice stay in the CPU's cache."""


class DistilledCrossEntropy(torch.autograd.Function):
    """Σ over rows of weight · cross-entropy(teacher ‖ student), both through the same frozen head.

    Scores exist for ``CHUNK`` rows at a time: the gradient of the student's row is formed on the spot.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Student and teacher ``[rows, hidden]`` (normed), head ``[vocab, hidden]``, weight float32 ``[rows]``.

        Returns:
            The loss (float32 scalar) and, per row, whether the two argmaxes agree (bool ``[rows]``, no gradient).
        """
        loss = torch.zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        agree = torch.empty(len(student), dtype=torch.bool)
        for start in range(0, len(student), CHUNK):
            part = slice(start, start + CHUNK)
            wanted = F.linear(teacher[part], head).float()
            scores = F.linear(student[part], head).float()
            agree[part] = wanted.argmax(-1) == scores.argmax(-1)
            log_q = scores.log_softmax(-1)
            p = wanted.softmax(-1)
            loss -= ((p * log_q).sum(-1) * weight[part]).sum()
            gradient[part] = ((log_q.exp_() - p) * weight[part, None]).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agree)
        return loss, agree

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None


def _distilled(student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    loss, agree = DistilledCrossEntropy.apply(student, teacher, head, weight)  # type: ignore[no-untyped-call]
    return loss, agree


@dataclass(slots=True)
class LayerLosses:
    """One batch: the loss to minimise, and per layer its cross-entropy and top-1 agreement with the target."""

    total: Tensor
    cross_entropy: list[float]
    agreement: list[float]


def draft_outputs(draft: MtpDraft, token_ids: Tensor, hidden: Tensor) -> list[Tensor]:
    """Teacher-forced, chained (or not) outputs of every layer: each ``[batch * length, hidden_size]``, before its norm.

    Row t of layer i reads token ``x[t + 1 + i]``; rows whose token would lie past the end hold nothing of use.
    """
    batch, length = token_ids.shape
    rotary = draft.rotary(torch.arange(length, device=token_ids.device).repeat(batch))
    state, outputs = hidden.flatten(0, 1), []
    for index, layer in enumerate(draft.layers):
        embeddings = draft.embed(token_ids.roll(-1 - index, dims=1).flatten())
        inputs = state if draft.description.chained else hidden.flatten(0, 1)
        state = layer(embeddings, inputs, rotary, index, DenseAttention(batch))
        outputs.append(state)
    return outputs


def layer_losses(draft: MtpDraft, target: Decoder, token_ids: Tensor, hidden: Tensor, weights: Tensor) -> LayerLosses:
    """Loss of one batch.

    Args:
        draft: the layers in training.
        target: frozen; its norm turns hidden states into the teacher's.
        token_ids: int64 ``[batch, length]``.
        hidden: the target's hidden states before its final norm, ``[batch, length, hidden_size]``.
        weights: float32 ``[batch, length]``: how much the prediction **of** the token at each position counts.
    """
    teacher_states = target.norm(hidden.to(target.norm.weight.dtype))
    total, entropies, agreements = torch.zeros(()), [], []
    for index, out in enumerate(draft_outputs(draft, token_ids, hidden)):
        # Row t predicts x[t + 2 + index], which the target predicts from its row t + 1 + index.
        counted = weights[:, 2 + index :]
        rows, columns = counted.nonzero(as_tuple=True)
        weight = counted[rows, columns]
        mass = weight.sum().clamp(
            min=torch.finfo(torch.float32).tiny
        )  # texts too short for this layer: nothing, not NaN
        teacher = teacher_states[rows, columns + 1 + index]
        student = draft.layers[index].final_layernorm(out.view(*token_ids.shape, -1)[rows, columns])  # type: ignore[operator]
        head = draft.head
        assert head is not None
        entropy, agree = _distilled(student.to(head.dtype), teacher.to(head.dtype), head, weight)
        distance = F.smooth_l1_loss(student.float(), teacher.float(), reduction="none").mean(-1)
        scale = POSITION_WEIGHTS[min(index, len(POSITION_WEIGHTS) - 1)] / mass
        total = total + scale * (entropy + REGRESSION_WEIGHT * (distance * weight).sum())
        entropies.append(float(entropy.detach() / mass))
        agreements.append(float((agree * weight).sum() / mass))
    return LayerLosses(total, entropies, agreements)


@dataclass(slots=True)
class Acceptance:
    """Teacher-forced acceptance of greedy answers, walked round by round as serving would.

    ``rounds`` verify rounds; ``correct[i]`` of them had all of the drafts 0..i right; ``accurate[i]`` of ``rows`` answer
    positions were predicted by layer i, whatever the drafts before said.
    """

    rounds: int
    correct: list[int]
    rows: int
    accurate: list[int]

    @property
    def length(self) -> float:
        """Acceptance length: 1 + Σ correct / rounds."""
        return 1 + sum(self.correct) / self.rounds

    @property
    def position(self) -> list[float]:
        """Unconditional acceptance of position i."""
        return [c / self.rounds for c in self.correct]

    @property
    def accuracy(self) -> list[float]:
        """Share of answer positions that layer i predicted."""
        return [a / self.rows for a in self.accurate]


@torch.inference_mode()
def measure(draft: MtpDraft, conversations: list[Conversation], hidden: list[Tensor]) -> Acceptance:
    """Walk greedy answers: ``hidden[j]`` is ``[length, hidden_size]`` of conversation j."""
    depth = len(draft.layers)
    found = Acceptance(0, [0] * depth, 0, [0] * depth)
    for conversation, states in zip(conversations, hidden, strict=True):
        token_ids = torch.tensor([conversation.token_ids], device=states.device)
        outputs = draft_outputs(draft, token_ids, states.unsqueeze(0))
        picks = [draft.target_ids[draft.logits(i, out).argmax(-1)].tolist() for i, out in enumerate(outputs)]
        _walk(conversation, picks, found)
    return found


def _walk(conversation: Conversation, picks: list[list[int]], found: Acceptance) -> None:
    ids, depth = conversation.token_ids, len(picks)
    hits = [
        [row + 2 + i < len(ids) and picks[i][row] == ids[row + 2 + i] for row in range(len(ids))] for i in range(depth)
    ]
    first = conversation.answer_start - 1  # the row whose "next token" is the first answer token
    for i in range(depth):
        found.accurate[i] += sum(hits[i][first : len(ids) - 2 - depth])
    found.rows += max(0, len(ids) - 2 - depth - first)
    row = first
    while row + 2 < len(ids):
        correct = next((i for i in range(depth) if not hits[i][row]), depth)
        found.rounds += 1
        for i in range(correct):
            found.correct[i] += 1
        row += correct + 1
