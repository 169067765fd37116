"""``tiercel bench`` as a user runs it, on the toy model."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import tiercel
from typer.testing import CliRunner, Result

from tiercel.bench.turns import TiercelContender
from tiercel.cli.bench import app
from tiercel.core.errors import UserError


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "id": text}) for text in ("one", "two", "three", "four")))
    return path


@pytest.fixture
def sizes(toy_model: Path, toy_draft: Path, prompts: Path, tmp_path: Path) -> list[object]:
    common = ["--max-tokens", 6, "--runs", 2, "--limit", 2, "--json", tmp_path / "out.json"]
    return ["--model", toy_model, "--draft", toy_draft, "--prompts", prompts, *common]


def read(sizes: list[object]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(str(sizes[-1])).read_text())
    return found


def bench(*args: object) -> Result:
    """In this process; `tests/cli/test_cli.py` shows what the command line makes of errors."""
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "250"})


def test_latency(sizes: list[object]) -> None:
    done = tiercel("bench", "latency", "--num-steps", 1, "--num-steps", 3, *sizes, env={"COLUMNS": "250"})
    assert done.returncode == 0, done.stderr
    for part in ("plain", "K=1", "K=3", "extend", "cores", "tiercel 0.1.0"):
        assert part in done.stdout
    found = read(sizes)
    assert list(found["contenders"]) == ["plain", "lookup", "K=1", "K=3", "default"]
    assert found["settings"]["prompts"] == ["one", "three"]
    assert found["differing"] == []
    assert len(found["samples"]) == 5 * 2 * 2
    assert {s["tokens"] for s in found["samples"]} == {6}
    plain = found["contenders"]["plain"]
    assert plain["decode_ratio_to_plain"] == {"median": 1.0, "least": 1.0, "most": 1.0, "count": 2}
    assert plain["acceptance_length"] == 1.0
    runs = [[s for s in found["samples"] if s["contender"] == "plain" and s["run"] == run] for run in (0, 1)]
    speeds = [sum(s["tokens"] - 1 for s in run) / sum(s["total_ms"] - s["first_token_ms"] for s in run) for run in runs]
    assert plain["decode_tok_s"]["least"] == pytest.approx(1e3 * min(speeds))


def test_throughput(sizes: list[object]) -> None:
    done = bench("throughput", "--concurrency", 1, "--concurrency", 3, "--num-steps", 2, *sizes)
    assert done.exit_code == 0, done.exception
    assert "of one /" in done.stdout
    groups = read(sizes)["groups"]
    assert [(g["concurrency"], g["contender"]) for g in groups] == [
        (load, name) for load in (1, 3) for name in ("plain", "lookup", "K=2")
    ]
    assert {s["tokens"] for s in read(sizes)["samples"]} == {6, 18}


def test_overhead(sizes: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.bench.overhead.DRAIN_S", 0.01)
    done = bench("overhead", *sizes)
    assert done.exit_code == 0, done.exception
    found = read(sizes)["contenders"]
    assert list(found) == ["off", "off again", "level 1", "level 2", "level 3", "records"]
    assert found["off"]["decode_time_ratio_to_off"]["median"] == 1.0
    assert found["off"]["below_noise"]
    assert found["off again"]["below_noise"]
    assert "above" in done.stdout


DRIVER = """
import time
from bench.peers.protocol import alone, serve, timed_stream

def open_model(settings):
    assert settings.model.endswith(".gguf") and settings.max_context % 256 == 0
    tokens = 4 if settings.variant == "lookup" and BROKEN else 10**6
    def answer(prompt, count):
        return timed_stream(lambda: (time.sleep(0.001) or token for token in range(tokens)), count)
    if settings.variant == "batch":
        assert settings.max_prompts == 3
        return lambda prompts, count: [answer(prompt, count) for prompt in prompts]
    return alone(answer)

serve(lambda: "fake 2.0", open_model)
"""


@pytest.fixture
def fake_peers(tmp_path: Path) -> Path:
    """llama.cpp's place taken by a driver that counts up."""
    folder = tmp_path / "peers"
    place = folder / "llama_cpp"
    (place / ".venv" / "bin").mkdir(parents=True)
    (place / "driver.py").write_text("BROKEN = False" + DRIVER)
    python = place / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shutil.copytree(place, folder / "openvino")
    (folder / "openvino" / ".venv" / "bin" / "python").unlink()
    return folder


def peers(smollm2: Path, folder: Path, out: Path, *args: object) -> Result:
    small = ["--max-tokens", 5, "--runs", 1, "--limit", 1, "--num-steps", 1, "--threads", 1, "--peers-dir", folder]
    return bench("peers", "--model", smollm2, *small, "--json", out, *args)


def test_peers(smollm2: Path, fake_peers: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    done = peers(smollm2, fake_peers, out, "--peer", "llama_cpp", "--plot", plot)
    assert done.exit_code == 0, done.exception
    for part in ("Tiercel K=1", "llama.cpp lookup", "roofline", "GB/s", "fake 2.0"):
        assert part in done.stdout
    found = json.loads(out.read_text())
    ours = [f"Tiercel {name}" for name in ("plain", "lookup", "K=1", "default")]
    assert list(found["contenders"]) == [*ours, "llama.cpp plain", "llama.cpp lookup"]
    assert list(found["ratios"]["Tiercel K=1"]) == ["Tiercel plain", "llama.cpp plain", "llama.cpp lookup"]
    assert found["versions"]["llama.cpp plain"] == "fake 2.0"
    assert found["best_way"]["llama.cpp"] in found["contenders"]
    assert found["contenders"]["Tiercel K=1"]["equal_leading_tokens"]["median"] == 5
    steps = found["roofline"]["steps"]
    assert list(steps) == ours
    for name, step in steps.items():
        specs = [s["spec"] for s in found["samples"] if s["contender"] == name]
        drafts, rounds = (sum(spec[key] for spec in specs) for key in ("num_draft_tokens", "num_spec_steps"))
        assert step["rows"] == pytest.approx(1 + drafts / rounds)
    assert steps["Tiercel plain"]["rows"] == 1
    for step in steps.values():
        assert 0 < step["fraction_reached"]["round"] < step["fraction_reached"]["target_forward"]
    assert plot.read_text().startswith("<svg")


def test_throughput_with_a_peer(smollm2: Path, fake_peers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--max-tokens", 3, "--runs", 1, "--threads", 1, "--concurrency", 3, "--num-steps", 1, "--json", out]
    done = bench("throughput", "--model", smollm2, "--peer", "llama_cpp", "--peers-dir", fake_peers, *sizes)
    assert done.exit_code == 0, done.exception
    found = json.loads(out.read_text())
    assert [(g["contender"], g["concurrency"]) for g in found["groups"]][-1] == ("llama.cpp batch", 3)
    assert found["versions"]["llama.cpp batch"] == "fake 2.0"
    assert {s["tokens"] for s in found["samples"]} == {9}


def test_a_peer_that_fails_fails_the_command(smollm2: Path, fake_peers: Path, tmp_path: Path) -> None:
    (fake_peers / "llama_cpp" / "driver.py").write_text("BROKEN = True" + DRIVER)
    done = peers(smollm2, fake_peers, tmp_path / "out.json", "--peer", "llama_cpp")
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("llama.cpp lookup gave 4 of 5 tokens")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["latency", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["latency", "--json", "/dev/null/x.json"], "--json"),
        (["latency", "--num-steps", "9", "--model", "{toy}", "--draft", "{draft}"], "num_steps=9"),
        (["throughput", "--model", "{toy}", "--draft", "{draft}", "--max-tokens", "600"], "of 600 tokens"),
        (["overhead", "--draft", "none-such", "--model", "{toy}"], "none-such"),
        (["throughput", "--peer", "openvino"], "one prompt at a time"),
        (["peers", "--peer", "vllm"], "llama_cpp, openvino, transformers"),
        (["peers", "--setup", "vllm"], "llama_cpp, openvino, transformers"),
        (["peers", "--peer", "openvino", "--peers-dir", "{peers}"], "tiercel bench peers --setup openvino"),
        (["peers", "--peer", "llama_cpp", "--peers-dir", "{peers}", "--model", "{toy}", "--draft", "{draft}"], ".gguf"),
    ],
)
def test_mistakes(args: list[str], named: str, toy_model: Path, toy_draft: Path, fake_peers: Path) -> None:
    places = {"{toy}": toy_model, "{draft}": toy_draft, "{peers}": fake_peers}
    done = bench(*(str(places.get(a, a)) for a in args))
    assert isinstance(done.exception, UserError)
    assert named in str(done.exception)
    assert "\n" not in str(done.exception)
    assert done.stdout == ""


def test_other_tokens_than_plain_fail_the_command(sizes: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TiercelContender.answer

    def sly(self: TiercelContender, *args: Any) -> Any:
        found = honest(self, *args)
        if self.name == "K=2":
            object.__setattr__(found, "token_ids", (*found.token_ids[:-1], -1))
        return found

    monkeypatch.setattr(TiercelContender, "answer", sly)
    done = bench("latency", "--num-steps", 2, *sizes)
    assert done.exit_code == 1
    assert "tokens differ from plain decoding: K=2 on prompt one, K=2 on prompt three" in done.stderr
    assert read(sizes)["differing"][0] == {"contender": "K=2", "prompt": "one"}
