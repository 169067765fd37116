import pytest
import torch
from torch.nn import functional as F

from tests.conftest import echoing_draft, random_draft
from tiercel.engine.engine import LoadedTarget
from tiercel.models.attention import DenseAttention
from tiercel.train import objective
from tiercel.train.data import Conversation
from tiercel.train.objective import DistilledCrossEntropy, draft_outputs, layer_losses, measure


def test_the_fused_loss_and_its_gradient_equal_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CHUNK", 4)
    torch.manual_seed(0)
    student, teacher, head, weight = torch.randn(11, 8), torch.randn(11, 8), torch.randn(30, 8), torch.rand(11)
    ours, plain = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss, agree = DistilledCrossEntropy.apply(ours, teacher, head, weight)
    (3 * loss).backward()
    p = F.linear(teacher, head).softmax(-1)
    scores = F.linear(plain, head)
    expected = (F.cross_entropy(scores, p, reduction="none") * weight).sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad)
    assert torch.equal(agree, scores.argmax(-1) == F.linear(teacher, head).argmax(-1))


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
    losses = layer_losses(draft, toy_target.model.decoder, ids, hidden, weights)
    for i, out in enumerate(draft_outputs(draft, ids, hidden)):
        row = 12 + 7 - 2 - i
        q = draft.logits(i, out[row]).log_softmax(-1)
        teacher = toy_target.model.decoder.norm(hidden[1, 6]).detach()
        assert draft.head is not None
        p = F.linear(teacher, draft.head).softmax(-1)
        assert losses.cross_entropy[i] == pytest.approx(float(-(p * q).sum().detach()), rel=1e-4)
    losses.total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.layers.parameters())
