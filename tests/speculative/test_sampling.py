import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tiercel.core.sampling_params import SamplingParams
from tiercel.models.step import best_ids
from tiercel.speculative.sampling import GumbelNoise, RowSampling, choose, filtered_logits

MODES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.3, top_k=3, top_p=0.9),
]


@pytest.mark.parametrize("params", MODES)
def test_filters_equal_transformers(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(50, generator=generator) * 3
        scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
        if params.top_k:
            scores = TopKLogitsWarper(params.top_k)(None, scores)
        if params.top_p < 1:
            scores = TopPLogitsWarper(params.top_p)(None, scores)
        torch.testing.assert_close(filtered_logits(logits, params), scores[0])


def chosen(
    logits: torch.Tensor, rows: list[RowSampling], noise: GumbelNoise, ids: torch.Tensor | None = None
) -> torch.Tensor:
    return choose(best_ids(logits), logits, rows, noise, ids)


@pytest.mark.parametrize("params", MODES)
def test_a_draw_follows_the_softmax(params: SamplingParams) -> None:
    logits = torch.tensor([1.0, 0.3, -0.5, 0.9])
    noise, trials = GumbelNoise(4), 20_000
    rows = [RowSampling(params, seed, 7) for seed in range(trials)]
    drawn = chosen(logits.expand(trials, 4), rows, noise)
    share = np.bincount(drawn.numpy(), minlength=4) / trials
    expected = filtered_logits(logits, params).softmax(-1).numpy()
    assert np.abs(share - expected).sum() / 2 < 0.02
    assert (share[expected == 0] == 0).all()


def test_the_likeliest_token_survives_any_top_p() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0])
    assert filtered_logits(logits, SamplingParams(temperature=1.0, top_p=1e-50)).isfinite().tolist() == [
        False,
        True,
        False,
    ]


def test_greedy_is_the_argmax_and_nan_is_marked() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, torch.nan, 1.0]])
    greedy = RowSampling(SamplingParams(), 0, 0)
    assert chosen(logits, [greedy, greedy], GumbelNoise(3)).tolist() == [1, -1]
    warm = RowSampling(SamplingParams(temperature=1.0), 0, 0)
    assert chosen(logits, [warm, warm], GumbelNoise(3)).tolist()[1] == -1


def test_noise_belongs_to_seed_and_position_alone() -> None:
    one, other = GumbelNoise(100), GumbelNoise(100)
    first = one.row(5, 9).clone()
    for position in range(400):  # push it out of the kept rows
        one.row(6, position)
    assert torch.equal(one.row(5, 9), first)
    assert torch.equal(other.row(5, 9), first)
    assert not torch.equal(one.row(5, 10), first)
    assert not torch.equal(one.row(9, 5), first)
    assert torch.isfinite(one.row(2**64 - 1, 0)).all()


def test_a_reduced_vocabulary_shares_the_noise_of_the_full_one() -> None:
    noise, ids = GumbelNoise(10), torch.tensor([1, 4, 7])
    params = SamplingParams(temperature=1.0)
    full = torch.full((1, 10), -torch.inf)
    full[0, ids] = torch.tensor([0.2, 0.1, 0.3])
    for seed in range(200):
        row = [RowSampling(params, seed, 3)]
        assert chosen(full[:, ids], row, noise, ids).tolist() == chosen(full, row, noise).tolist()
