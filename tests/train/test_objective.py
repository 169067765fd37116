import pytest
import torch
from torch.nn import functional as F

from tests.conftest import echoing_draft, random_draft
from tiercel.engine.engine import LoadedTarget
from tiercel.models.attention import DenseAttention
from tiercel.train import objective
from tiercel.train.data import Conversation
from tiercel.train.objective import DistilledCrossEntropy, draft_outputs, layer_losses, measure


def exact_loss(
    students: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    p = F.linear(teacher, head).softmax(-1)
    entropies = [F.cross_entropy(F.linear(students[:, i], head), p, reduction="none") for i in range(students.shape[1])]
    return (torch.stack(entropies, dim=1) * weights).sum(0)


def test_the_fused_loss_and_its_gradient_equal_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    students, teacher, head, weights = torch.randn(11, 2, 8), torch.randn(11, 8), torch.randn(30, 8), torch.rand(11, 2)
    ours, plain = students.clone().requires_grad_(), students.clone().requires_grad_()
    losses, agree = DistilledCrossEntropy.apply(ours, teacher, head, weights, 1.0, generator)
    scale = torch.tensor([3.0, 0.5])
    (scale * losses).sum().backward()
    expected = exact_loss(plain, teacher, head, weights)
    (scale * expected).sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(ours.grad, plain.grad)
    assert torch.equal(agree, F.linear(plain, head).argmax(-1) == F.linear(teacher, head).argmax(-1).unsqueeze(1))


def test_a_sample_of_the_unlikely_tokens_stands_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "LIKELY", 0.02)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    students, teacher, head, weights = (
        torch.randn(6, 2, 8),
        torch.randn(6, 8),
        0.7 * torch.randn(400, 8),
        torch.ones(6, 2),
    )
    plain = students.clone().requires_grad_()
    expected = exact_loss(plain, teacher, head, weights)
    expected.sum().backward()
    losses, gradients = [], []
    for _ in range(300):
        ours = students.clone().requires_grad_()
        loss, _ = DistilledCrossEntropy.apply(ours, teacher, head, weights, 0.5, generator)
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append(ours.grad)
    torch.testing.assert_close(torch.stack(losses).mean(0), expected.detach(), rtol=0.03, atol=0)
    assert plain.grad is not None
    error = (torch.stack(gradients).mean(0) - plain.grad).norm() / plain.grad.norm()
    assert error < 0.08
    assert torch.stack(losses).std(0).min() > 0  # it did draw


@torch.inference_mode()
def greedy(target: LoadedTarget, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        hidden = target.model.decoder(torch.tensor(ids), torch.arange(len(ids)), DenseAttention(1))
        ids.append(int(target.model.decoder.logits(hidden[-1:]).argmax()))
    return ids


def test_the_walk_counts_what_serving_counts(toy_target: LoadedTarget) -> None:
    """Acceptance measured on a finished answer equals that of the engine producing it."""
    from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
    from tiercel.core.sampling_params import SamplingParams
    from tiercel.engine.engine import Engine
    from tiercel.models.step import eager_draft
    from tiercel.speculative import registry
    from tiercel.speculative.multi_layer_eagle_worker import MultiLayerEagleWorker

    draft = echoing_draft(toy_target)
    registry.WORKERS["probe"] = lambda context: MultiLayerEagleWorker(context.target, eager_draft(draft), 3)
    try:
        object.__setattr__(spec := SpecConfig(method="none"), "method", "probe")
        engine = Engine(EngineConfig(), spec, TraceConfig(), toy_target)
    finally:
        del registry.WORKERS["probe"]
    prompts = [[7, 30, 99], [14] * 9, [1, 2, 3, 4], [200, 100]]
    wish = SamplingParams(max_tokens=41, ignore_eos=True)
    reqs = [engine.add_request(str(i), p, wish) for i, p in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    answers = [Conversation((*p, *r.output_token_ids), len(p), True) for p, r in zip(prompts, reqs, strict=True)]
    with torch.inference_mode():
        hidden = [
            toy_target.model.decoder(torch.tensor(c.token_ids), torch.arange(len(c)), DenseAttention(1))
            for c in answers
        ]
    found = measure(draft, answers, hidden)
    served = sum(sum(r.spec.correct) for r in reqs)
    assert served > 0
    # The engine proposes fewer drafts near max_tokens, where the walk also finds no token to compare with.
    assert (found.rounds, sum(found.correct)) == (sum(r.spec.num_rounds for r in reqs), served)


def test_losses_weigh_each_row_by_the_token_it_predicts(toy_target: LoadedTarget) -> None:
    draft = random_draft(toy_target)
    draft.requires_grad_(True)
    ids = torch.randint(0, 250, (2, 12))
    with torch.inference_mode():
        hidden = toy_target.model.decoder(ids.flatten(), torch.arange(12).repeat(2), DenseAttention(2)).view(2, 12, -1)
    hidden = hidden.clone()
    weights = torch.zeros(2, 12)
    weights[1, 7] = 1.0  # only the prediction of token 7 of the second text counts
    losses = layer_losses(draft, toy_target.model.decoder, ids, hidden, weights, torch.Generator(), share=1.0)
    for i, out in enumerate(draft_outputs(draft, ids, hidden)):
        row = 12 + 7 - 2 - i
        q = draft.logits(i, out[row]).log_softmax(-1)
        teacher = toy_target.model.decoder.norm(hidden[1, 6]).detach()
        assert draft.head is not None
        p = F.linear(teacher, draft.head).softmax(-1)
        assert losses.cross_entropy[i] == pytest.approx(float(-(p * q).sum().detach()), rel=1e-4)
    losses.total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.layers.parameters())
