"""What is recommended, on samples made by hand; and that contenders draft what they are named for at every load."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tiercel.bench.engines import Bench, encode
from tiercel.bench.samples import BenchPrompt
from tiercel.bench.throughput import GroupSample, Rounds, run_groups
from tiercel.bench.tune import contenders, measured, recommend
from tiercel.core.config import EngineConfig
from tiercel.core.depths import Depth
from tiercel.engine.engine import LoadedTarget

NAMES = ("plain", "lookup", "K=1", "K=2")


def sample(name: str, load: int, run: int, speed: float, rounds: Rounds | None = None) -> GroupSample:
    """A group of 100 tokens at so many tokens per second."""
    return GroupSample(name, run, load, 100, 1e5 / speed, 1.0, 1.0, rounds or Rounds(10, 10, 100.0))


def at_speeds(speeds: dict[int, tuple[float, ...]]) -> list[GroupSample]:
    return [
        sample(name, load, 0, speed) for load, row in speeds.items() for name, speed in zip(NAMES, row, strict=True)
    ]


def recommended(speeds: dict[int, tuple[float, ...]]) -> list[tuple[int | None, str]]:
    table = recommend(measured(at_speeds(speeds), 2))
    return [(depth.requests, depth.drafter) for depth in table.depths]


def test_the_fastest_wins_at_every_load() -> None:
    speeds = {1: (100, 110, 120, 130), 4: (200, 210, 230, 190), 16: (300, 310, 290, 280), 64: (300, 290, 280, 270)}
    assert recommended(speeds) == [(1, "K=2"), (4, "K=1"), (16, "lookup"), (64, "plain")]


def test_neighbours_that_agree_become_one_entry_that_holds_up_to_the_larger_load() -> None:
    speeds = {1: (100, 100, 120, 130), 2: (100, 100, 120, 130), 8: (100, 100, 101, 90), 16: (100, 100, 90, 80)}
    assert recommended(speeds) == [(2, "K=2"), (16, "plain")]


@pytest.mark.parametrize(("speed", "drafter"), [(101.9, "plain"), (102.0, "K=1"), (102.1, "K=1")])
def test_drafting_must_win_two_percent(speed: float, drafter: str) -> None:
    assert recommended({1: (100, 100, speed, 50)}) == [(1, drafter)]


def test_runs_count_alike_however_fast_the_machine_was_in_them() -> None:
    speeds = {"plain": (100, 10, 100), "lookup": (90, 9, 90), "K=1": (110, 11, 90), "K=2": (90, 9, 200)}
    samples = [sample(name, 1, run, speed) for name, row in speeds.items() for run, speed in enumerate(row)]
    rows = {row.depth.drafter: row for row in measured(samples, 2)}
    assert rows["K=1"].ratio_to_plain.median == pytest.approx(1.1)
    assert rows["K=2"].ratio_to_plain.median == pytest.approx(0.9)
    assert recommend(list(rows.values())).depths == (Depth(1, 1),)


def test_groups_of_a_run_are_added_up_and_runs_are_not() -> None:
    groups = [(0, Rounds(10, 15, 100.0)), (0, Rounds(30, 35, 500.0)), (1, Rounds(10, 10, 50.0))]
    samples = [sample(name, 2, run, 100.0, rounds) for name in NAMES for run, rounds in groups]
    found = measured(samples, 2)[0]
    assert found.emitted_per_round == pytest.approx(60 / 50)
    assert (found.round_ms.least, found.round_ms.most) == (5.0, 15.0)  # 50 / 10 and 600 / 40
    assert found.total_tok_s.median == pytest.approx(100)
    assert found.to_json()["drafter"] == "plain"


class Scripted:
    """Notes whom it was asked to answer."""

    name = "plain"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer_together(self, prompts, max_tokens):  # type: ignore[no-untyped-def]
        from tiercel.bench.samples import Answer

        self.asked.append("".join(prompt.name for prompt in prompts))
        return [Answer((1, 2), 1.0, 2.0) for _ in prompts]


def test_every_prompt_is_asked_in_every_run() -> None:
    prompts = [BenchPrompt(name, (1,)) for name in "abc"]
    one = Scripted()
    run_groups([one], prompts, [2], 2, 2, every_prompt=True)
    assert one.asked == ["ab", "ab", "ca", "bc", "ab"]  # a warm-up, then two runs, each from a prompt further on


@pytest.fixture
def bench(toy_native: LoadedTarget, toy_draft: Path) -> Bench:
    return Bench(EngineConfig(max_batch_size=12), str(toy_draft), toy_native)


def test_contenders_draft_what_they_are_named_for_at_every_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.speculative.registry.CPU_MIN_CONFIDENCE", 0.0)  # random layers are never sure
    with ExitStack() as stack:
        llm = bench.open(stack, 0)
        prompts = encode(llm, {str(i): f"prompt {i}" for i in range(12)})
        found = contenders(bench.with_room(prompts, 9), stack, 3)
        answers = {one.name: one.answer_together(prompts, 9) for one in found}
        fixed = bench.contenders(stack, [None, 1, 3])
        answers |= {f"bench {one.name}": one.answer_together(prompts, 9) for one in fixed}
    assert [one.name for one in found] == ["plain", "lookup", "K=1", "K=2", "K=3"]
    assert len({tuple(answer.token_ids for answer in row) for row in answers.values()}) == 1
    drafted = {}
    for name, row in answers.items():
        firsts = [answer.spec["per_step_drafted"][0] for answer in row if answer.spec]
        drafted[name] = max(set(firsts), key=firsts.count)  # a prompt that repeats itself is looked up
    assert drafted == {
        "plain": 0,
        "lookup": 0,
        "K=1": 1,
        "K=2": 2,
        "K=3": 3,
        "bench plain": 0,
        "bench lookup": 0,
        "bench default": 0,
        "bench K=1": 1,
        "bench K=3": 3,
    }
