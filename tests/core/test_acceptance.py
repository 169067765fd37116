import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.core.acceptance import SpecCounts, StageTimes

ROUNDS = st.lists(
    st.integers(0, 4).flatmap(
        lambda p: st.integers(0, p).flatmap(lambda c: st.tuples(st.just(p), st.just(c), st.integers(1, c + 1)))
    )
)


@given(ROUNDS)
def test_numbers_agree_with_counting_by_hand(rounds: list[tuple[int, int, int]]) -> None:
    counts = SpecCounts()
    for one in rounds:
        counts.add_round(*one)
    metrics = counts.to_metrics(4, detailed=True)
    assert sum(metrics["acceptance_histogram"]) == len(rounds) == metrics["num_spec_steps"]  # type: ignore[arg-type]
    assert metrics["per_step_drafted"] == [p for p, _, _ in rounds]
    assert metrics["num_emitted_tokens"] == sum(e for _, _, e in rounds)
    rate, length = counts.acceptance_rate(), counts.acceptance_length()
    proposed, correct = sum(p for p, _, _ in rounds), sum(c for _, c, _ in rounds)
    assert rate == (correct / proposed if proposed else None)
    assert length == (1 + correct / len(rounds) if rounds else None)
    for i in range(4):
        hit = [c > i for _, c, _ in rounds]
        reached = [c > i for p, c, _ in rounds if p > i and c >= i]
        assert counts.position_acceptance(4)[i] == (sum(hit) / len(hit) if hit else None)
        assert counts.conditional_acceptance(4)[i] == (sum(reached) / len(reached) if reached else None)


@pytest.mark.parametrize("wrong", [(1, 2, 1), (1, 0, 0), (2, 1, 3), (0, -1, 1)])
def test_counts_that_do_not_add_up_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not add up"):
        SpecCounts().add_round(*wrong)


def test_merge_adds_rounds_and_times() -> None:
    a = SpecCounts([3], [1], [2], StageTimes(draft=1, verify=2, draft_extend=3, other=4))
    a.merge(SpecCounts([2], [2], [3], StageTimes(draft=10, verify=20, draft_extend=30, other=40)))
    assert (a.proposed, a.correct, a.emitted) == ([3, 2], [1, 2], [2, 3])
    assert a.stage_ns.as_ms() == pytest.approx({"draft": 11e-6, "verify": 22e-6, "draft_extend": 33e-6, "other": 44e-6})
