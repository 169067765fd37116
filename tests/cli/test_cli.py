"""The commands as a user runs them: real processes, exit codes, one line for a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-c", "from tiercel.cli.main import main; main()"]


def tiercel(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, text=True, check=False, env=full, timeout=240
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "one"},
        {"question_id": 81, "category": "writing", "turns": ["two", "three"]},
        {"id": "x", "prompt": "Grüße 😀"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def generate(toy_model: Path, toy_draft: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return tiercel("generate", "--model", toy_model, "--draft", toy_draft, "--max-tokens", 8, *args)


def test_generate_json_one_object_per_prompt(toy_model: Path, toy_draft: Path, prompts: Path, tmp_path: Path) -> None:
    files = [
        "--trace-out",
        tmp_path / "t.json",
        "--records-out",
        tmp_path / "r",
        "--enable-trace",
        "--otlp-file",
        tmp_path / "o.jsonl",
    ]
    done = generate(toy_model, toy_draft, "--prompts", prompts, "--json", "--ignore-eos", *files)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["request_id"] for row in rows] == ["1", "81", "x"]
    assert {row["usage"]["completion_tokens"] for row in rows} == {8}
    assert (
        rows[0]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 7
    )  # prompt lookup may draft more than the layers
    json.loads((tmp_path / "t.json").read_text())
    assert len((tmp_path / "r" / "requests.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "o.jsonl").stat().st_size > 0
    plain = generate(toy_model, toy_draft, "--prompts", prompts, "--json", "--ignore-eos", "--spec", "none")
    assert [json.loads(line)["token_ids"] for line in plain.stdout.splitlines()] == [row["token_ids"] for row in rows]


def test_generate_streams_one_prompt_and_a_seed_repeats_it(toy_model: Path, toy_draft: Path) -> None:
    args = ["hello", "--temperature", 1.0, "--top-k", 50, "--top-p", 0.9, "--seed", 3]
    first, second = (generate(toy_model, toy_draft, *args) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""
    with_plain = generate(toy_model, toy_draft, *args, "--spec", "none")
    assert with_plain.stdout == first.stdout
    assert generate(toy_model, toy_draft, *args[:-1], 4).stdout != first.stdout


def test_generate_stops_where_it_is_told(toy_model: Path, toy_draft: Path) -> None:
    def answer(*args: object) -> dict[str, Any]:
        done = generate(toy_model, toy_draft, "hello", "--json", "--ignore-eos", *args)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    token = answer()["token_ids"][4]
    stopped = answer("--stop-token-id", token, "--stop-token-id", 258)
    assert stopped["token_ids"][-1] == stopped["stop_reason"] == token
    assert stopped["finish_reason"] == "stop"
    stop = next(one for one in answer()["text"] if one != "\N{REPLACEMENT CHARACTER}")
    by_text, kept = answer("--stop", stop), answer("--stop", stop, "--include-stop-str-in-output")
    assert by_text["stop_reason"] == stop
    assert kept["text"] == by_text["text"] + stop


BAD = [
    (["generate"], "give one prompt"),
    (["generate", "x", "--prompts", "y"], "not both"),
    (["generate", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    (["generate", "x", "--model", "no-such-model"], "no-such-model"),
    (["generate", "half \udcff", "--model", "{toy}", "--draft", "{draft}"], "is no character"),
    (["generate", "x", "--model", "{toy}", "--draft", "no-such-draft"], "no-such-draft"),
    (["generate", "x", "--model", "{toy}", "--draft", "{draft}", "--num-steps", "7"], "num_steps=7"),
    (["generate", "x", "--model", "{toy}", "--draft", "smollm2-135m-mtp3"], "does not fit"),
    (["generate", "x", "--model", "{toy}", "--spec", "magic"], "multi-layer-eagle"),
    (["generate", "x", "--model", "{toy}", "--spec", "none", "--dtype", "int3"], "dtype"),
    (["generate", "x", "--model", "{toy}", "--spec", "none", "--temperature", "-1"], "temperature"),
    (["generate", "long " * 600, "--model", "{toy}", "--spec", "none"], "512"),
    (["generate", "x", "--model", "{toy}", "--spec", "none", "--trace-out", "/dev/null/t.json"], "/dev/null/t.json"),
    (["generate", "x", "--model", "{toy}", "--spec", "none", "--otlp-file", "o"], "--enable-trace"),
    (["pull", "no-such-model"], "no-such-model"),
    (
        ["train", "--data", "nowhere.jsonl", "--out", "out", "--target", "{toy}", "--draft-vocab-size", "99"],
        "nowhere.jsonl",
    ),
    (["train", "--data", "nowhere.jsonl", "--out", "out", "--target", "{toy}"], "draft_vocab_size"),
    (["eval-draft", "--prompts", "nowhere.jsonl", "--model", "{toy}"], "nowhere.jsonl"),
    (["demo", "--model", "{toy}", "--draft", "{draft}", "--out", "/dev/null"], "choose another --out"),
]


@pytest.mark.parametrize(("args", "named"), BAD, ids=[" ".join(a)[:60] for a, _ in BAD])
def test_a_mistake_is_one_line_and_exit_code_2(
    args: list[str], named: str, toy_model: Path, toy_draft: Path, tmp_path: Path
) -> None:
    filled = [a.replace("{toy}", str(toy_model)).replace("{draft}", str(toy_draft)) for a in args]
    full = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [*COMMAND, *filled], capture_output=True, text=True, check=False, env=full, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_line_separators_inside_a_prompt_do_not_cut_it(tmp_path: Path) -> None:
    from tiercel.cli.prompts import read_prompts

    texts = ["a\u2028b\u0085c\u2029", "d"]
    path = tmp_path / "p.jsonl"
    path.write_text("\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts) + "\r\n")
    assert [row.text for row in read_prompts(path)] == texts


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", ":1: not JSON"),
        ('{"text": "x"}', ":1: need"),
        ('{"turns": []}', ":1: need"),
        ('{"prompt": ""}', ":1: need"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "twice"),
        ("\n\n", "no prompt"),
    ],
)
def test_bad_prompt_files(text: str, named: str, tmp_path: Path) -> None:
    from tiercel.cli.prompts import read_prompts
    from tiercel.core.errors import UserError

    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        read_prompts(path)


def test_a_failed_request_shows_in_the_exit_code(toy_model: Path, toy_draft: Path, prompts: Path) -> None:
    sizes = ["--kv-tokens", 64, "--max-tokens", 300, "--ignore-eos"]
    done = generate(toy_model, toy_draft, "--prompts", prompts, "--json", *sizes)
    assert done.returncode == 2
    assert "3 of 3 requests failed" in done.stderr
    assert "kv_tokens" in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["finish_reason"] for row in rows] == ["error"] * 3


def test_version_and_help() -> None:
    from tiercel import __version__

    assert tiercel("--version").stdout.strip() == f"tiercel {__version__}"
    assert "eval-draft" in tiercel("--help").stdout


def test_demo_on_the_toy_model(toy_model: Path, toy_draft: Path, tmp_path: Path) -> None:
    prompt = 'it\'s $HOME `x` "quoted"\nsecond line ü'
    out, picture = tmp_path / "out", tmp_path / "demo.svg"
    args = [
        "demo",
        "--model",
        toy_model,
        "--draft",
        toy_draft,
        "--max-tokens",
        6,
        "--runs",
        2,
        "--out",
        out,
        "--picture",
        picture,
    ]
    for _ in range(2):  # the second run replaces the first one's files
        done = tiercel(*args, env={"TIERCEL_DEMO_PROMPT": prompt})
        assert done.returncode == 0, done.stderr
    assert prompt.splitlines()[0] in done.stdout
    assert prompt.splitlines()[1] in done.stdout
    for part in (
        "MTP layer 3",
        "acceptance",
        "time in rounds",
        "tokens per second",
        "without",
        "trace.json",
        "rounds.jsonl",
    ):
        assert part in done.stdout
    assert "differs" not in done.stdout
    requests = (out / "records" / "requests.jsonl").read_text().splitlines()
    assert len(requests) == 4 * (1 + 2)  # each prompt is shown once and timed twice
    json.loads((out / "trace.json").read_text())
    assert picture.read_text().lstrip().startswith("<svg")


def test_train_then_evaluate_then_generate(toy_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        {
            "prompt_token_ids": [i % 250, 3],
            "response_token_ids": [(i + 7 * j) % 250 for j in range(30)],
            "temperature": 0,
        }
        for i in range(12)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "run"
    sizes = ["--draft-vocab-size", 250, "--tokens", 900, "--batch-tokens", 100, "--held-out", 2, "--evaluate-every", 5]
    done = tiercel("train", "--target", toy_model, "--data", data, "--out", out, *sizes)
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a", "category": "x"}\n{"prompt": "b", "category": "y"}\n')
    numbers = tmp_path / "n.json"
    done = tiercel(
        "eval-draft",
        "--model",
        toy_model,
        "--draft",
        out / "best",
        "--prompts",
        prompts,
        "--max-tokens",
        9,
        "--json",
        numbers,
    )
    assert done.returncode == 0, done.stderr
    served = json.loads(numbers.read_text())["served"]
    assert list(served) == ["x", "y", "overall"]
    assert served["overall"]["rounds"] == served["x"]["rounds"] + served["y"]["rounds"]
    assert generate(toy_model, out / "best", "hello").returncode == 0
    short = ["--num-steps", 1, "--max-tokens", 2, "--json"]
    measure = ["eval-draft", "--model", toy_model, "--draft", out / "best", "--prompts", prompts]
    done = tiercel(*measure, *short, numbers)
    assert done.returncode == 0, done.stderr
    assert json.loads(numbers.read_text())["teacher_forced"] is None
    done = tiercel(*measure, *short, tmp_path / "no" / "where.json")
    assert (done.returncode, "where.json" in done.stderr) == (2, True)
