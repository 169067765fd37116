"""``tiercel inspect`` as a user runs it."""

import json
from pathlib import Path

from tests.cli.test_cli import tiercel


def test_a_model_a_draft_and_a_mistake(toy_model: Path, toy_draft: Path, tmp_path: Path) -> None:
    done = tiercel("inspect", toy_model, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    assert "it can be loaded" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())["num_layers"] == 2
    done = tiercel("inspect", toy_draft)
    assert done.returncode == 0, done.stderr
    assert "3 held, 3 declared" in done.stdout
    done = tiercel("inspect", tmp_path)
    assert done.returncode == 2
    assert "no checkpoint" in done.stderr
