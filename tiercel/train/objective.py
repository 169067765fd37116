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
CHUNK = 128
"""Rows per slice of the head."""
LIKELY = 1e-3
"""A token that the teacher gives more than this, anywhere in a slice, takes part in the slice's scores."""
SAMPLED_SHARE = 0.1
"""Of the other tokens so many are drawn, and stand for all of them."""


class DistilledCrossEntropy(torch.autograd.Function):
    """Σ over rows of weight · cross-entropy(teacher ‖ student), for all layers of a draft, through one frozen head.

    The student's scores exist for ``CHUNK`` rows at a time, and only for likely tokens and a sample of the rest, which counts
    for all of the rest (sampled softmax: Bengio and Senécal, 2008); the gradient of the student's row is formed on the spot.
    """

    @staticmethod
    def forward(
        ctx: Any,
        students: Tensor,
        teacher: Tensor,
        head: Tensor,
        weights: Tensor,
        share: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses and the students' gradient.

        Args:
            ctx: autograd's.
            students: ``[rows, layers, hidden]``, normed.
            teacher: ``[rows, hidden]``, normed.
            head: ``[vocab, hidden]``.
            weights: float32 ``[rows, layers]``.
            share: of the unlikely tokens that are drawn; 1 takes every token, and the loss is exact.
            generator: draws them.

        Returns:
            Losses (float32 ``[layers]``) and whether the two argmaxes, among the tokens taken, agree (bool ``[rows, layers]``, no
            gradient).
        """
        losses = torch.zeros(students.shape[1])
        gradient = torch.empty_like(students)
        agree = torch.empty(weights.shape, dtype=torch.bool)
        for start in range(0, len(teacher), CHUNK):
            part = slice(start, start + CHUNK)
            p = F.linear(teacher[part], head).float().softmax(-1)
            ids, counts_for = _taken(p, share, generator)
            p, rows = (p[:, ids] * counts_for).unsqueeze(1), head[ids]
            log_q = (F.linear(students[part], rows).float() + counts_for.log()).log_softmax(-1)
            agree[part] = p.div(counts_for).argmax(-1) == log_q.sub(counts_for.log()).argmax(-1)
            losses -= ((p * (log_q - counts_for.log())).sum(-1) * weights[part]).sum(0)
            pull = (log_q.exp_().mul_(p.sum(-1, keepdim=True)) - p) * weights[part].unsqueeze(-1)
            gradient[part] = pull.to(head.dtype) @ rows
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agree)
        return losses, agree

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor, _: Any) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_losses.to(gradient.dtype)[:, None], None, None, None, None, None


def _taken(p: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens that take part, and how many tokens each stands for: int64 and float32 ``[taken]``."""
    likely = p.amax(0) > LIKELY
    drawn = torch.rand(len(likely), generator=generator) < share
    ids = (likely | drawn).nonzero().squeeze(1)
    return ids, torch.where(likely[ids], 1.0, 1 / share)


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


def layer_losses(
    draft: MtpDraft,
    target: Decoder,
    token_ids: Tensor,
    hidden: Tensor,
    weights: Tensor,
    generator: torch.Generator,
    share: float = SAMPLED_SHARE,
) -> LayerLosses:
    """Loss of one batch.

    Args:
        draft: the layers in training.
        target: frozen; its norm turns hidden states into the teacher's.
        token_ids: int64 ``[batch, length]``.
        hidden: the target's hidden states before its final norm, ``[batch, length, hidden_size]``.
        weights: float32 ``[batch, length]``: how much the prediction **of** the token at each position counts.
        generator: see ``DistilledCrossEntropy``.
        share: see ``DistilledCrossEntropy``.
    """
    assert draft.head is not None
    # x[t + 2 + i] is predicted by row t of layer i, and by row t + 1 + i of the target.
    texts, columns = weights[:, 2:].nonzero(as_tuple=True)
    teacher = target.norm(hidden.to(target.norm.weight.dtype))[texts, columns + 1].to(draft.head.dtype)
    outputs = draft_outputs(draft, token_ids, hidden)
    students = torch.stack(
        [
            draft.layers[i].final_layernorm(out.view(*token_ids.shape, -1)[texts, (columns - i).clamp(min=0)])  # type: ignore[operator]
            for i, out in enumerate(outputs)
        ],
        dim=1,
    ).to(draft.head.dtype)
    is_there = columns[:, None] >= torch.arange(len(outputs))
    counted = weights[texts, columns + 2].unsqueeze(1) * is_there
    entropies, agree = _distilled(students, teacher, draft.head, counted, share, generator)
    distance = F.smooth_l1_loss(students.float(), teacher.float().unsqueeze(1).expand_as(students), reduction="none")
    mass = counted.sum(0).clamp(min=torch.finfo(torch.float32).tiny)  # texts too short for a layer: nothing, not NaN
    losses = (entropies + REGRESSION_WEIGHT * (distance.mean(-1) * counted).sum(0)) / mass
    scale = torch.tensor([POSITION_WEIGHTS[min(i, len(POSITION_WEIGHTS) - 1)] for i in range(len(outputs))])
    return LayerLosses(
        (losses * scale).sum(), (entropies.detach() / mass).tolist(), ((agree * counted).sum(0) / mass).tolist()
    )


def _distilled(*args: Any) -> tuple[Tensor, Tensor]:
    losses, agree = DistilledCrossEntropy.apply(*args)  # type: ignore[no-untyped-call]
    return losses, agree


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
