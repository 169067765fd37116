import pytest

from tiercel.speculative.verify import accept


@pytest.mark.parametrize(
    ("drafts", "target", "correct", "bonus"),
    [
        ([], [5], 0, 5),
        ([1], [1, 2], 1, 2),
        ([1], [3, 2], 0, 3),
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),
        ([1, 2, 3], [1, 9, 3, 4], 1, 9),
        ([1, 2, 3], [9, 2, 3, 4], 0, 9),
        ([1, 2, 3], [1, 2, 9, 4], 2, 9),
    ],
)
def test_drafts_count_up_to_the_first_wrong_one(drafts: list[int], target: list[int], correct: int, bonus: int) -> None:
    output = accept([drafts], [target])
    assert output.num_correct_drafts_per_req_cpu == [correct]
    assert output.bonus_token_ids == [bonus]
    assert output.draft_token_ids == [drafts]


def test_requests_are_judged_one_by_one() -> None:
    output = accept([[1, 2], [], [7]], [[1, 5, 6], [8], [7, 9]])
    assert output.num_correct_drafts_per_req_cpu == [1, 0, 1]
    assert output.bonus_token_ids == [5, 8, 9]
