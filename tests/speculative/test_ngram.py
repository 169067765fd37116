import random

from hypothesis import given
from hypothesis import strategies as st

from tiercel.speculative.ngram import CERTAIN, NgramIndex


def looked_up(text: list[int], match: int, limit: int) -> list[int]:
    """The definition, by brute force: latest earlier occurrence of the text's end, and what follows, the draft included."""
    suffix = text[len(text) - match :]
    for end in range(len(text) - 1, match - 1, -1):
        if text[end - match : end] == suffix:
            agreed = next((n for n in range(match, end) if text[end - n - 1] != text[len(text) - n - 1]), end)
            grown = list(text)
            for i in range(min(agreed, limit)):
                grown.append(grown[end + i])
            return grown[len(text) :]
    return []


@given(st.integers(1, 4), st.integers(0, 9), st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 7))
def test_it_finds_the_latest_occurrence_however_the_text_grows(
    match: int, limit: int, text: list[int], stride: int
) -> None:
    index = NgramIndex(match)
    for length in range(1, len(text) + 1, stride):
        part = text[:length]
        assert index.continuation(part, limit).token_ids == (looked_up(part, match, limit) if length > match else [])


def test_it_repeats_a_loop_and_proposes_no_more_than_it_knows() -> None:
    index = NgramIndex(3)
    assert index.continuation([1, 2, 3, 4, 1, 2, 3], 7).token_ids == [4, 1, 2]  # three tokens agree: three drafts
    assert NgramIndex(3).continuation([5, 6] * 8, 7).token_ids == [5, 6, 5, 6, 5, 6, 5]
    assert (
        NgramIndex(3).continuation([random.randrange(9, 1000)] * 3, 7).token_ids == []
    )  # the run is as long as the text


def test_only_long_matches_take_more_rows_than_there_are() -> None:
    text = [*range(100), 7, 8, *range(50, 50 + CERTAIN)]
    found = NgramIndex(3).continuation(text, 4)
    assert found == ([50 + CERTAIN + i for i in range(4)], True)
    assert found.worth_verifying(0) == found.token_ids
    found = NgramIndex(3).continuation(text[:-1], 4)
    assert not found.is_certain
    assert (found.worth_verifying(0), found.worth_verifying(2)) == ([], found.token_ids[:2])
