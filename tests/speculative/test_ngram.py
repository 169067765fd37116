import random

from hypothesis import given
from hypothesis import strategies as st

from tiercel.speculative.ngram import NgramIndex, worth_verifying


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
        assert index.continuation(part, limit) == (looked_up(part, match, limit) if length > match else [])


def test_it_repeats_a_loop_and_proposes_no_more_than_it_knows() -> None:
    index = NgramIndex(3)
    assert index.continuation([1, 2, 3, 4, 1, 2, 3], 7) == [4, 1, 2]  # three tokens agree: three drafts
    assert NgramIndex(3).continuation([5, 6] * 8, 7) == [5, 6, 5, 6, 5, 6, 5]
    assert NgramIndex(3).continuation([random.randrange(9, 1000)] * 3, 7) == []  # the run is as long as the text


def test_only_the_longest_matches_take_more_rows_than_there_are() -> None:
    assert worth_verifying([4, 5, 6], 7, 2) == [4, 5]
    assert worth_verifying([4, 5, 6], 7, 0) == []
    assert worth_verifying([4, 5, 6], 3, 0) == [4, 5, 6]
