"""The cost model on records whose answer is known."""

import random
from itertools import accumulate, product
from operator import mul
from pathlib import Path

import pytest

from tests.report.records import HandMade
from tiercel.core.request import SOURCE_NGRAM
from tiercel.report.analysis import make_report
from tiercel.report.costs import VerifyCost, needed_acceptance
from tiercel.report.figures import BatchCosts

BASE, PER_ROW, LAYERS, TAIL, REST = 6.0, 0.5, (1.0, 0.7, 0.6), 0.2, 0.4


def verify_ms(rows: int) -> float:
    return BASE + PER_ROW * rows


def round_ms(n: int, depth: int) -> float:
    extend = sum(LAYERS[:depth]) + TAIL if depth else 0
    return verify_ms(n * (depth + 1)) + extend + REST


def play(made: HandMade, depth: int, correct: list[int], n: int = 1, slow: float = 1.0) -> None:
    """A run at one depth: ``correct`` of each round (no more than the depth), in batches of ``n`` requests."""
    names = [f"{depth}-{n}-{i}" for i in range(n)]
    for name in names:
        made.extend(name, 10)
    layers = LAYERS[:depth]
    for first in range(0, len(correct), n):
        rounds = [
            (name, depth, min(c, depth), min(c, depth) + 1) for name, c in zip(names, correct[first:], strict=False)
        ]
        if len(rounds) == n:
            verify = verify_ms(n * (depth + 1)) * slow
            made.decode(rounds, verify=verify, layers=layers, tail=TAIL if depth else 0, other=REST)
    for name in names:
        made.finish(name)


def accept(alphas: tuple[float, ...], rounds: int) -> list[int]:
    """Numbers of correct drafts in exactly the shares that the conditional acceptances ask for."""
    reached = [round(rounds * share) for share in accumulate(alphas, mul, initial=1.0)] + [0]
    found = [c for c in range(len(alphas) + 1) for _ in range(reached[c] - reached[c + 1])]
    random.Random(0).shuffle(found)
    return found


def only_batch(folder: Path) -> BatchCosts:
    (batch,) = make_report([folder]).costs.batches
    return batch


ALPHAS = (0.75, 0.5, 0.5)


def test_every_depth_is_predicted_from_one_depth_and_plain_decoding(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 3, accept(ALPHAS, 160))
    play(made, 0, [0] * 20)
    batch = only_batch(made.close())
    lengths = [1, 1 + 0.75, 1 + 0.75 + 0.375, 1 + 0.75 + 0.375 + 0.1875]
    assert len(batch.depths) == 4
    for depth, length in zip(batch.depths, lengths, strict=True):
        k = depth.num_steps
        assert depth.acceptance_length == pytest.approx(length)
        assert depth.round_ms == pytest.approx(round_ms(1, k))
        assert depth.tok_s == pytest.approx(length / round_ms(1, k) * 1000)
        assert depth.speedup == pytest.approx(length * round_ms(1, 0) / round_ms(1, k))
        assert depth.needed_length == pytest.approx(round_ms(1, k) / round_ms(1, 0))
        assert not depth.is_rough
    speeds = [length / round_ms(1, k) for k, length in enumerate(lengths)]
    assert batch.best == speeds.index(max(speeds)) == 2


@pytest.mark.parametrize(("alphas", "best"), [((0.95, 0.95, 0.95), 3), ((0.5, 0.3, 0.2), 1), ((0.1, 0.5, 0.5), 0)])
def test_the_best_depth_follows_the_acceptance(alphas: tuple[float, ...], best: int, tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 3, accept(alphas, 400))
    play(made, 0, [0] * 20)
    batch = only_batch(made.close())
    lengths = [sum(accumulate(alphas[:k], mul, initial=1.0)) for k in range(4)]
    speeds = [length / round_ms(1, k) for k, length in enumerate(lengths)]
    assert batch.best == best == speeds.index(max(speeds))


def test_at_the_break_even_acceptance_a_depth_is_as_fast_as_plain_decoding(tmp_path: Path) -> None:
    made = HandMade(tmp_path / "first")
    play(made, 2, accept((0.8, 0.8), 100))
    play(made, 0, [0] * 20)
    needed = only_batch(made.close()).depths[2].needed_acceptance
    assert needed is not None
    assert 1 + needed + needed**2 == pytest.approx(round_ms(1, 2) / round_ms(1, 0))
    made = HandMade(tmp_path / "second")
    play(made, 2, accept((needed, needed), 20_000))
    play(made, 0, [0] * 20)
    assert only_batch(made.close()).depths[2].speedup == pytest.approx(1, abs=0.001)


def test_predictions_meet_what_is_measured_at_each_depth(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    drawn = accept(ALPHAS, 320)
    for depth in range(4):
        play(made, depth, drawn)
    for depth in only_batch(made.close()).depths:
        assert depth.measured_steps == 320
        assert depth.measured_round_ms == pytest.approx(depth.round_ms)
        assert depth.measured_tok_s == pytest.approx(depth.tok_s)


def test_requests_at_once_share_a_verify(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 3, accept(ALPHAS, 160), n=4)
    play(made, 1, accept(ALPHAS, 160), n=4)
    play(made, 0, [0] * 40)
    batches = {batch.num_requests: batch for batch in make_report([made.close()]).costs.batches}
    assert set(batches) == {4}  # alone, nobody drafted
    for depth in batches[4].depths:
        assert depth.round_ms == pytest.approx(
            round_ms(4, depth.num_steps)
        )  # rows 4 and 12 are on the line, 8 measured
        assert depth.tok_s == pytest.approx(4 * depth.acceptance_length / round_ms(4, depth.num_steps) * 1000)


def test_outliers_change_nothing(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 3, accept(ALPHAS, 160))
    play(made, 0, [0] * 20)
    play(made, 3, [1] * 8, slow=50)
    batch = only_batch(made.close())
    assert [d.round_ms for d in batch.depths] == pytest.approx([round_ms(1, k) for k in range(4)])


def test_no_plain_step_no_answer(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 3, accept(ALPHAS, 40))
    costs = make_report([made.close()]).costs
    assert costs.batches == []
    assert costs.reason is not None
    assert "every verify had 4 rows" in costs.reason
    assert "--spec none" in costs.reason


def test_no_layers_no_answer(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 0, [0] * 10)
    made.extend("a", 5)
    made.decode([("a", 5, 4, 5)], verify=10, source=SOURCE_NGRAM)
    costs = make_report([made.close()]).costs
    assert costs.batches == []
    assert costs.reason is not None
    assert "no MTP layer drafted" in costs.reason


def test_too_few_steps_of_a_row_count_make_it_rough(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made, 3, accept(ALPHAS, 40))
    play(made, 1, [0, 1])
    batch = only_batch(made.close())
    assert [d.is_rough for d in batch.depths] == [True] * 4  # the plain step lies beyond what was measured
    assert batch.depths[0].round_ms == pytest.approx(round_ms(1, 0))


def test_beyond_the_measured_rows_costs_stay_within_proportion() -> None:
    steep = VerifyCost([(4, 8.0)] * 5 + [(8, 40.0)] * 5)  # the line would say -16 ms for one row
    one, sixteen = steep.ms(1), steep.ms(16)
    assert one is not None
    assert sixteen is not None
    assert (one.ms, one.is_rough) == (2.0, True)
    assert sixteen.ms == 80.0
    flat = VerifyCost([(4, 8.0)] * 5 + [(8, 7.0)] * 5)
    assert flat.ms(1) is not None
    assert flat.ms(1).ms == 7.5  # type: ignore[union-attr]  # more rows never take less: the mean


def test_between_measured_rows_costs_are_interpolated() -> None:
    cost = VerifyCost([(1, 6.0)] * 3 + [(5, 10.0)] * 3 + [(9, 30.0)] * 3)
    assert [cost.ms(rows).ms for rows in (1, 2, 5, 7)] == [6.0, 7.0, 10.0, 20.0]  # type: ignore[union-attr]
    assert VerifyCost([(4, 8.0)]).ms(1) is None


@pytest.mark.parametrize(("depth", "a"), list(product((1, 2, 5), (0.0, 0.3, 1.0))))
def test_needed_acceptance_inverts_the_sum(depth: int, a: float) -> None:
    length = sum(a**i for i in range(depth + 1))
    assert needed_acceptance(length, depth) == pytest.approx(a, abs=1e-9)


def test_needed_acceptance_at_the_ends() -> None:
    assert needed_acceptance(0.9, 3) == 0.0
    assert needed_acceptance(4.01, 3) is None
