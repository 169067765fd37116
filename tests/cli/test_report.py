"""``tiercel report`` as a user runs it, on records that ``tiercel generate`` has just written."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.test_cli import generate, tiercel


@pytest.fixture(scope="module")
def records(toy_model: Path, toy_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    done = generate(toy_model, toy_draft, "hello", "--ignore-eos", "--records-out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_tables_page_json_and_picture(records: Path, toy_model: Path, tmp_path: Path) -> None:
    page, numbers, picture = (tmp_path / name for name in ("r.html", "r.json", "r.svg"))
    done = tiercel("report", records, "--model", toy_model, "--html", page, "--json", numbers, "--picture", picture)
    assert done.returncode == 0, done.stderr
    for part in ("totals", "acceptance by position", "time of decode steps", "does speculation pay?", "worst rounds"):
        assert part in done.stdout
    report = json.loads(numbers.read_text())
    request = json.loads((records / "requests.jsonl").read_text())
    assert report["totals"]["proposed"] == request["spec"]["num_draft_tokens"] > 0
    assert report["totals"]["rounds"] == request["spec"]["num_spec_steps"]
    assert report["notes"] == []
    assert ElementTree.fromstring(page.read_text()).tag == "html"
    assert picture.read_text().lstrip().startswith("<svg")


def test_a_model_that_cannot_be_found_is_no_error(records: Path) -> None:
    done = tiercel("report", records)
    assert done.returncode == 0, done.stderr
    assert "are shown as ids" in done.stdout


def test_mistakes(records: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes((records / "rounds.jsonl").read_bytes()[:-5])
    for args, named in (
        (["nowhere"], "nowhere"),
        ([records, "--html", tmp_path / "no" / "where.html"], "--html"),
        ([records, "--model", "no-such-model"], "no-such-model"),
        ([cut], "--skip-truncated"),
    ):
        done = tiercel("report", *args)
        assert done.returncode == 2
        assert named in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stdout == ""
    assert tiercel("report", cut, "--skip-truncated").returncode == 0
