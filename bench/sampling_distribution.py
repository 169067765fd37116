"""Total variation distance between sampled output with speculation and the target's exact distribution.

    python bench/sampling_distribution.py --trials 200000

Four tokens, a known target and a known draft (both first-order chains), two positions, K = 1: each trial drafts one token,
verifies it as the engine does and finishes the second token in the next round where the draft was wrong. The pair is then
counted against the product of the target's processed distributions. Exit code 1 if a mode reaches 0.01.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from tiercel.core.sampling_params import SamplingParams
from tiercel.models.step import best_ids
from tiercel.speculative.logits.choose import choose
from tiercel.speculative.logits.filters import filtered_logits
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling
from tiercel.speculative.verify import accept

VOCAB, BOUND = 4, 0.01
TARGET = torch.tensor([[1.0, 0.2, -0.6, 0.5], [0.1, 1.3, 0.4, -1.0], [0.7, -0.4, 0.9, 0.2], [-0.8, 0.6, 0.3, 1.1]])
DRAFT = torch.tensor([[0.4, 0.9, -0.2, 0.1], [0.9, 0.2, 0.4, 0.3], [0.0, 0.3, 1.5, -0.9], [0.2, 0.1, -0.3, 1.6]])
"""Logits of the next token by the token before."""

MODES = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.5": {"temperature": 1.5},
    "top-k 2": {"temperature": 1.0, "top_k": 2},
    "top-p 0.7": {"temperature": 1.0, "top_p": 0.7},
    "temperature 1.3, top-k 3, top-p 0.9": {"temperature": 1.3, "top_k": 3, "top_p": 0.9},
}


def main(
    trials: Annotated[int, typer.Option(min=1)] = 200_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure every mode."""
    found = {}
    for name, settings in MODES.items():
        distance, accepted = measure(SamplingParams(**settings), trials)  # type: ignore[arg-type]
        found[name] = {"total_variation": distance, "acceptance": accepted}
        print(f"{name}: total variation {distance:.4f}, acceptance {accepted:.3f}, {trials} trials", flush=True)
    if json_file:
        json_file.write_text(json.dumps({"trials": trials, "modes": found}, indent=1) + "\n")
    sys.exit(any(row["total_variation"] >= BOUND for row in found.values()))


def chosen(logits: torch.Tensor, rows: list[RowSampling], noise: GumbelNoise) -> torch.Tensor:
    return choose(best_ids(logits), logits, rows, noise)


def measure(params: SamplingParams, trials: int) -> tuple[float, float]:
    """Distance of the empirical pair distribution from the exact one, and the share of accepted drafts."""
    noise, first, chunk = GumbelNoise(VOCAB), 0, 2000
    pairs, accepted = np.zeros((VOCAB, VOCAB)), 0
    for start in range(0, trials, chunk):
        seeds = range(start, min(start + chunk, trials))
        here, after = ([RowSampling(params, seed, position) for seed in seeds] for position in (5, 6))
        drafts = chosen(DRAFT[first].expand(len(here), VOCAB), here, noise)
        now = chosen(TARGET[first].expand(len(here), VOCAB), here, noise)
        if_right = chosen(TARGET[drafts], after, noise)
        rounds = torch.stack((now, if_right), 1).tolist()
        verdict = accept([[d] for d in drafts.tolist()], rounds)
        accepted += sum(verdict.num_correct_drafts_per_req_cpu)
        # Where the draft was wrong the bonus token is the first of the pair, and the next round makes the second.
        next_round = chosen(TARGET[now], after, noise).tolist()
        for i, correct in enumerate(verdict.num_correct_drafts_per_req_cpu):
            bonus = verdict.bonus_token_ids[i]
            pair = (verdict.draft_token_ids[i][0], bonus) if correct else (bonus, next_round[i])
            pairs[pair] += 1
    exact = torch.stack([filtered_logits(row, params).softmax(-1) for row in TARGET])
    joint = (exact[first][:, None] * exact).numpy()
    return float(np.abs(pairs / trials - joint).sum() / 2), accepted / trials


if __name__ == "__main__":
    typer.run(main)
