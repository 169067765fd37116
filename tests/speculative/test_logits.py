from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.models.step import best_ids
from tiercel.speculative.logits.adjust import adjusted_draft_logits, adjusted_logits
from tiercel.speculative.logits.choose import choose
from tiercel.speculative.logits.filters import filtered_logits
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling, TextBefore

MODES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.3, top_k=3, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=1.0, typical_p=0.4),
    SamplingParams(temperature=1.2, top_k=3, top_p=0.95, min_p=0.1, typical_p=0.8),
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
        if params.min_p:
            scores = MinPLogitsWarper(params.min_p)(None, scores)
        if params.typical_p < 1:
            scores = TypicalLogitsWarper(params.typical_p)(None, scores)
        torch.testing.assert_close(filtered_logits(logits, params), scores[0])


def chosen(
    logits: torch.Tensor, rows: list[RowSampling], noise: GumbelNoise, ids: torch.Tensor | None = None
) -> torch.Tensor:
    return choose(best_ids(logits), logits, rows, noise, ids)


@pytest.mark.parametrize("params", MODES)
def test_a_draw_follows_the_softmax(params: SamplingParams) -> None:
    logits = torch.tensor([1.0, 0.3, -0.5, 0.9])
    noise, trials = GumbelNoise(4), 10_000
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


PROMPT, OUTPUT = [3, 9, 9, 21], [5, 9, 5, 30, 5]
BAD = [(7,), (30, 5, 11), (5, 5, 12), (40, 41)]


def adjusted(logits: torch.Tensor, output: list[int], **wishes: Any) -> torch.Tensor:
    before = TextBefore([*PROMPT, *output], len(PROMPT), BAD if wishes.pop("bad", False) else (), frozenset({2, 8}))
    return adjusted_logits(logits, RowSampling(SamplingParams(**wishes), 0, 9, before))


REFERENCES: list[tuple[dict[str, Any], LogitsProcessor]] = [
    ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
    ({"repetition_penalty": 0.6}, RepetitionPenaltyLogitsProcessor(0.6)),
    ({"logit_bias": {4: 2.5, 30: -100.0}}, SequenceBiasLogitsProcessor({(4,): 2.5, (30,): -100.0})),
    ({"bad": True}, NoBadWordsLogitsProcessor([list(word) for word in BAD])),
    ({"min_tokens": 5}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [2, 8])),
    ({"min_tokens": 6}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [2, 8])),
]


@pytest.mark.parametrize(("wishes", "reference"), REFERENCES)
def test_adjustments_equal_transformers(wishes: dict[str, Any], reference: LogitsProcessor) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(50, generator=generator) * 3
        kept = logits.clone()
        expected = reference(torch.tensor([[*PROMPT, *OUTPUT]]), logits[None].clone())[0]
        torch.testing.assert_close(adjusted(logits, OUTPUT, **wishes), expected)
        assert torch.equal(logits, kept)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """By OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    logits = torch.randn(50)
    ours = adjusted(logits, OUTPUT, presence_penalty=0.5, frequency_penalty=0.25)
    for token in range(50):
        count = OUTPUT.count(token)
        assert ours[token].item() == pytest.approx(logits[token].item() - count * 0.25 - (count > 0) * 0.5, abs=1e-6)


def test_nothing_brings_a_forbidden_token_back() -> None:
    def all_to_seven(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert token_ids == [*PROMPT, *OUTPUT]
        return torch.full_like(logits, -5.0).index_fill(0, torch.tensor(7), 9.0)

    before = TextBefore([*PROMPT, *OUTPUT], len(PROMPT), BAD, processors=[all_to_seven])
    params = SamplingParams(logit_bias={7: 100}, allowed_token_ids=[7, 14, 3])
    left = adjusted_logits(torch.randn(50), RowSampling(params, 0, 9, before))
    assert left.isfinite().nonzero().flatten().tolist() == [3, 14]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_forbidden_is_marked(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[2], min_tokens=9, typical_p=0.5, top_p=0.5)
    row = RowSampling(params, 0, 9, TextBefore(PROMPT, len(PROMPT), ending_ids=frozenset({2})))
    assert chosen(torch.randn(1, 50), [row], GumbelNoise(50)).tolist() == [-1]


def test_a_processor_that_returns_no_row_is_named() -> None:
    def broken(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:3]

    row = RowSampling(SamplingParams(), 0, 9, TextBefore(PROMPT, len(PROMPT), processors=[broken]))
    with pytest.raises(UserError, match=r"broken returned \(3,\)"):
        adjusted_logits(torch.randn(50), row)


def test_a_reduced_vocabulary_is_adjusted_by_target_ids() -> None:
    ids = torch.tensor([1, 5, 9, 30, 44])
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={44: 3, 2: 9})
    row = RowSampling(params, 0, 9, TextBefore([*PROMPT, *OUTPUT], len(PROMPT)))
    full = torch.randn(50)
    assert torch.equal(adjusted_draft_logits(full[ids], row, 50, ids), adjusted_logits(full, row)[ids])
