"""The page: well-formed, self-contained, with every section, whatever is missing from the records."""

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.records import HandMade
from tiercel.core.request import SOURCE_NGRAM
from tiercel.report import wording
from tiercel.report.analysis import make_report
from tiercel.report.charts import Series, bars, line
from tiercel.report.page import render_page


def parsed(page: str) -> ElementTree.Element:
    """The document; what a browser would fetch or run is refused."""
    assert page.startswith("<!DOCTYPE html>")
    for outside in ("://", "src=", "href=", "url(", "@import", "<script", "javascript:"):
        assert outside not in page
    return ElementTree.fromstring(page)


def text_of(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def sections(document: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {element.attrib["id"]: element for element in document.iter() if "id" in element.attrib}


def full(made: HandMade) -> None:
    made.extend("a", 60)
    for correct in (3, 0, 1, 2, 3):
        made.decode([("a", 3, correct, correct + 1)], draft=1, verify=8, layers=(1, 1, 1), tail=0.5, other=1)
    made.decode([("a", 5, 2, 3)], verify=9, source=SOURCE_NGRAM)
    for _ in range(4):
        made.decode([("a", 0, 0, 1)], verify=6)
    made.finish("a")


def plain(made: HandMade) -> None:
    made.extend("a", 5)
    for _ in range(6):
        made.decode([("a", 0, 0, 1)], verify=6, other=1)
    made.finish("a")


def no_round(made: HandMade) -> None:
    made.extend("a", 5)
    made.finish("a")


def aborted(made: HandMade) -> None:
    made.finish("waited", reason="abort")
    made.extend("a", 5)
    made.decode([("a", 3, 1, 2)], verify=6)
    made.finish("a", reason="abort")
    made.extend("in flight", 5)
    made.decode([("in flight", 3, 0, 1)], verify=6)


def failed(made: HandMade) -> None:
    made.finish("a", reason="error", error="no room")


CASES: list[Callable[[HandMade], None]] = [full, plain, no_round, aborted, failed]
ALL = {"totals", *wording.ABOUT}


@pytest.mark.parametrize("play", CASES)
def test_every_section_is_there_whatever_is_missing(play: Callable[[HandMade], None], tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    play(made)
    page = render_page(make_report([made.close()]))
    found = sections(parsed(page))
    assert set(found) == ALL
    for name, section in found.items():
        assert len(text_of(section)) > 40, name
        is_empty = any(element.get("class") == "none" for element in section.iter())
        has_data = any(
            element.tag in ("svg", "table", "dl") or element.get("class") == "case" for element in section.iter()
        )
        assert is_empty or has_data, name
    assert "None" not in page
    assert "nan" not in re.findall(r"[a-z]+", page)


def test_records_without_any_line(tmp_path: Path) -> None:
    HandMade(tmp_path / "run").close()
    assert set(sections(parsed(render_page(make_report([tmp_path / "run"]))))) == ALL


@pytest.mark.parametrize(
    ("play", "section", "said"),
    [
        (plain, "positions", "Nothing was drafted"),
        (plain, "costs", "no MTP layer drafted"),
        (no_round, "over_time", "No round was played"),
        (aborted, "worst_requests", "No finished request had four rounds"),
        (aborted, "totals", "2 abort, 1 unfinished"),
        (full, "drafters", "prompt lookup"),
    ],
)
def test_sections_say_what_is_missing(
    play: Callable[[HandMade], None], section: str, said: str, tmp_path: Path
) -> None:
    made = HandMade(tmp_path)
    play(made)
    assert said in text_of(sections(parsed(render_page(make_report([made.close()]))))[section])


def test_the_page_shows_the_figures(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    full(made)
    found = sections(parsed(render_page(make_report([made.close()]))))
    assert "acceptance length 2.10" in text_of(found["totals"])  # 1 + 11 / 10
    assert "11 of 20 drafts" in text_of(found["totals"])
    # MTP layers: draft 1 right in 4 of 5 rounds, draft 2 in 3 of the 4 that reached it, draft 3 in 2 of 3
    assert "MTP layer 2 5 4 3 60.0% 75.0%" in text_of(found["drafters"])
    assert "prompt lookup 5 3 2 40.0% 66.7%" in text_of(found["drafters"])
    assert "MTP layer 1 5.00 ms" in text_of(found["stages"])
    struck = [e for e in found["worst_rounds"].iter() if "wrong" in e.get("class", "")]
    assert struck


def test_whatever_a_request_is_called_is_text(tmp_path: Path) -> None:
    made, name = HandMade(tmp_path), "<script>alert(1)</script> & \"'"
    made.extend(name, 5)
    for _ in range(4):
        made.decode([(name, 1, 1, 2)], verify=6)
    made.finish(name, model="<b>", error="<i>")
    document = parsed(render_page(make_report([made.close()])))
    assert name in [element.text for element in document.iter("h3")]


def test_every_class_has_a_style_and_both_themes_have_every_colour(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    full(made)
    page = render_page(make_report([made.close()]))
    css = page[page.index("<style>") : page.index("</style>")]
    used = {name for element in parsed(page).iter() for name in element.get("class", "").split()}
    styled = set(re.findall(r"\.([a-z_]+\d?)", css))
    assert used - styled <= {"case"}
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--[a-z0-9-]+):", light))
    assert names == set(re.findall(r"(--[a-z0-9-]+):", dark.split("\n}\n")[0]))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", css)) - names == {"--look"}


def drawing(chart: str) -> ElementTree.Element:
    """A chart with its legend, under one root."""
    return ElementTree.fromstring(f"<figure>{chart}</figure>")


def test_bars_are_as_high_as_their_values() -> None:
    picture = drawing(bars(["x", "y"], [Series("s", "a", [0.25, None])], wording.percent, "t", top=1.0))
    first, second = picture.iter("rect")
    grid = [float(path.attrib["d"].split()[1].partition("H")[0]) for path in picture.iter("path")]
    assert float(first.attrib["height"]) == pytest.approx(0.25 * (grid[0] - grid[-1]))
    assert float(second.attrib["height"]) == 0
    assert {"25%", "–"} <= {text.text for text in picture.iter("text")}


def test_a_line_breaks_where_nothing_was_counted_and_one_place_is_a_dot() -> None:
    picture = drawing(line([0, 1, 2, 3], [Series("s", "a", [1, None, 2, 3])], wording.number, "s", "t"))
    assert [len(p.attrib["points"].split()) for p in picture.iter("polyline")] == [1, 2]
    alone = drawing(line([5], [Series("s", "a", [1])], wording.number, "s", "t"))
    assert len(list(alone.iter("circle"))) == 1
