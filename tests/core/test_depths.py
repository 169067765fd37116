"""Depths by load: the rule of rows against a count of rows, the step function, and what a file may hold."""

import json
import sys
from typing import Any

import pytest

from tiercel.core.config import SpecConfig
from tiercel.core.depths import FORMAT, Depth, DepthTable
from tiercel.core.errors import UserError


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16, 64])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_rule_of_rows_is_the_deepest_draft_whose_rows_fit(rows: int, most: int) -> None:
    table = DepthTable.of_rows(rows, most)
    for requests in range(1, 70):
        fitting = [k for k in range(most + 1) if requests * (k + 1) <= rows]
        found = table.at(requests)
        assert found.num_steps == max(fitting, default=0), requests
        assert found.lookup


def test_no_limit_is_the_same_depth_at_every_load() -> None:
    table = DepthTable.of_rows(sys.maxsize, 3)
    assert {table.at(n).num_steps for n in (1, 50, 10**6)} == {3}


TUNED = DepthTable("here", (Depth(1, 2), Depth(4, 1), Depth(8, 0), Depth(16, 1, False)))


@pytest.mark.parametrize(
    ("requests", "expected"),
    [(0, (2, True)), (1, (2, True)), (2, (1, True)), (4, (1, True)), (5, (0, True)), (8, (0, True)), (16, (1, False))],
)
def test_an_entry_holds_up_to_its_number_of_requests(requests: int, expected: tuple[int, bool]) -> None:
    found = TUNED.at(requests)
    assert (found.num_steps, found.lookup) == expected


def test_beyond_the_last_entry_no_layer_drafts() -> None:
    assert TUNED.at(17) == Depth(None, 0, False)
    assert DepthTable("here", (Depth(2, 3),)).at(3) == Depth(None, 0, True)


def test_people_read_it_on_one_line() -> None:
    assert str(TUNED) == "up to 1: K=2, up to 4: K=1, up to 8: lookup, up to 16: K=1, more: plain"
    assert str(DepthTable.fixed(0, lookup=False)) == "plain at any load"
    repeating = [Depth(1, 1), Depth(2, 1), Depth(4, 0, lookup=False), Depth(16, 0, lookup=False)]
    assert str(DepthTable("rule", tuple(repeating))) == "up to 2: K=1, more: plain"
    assert TUNED.most_steps == 2


def test_it_survives_json() -> None:
    for table in (TUNED, DepthTable.of_rows(8, 3), DepthTable.fixed(3)):
        text = json.dumps({**table.to_json(), "measured": "beside it"})
        assert DepthTable.from_json(json.loads(text), table.source) == table


ENTRY = {"requests": 1, "num_steps": 2, "lookup": True}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "format"),
        ({"depths": [ENTRY]}, "format"),
        ({"format": "tiercel-depths-9", "depths": [ENTRY]}, FORMAT),
        ({"format": FORMAT}, "depths"),
        ({"format": FORMAT, "depths": []}, "at least one"),
        ({"format": FORMAT, "depths": 3}, "field"),
        ({"format": FORMAT, "depths": [7]}, "field"),
        ({"format": FORMAT, "depths": [{"requests": 1}]}, "num_steps"),
        ({"format": FORMAT, "depths": [{**ENTRY, "top_k": 2}]}, "top_k"),
        ({"format": FORMAT, "depths": [{**ENTRY, "requests": 0}]}, "requests=0"),
        ({"format": FORMAT, "depths": [{**ENTRY, "requests": True}]}, "requests=True"),
        ({"format": FORMAT, "depths": [{**ENTRY, "num_steps": None}]}, "num_steps=None"),
        ({"format": FORMAT, "depths": [{**ENTRY, "num_steps": 1.0}]}, "num_steps=1.0"),
        ({"format": FORMAT, "depths": [{**ENTRY, "lookup": "no"}]}, "lookup='no'"),
        ({"format": FORMAT, "depths": [ENTRY, ENTRY]}, "ascending"),
        ({"format": FORMAT, "depths": [{**ENTRY, "requests": None}, ENTRY]}, "ascending"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(data: Any, named: str) -> None:
    with pytest.raises(UserError) as caught:
        DepthTable.from_json(data, "somewhere")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_only_layers_have_depths(method: str) -> None:
    with pytest.raises(UserError, match="depths"):
        SpecConfig(method=method, depths=TUNED)
