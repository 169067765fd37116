"""``tiercel tune`` as a user runs it, and that engines draft as it says afterwards."""

import json
from pathlib import Path

import pytest
from test_cli import tiercel
from typer.testing import CliRunner, Result

from tiercel.cli.bench import app as bench_app
from tiercel.cli.main import app
from tiercel.core.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERCEL_TUNE_DIR", str(tmp_path / "tune"))
    return tmp_path / "tune"


@pytest.fixture
def model(toy_model: Path, toy_draft: Path) -> list[object]:
    return ["--model", toy_model, "--draft", toy_draft]


@pytest.fixture
def sizes(model: list[object]) -> list[object]:
    return [*model, "--max-tokens", 8, "--runs", 2, "--limit", 2, "--concurrency", 4, "--concurrency", 1]


def run(*args: object) -> Result:
    """In this process; `tests/cli/test_cli.py` shows what the command line makes of errors."""
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "200"})


def two_drafts(folder: Path) -> Path:
    """The tuned file, changed to say two drafts while one request runs."""
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "depths": [{"requests": 1, "num_steps": 2, "lookup": False}]}))
    return path


def test_it_measures_recommends_and_keeps(folder: Path, sizes: list[object], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = tiercel("tune", *sizes, "--json", out)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    for part in (
        "emitted",
        "total /",
        "K=3",
        "lookup",
        "recommended: ",
        f"kept in {path}",
        "cores",
    ):
        assert part in done.stdout
    found = json.loads(out.read_text())
    names = ["plain", "lookup", "K=1", "K=2", "K=3"]
    rows = found["depths"]
    assert [(row["depth"]["requests"], row["drafter"]) for row in rows] == [(n, name) for n in (1, 4) for name in names]
    assert {row["ratio_to_plain"]["median"] for row in rows if row["drafter"] == "plain"} == {1.0}
    assert {row["emitted_per_round"] for row in rows if row["drafter"] == "plain"} == {1.0}
    assert all(row["round_ms"]["count"] == 2 for row in rows)
    assert found["file"] == str(path)
    assert len(found["samples"]) == 5 * 2 * (2 + 1)  # two prompts one by one, or in one group of four
    kept = json.loads(path.read_text())
    assert {name: kept[name] for name in ("format", "depths")} == found["recommended"]
    assert kept["key"] == found["key"]
    assert kept["depths"][-1]["requests"] == 4


def test_a_dry_run_keeps_nothing(folder: Path, sizes: list[object]) -> None:
    done = run("tune", "--dry-run", *sizes)
    assert done.exit_code == 0, done.exception
    assert "dry run: nothing kept" in done.stdout
    assert not folder.exists()


def test_generate_drafts_as_tuned_and_says_so(folder: Path, sizes: list[object], model: list[object]) -> None:
    assert run("tune", "--runs", 1, *sizes).exit_code == 0
    path = two_drafts(folder)
    answer = ["hello", "--json", "--max-tokens", 9, "--ignore-eos", *model]

    def metrics(*args: object) -> dict[str, object]:
        done = run("generate", *answer, *args)
        assert done.exit_code == 0, done.exception
        assert ("drafting as tuned" in done.stderr) == (not args)
        found: dict[str, object] = json.loads(done.stdout)["metrics"]
        return found

    def deepest(found: dict[str, object]) -> int:
        return max(found["speculative_decoding"]["per_step_drafted"])  # type: ignore[index, no-any-return]

    tuned = metrics()
    assert deepest(tuned) == 2
    assert tuned["depths"]["source"] == str(path)  # type: ignore[index]
    assert deepest(metrics("--no-tuned", "--ngram-match", 0)) != 2
    assert deepest(metrics("--num-steps", 1, "--ngram-match", 0)) == 1
    by_rows = metrics("--max-verify-rows", 8, "--ngram-match", 0, "--min-confidence", 0)
    assert deepest(by_rows) == 3
    assert by_rows["depths"]["source"] == "max_verify_rows=8"  # type: ignore[index]
    path.write_text("{")
    done = run("generate", *answer)
    assert isinstance(done.exception, UserError)
    assert str(path) in str(done.exception)
    assert "tiercel tune" in str(done.exception)


def test_bench_throughput_measures_the_tuned_engine_when_asked(
    folder: Path, sizes: list[object], tmp_path: Path
) -> None:
    wanted = ["throughput", "--tuned", "--json", tmp_path / "out.json", *sizes]
    arguments = [str(a) for a in wanted]
    untuned = CliRunner().invoke(bench_app, arguments)
    assert "tiercel tune" in str(untuned.exception)
    assert run("tune", "--runs", 1, *sizes).exit_code == 0
    done = CliRunner().invoke(bench_app, arguments)
    assert done.exit_code == 0, done.exception
    groups = json.loads((tmp_path / "out.json").read_text())["groups"]
    assert {group["contender"] for group in groups} == {"plain", "lookup", "default", "tuned"}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--json", "/dev/null/x.json"], "--json"),
        (["--draft", "none-such", "--model", "{toy}"], "none-such"),
    ],
)
def test_mistakes(args: list[str], named: str, toy_model: Path, folder: Path) -> None:
    done = run("tune", *(a.replace("{toy}", str(toy_model)) for a in args))
    assert isinstance(done.exception, UserError)
    assert named in str(done.exception)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_told_before_the_measuring(
    sizes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCEL_TUNE_DIR", "/dev/null/tune")
    monkeypatch.setattr("tiercel.cli.tune.run_groups", lambda *args, **kwargs: pytest.fail("measured for nothing"))
    done = run("tune", *sizes)
    assert isinstance(done.exception, UserError)
    assert "TIERCEL_TUNE_DIR" in str(done.exception)
