"""Medians, spreads and ratios against numbers worked out by hand."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from tiercel.bench.chart import bars
from tiercel.bench.latency import acceptance_length, differing, round_ms, stage_ms
from tiercel.bench.overhead import is_noise
from tiercel.bench.peers import best_other, equal_leading_tokens, ratios
from tiercel.bench.samples import (
    Answer,
    BenchPrompt,
    Sample,
    Samples,
    Spread,
    check_answer,
    decode_tok_s,
    end_to_end_tok_s,
    first_token_ms,
)
from tiercel.bench.throughput import GroupSample, summary
from tiercel.bench.turns import take_turns
from tiercel.core.errors import UserError


def sample(
    contender: str, run: int, prompt: str, tokens: Sequence[int], first: float, total: float, **spec: object
) -> Sample:
    return Sample(contender, run, prompt, Answer(tuple(tokens), first, total, spec or None))


def test_a_run_weighs_its_prompts_by_time_and_speeds_are_kept_apart() -> None:
    found = [sample("a", 0, "1", range(11), 20, 120), sample("a", 0, "2", range(11), 40, 340)]
    assert first_token_ms(found) == 30
    assert decode_tok_s(found) == pytest.approx(20 / 0.4)  # 20 tokens after the first in 100 + 300 ms
    assert end_to_end_tok_s(found) == pytest.approx(22 / 0.46)


def test_ratios_are_taken_within_a_run() -> None:
    def at(contender: str, run: int, decode: float) -> Sample:
        return sample(contender, run, "1", range(3), 1, 1 + decode)

    samples = Samples(
        [at("a", 0, 10), at("b", 0, 20), at("a", 1, 100), at("b", 1, 300), at("a", 2, 10), at("b", 2, 10)]
    )
    assert samples.ratio("a", "b", decode_tok_s) == Spread(2.0, 1.0, pytest.approx(3.0), 3)
    assert samples.spread("a", decode_tok_s) == Spread(200.0, 20.0, 200.0, 3)


def test_rounds_and_acceptance_are_summed_over_answers() -> None:
    def counts(rounds: int, correct: int, verify: float) -> dict[str, object]:
        times = {"draft": 1.0, "verify": verify, "draft_extend": 2.0, "other": 0.0}
        return {"num_spec_steps": rounds, "num_accepted_draft_tokens": correct, "stage_time_ms": times}

    found = [
        sample("a", 0, "1", [1, 2], 1, 2, **counts(10, 5, 30.0)),
        sample("a", 0, "2", [1, 2], 1, 2, **counts(30, 7, 10.0)),
    ]
    assert acceptance_length(found) == pytest.approx(1 + 12 / 40)
    assert stage_ms("verify")(found) == pytest.approx(1.0)
    assert round_ms(found) == pytest.approx(46 / 40)


def test_differing_tokens_are_named_once() -> None:
    rows = [("plain", "1", 7), ("plain", "2", 8), ("K=1", "1", 7), ("K=1", "2", 9), ("K=1", "2", 9)]
    samples = Samples([sample(name, run, prompt, [1, last], 1, 2) for run, (name, prompt, last) in enumerate(rows)])
    assert differing(samples) == [("K=1", "2")]


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [
        (Spread(1.01, 1.0, 1.02, 3), Spread(1.0, 0.98, 1.02, 3), True),
        (Spread(1.03, 1.02, 1.05, 3), Spread(1.0, 0.98, 1.02, 3), False),
        (Spread(0.999, 0.9, 1.1, 3), Spread(0.99, 0.98, 0.995, 3), True),
        (Spread(0.9, 0.9, 0.9, 3), Spread(1.0, 0.98, 1.02, 3), False),
    ],
)
def test_a_cost_below_the_noise(ratio: Spread, noise: Spread, verdict: bool) -> None:
    assert is_noise(ratio, noise) is verdict


def test_groups_are_compared_at_the_same_concurrency_and_run() -> None:
    def group(contender: str, run: int, concurrency: int, wall: float) -> GroupSample:
        return GroupSample(contender, run, concurrency, 10 * concurrency, wall, 1.0, 2.0)

    rows = [("plain", 0, 1, 100), ("K=3", 0, 1, 50), ("plain", 0, 4, 100), ("K=3", 0, 4, 200), ("plain", 1, 1, 10)]
    found = summary([group(*row) for row in [*rows, ("K=3", 1, 1, 40)]])
    by_name = {(row["concurrency"], row["contender"]): row for row in found}
    assert by_name[1, "K=3"]["total_ratio_to_plain"] == {"median": 1.125, "least": 0.25, "most": 2.0, "count": 2}
    assert by_name[4, "K=3"]["total_ratio_to_plain"]["median"] == 0.5
    assert by_name[4, "plain"]["total_tok_s"]["median"] == pytest.approx(400)


def test_ratios_to_peers() -> None:
    times = {"Tiercel plain": 10, "Tiercel K=1": 5, "llama.cpp plain": 20, "llama.cpp lookup": 15}
    samples = Samples([sample(name, 0, "1", range(3), ms, 2 * ms) for name, ms in times.items()])
    found = ratios(samples)
    assert list(found) == ["Tiercel plain", "Tiercel K=1"]
    against = found["Tiercel K=1"]
    assert {name: row["decode_tok_s"]["median"] for name, row in against.items()} == {
        "Tiercel plain": 2,
        "llama.cpp plain": 4,
        "llama.cpp lookup": 3,
    }
    assert against["llama.cpp plain"]["first_token_ms"]["median"] == 4  # theirs is four times ours
    assert best_other(samples, "llama.cpp") == "llama.cpp lookup"


def test_equal_leading_tokens() -> None:
    assert equal_leading_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert equal_leading_tokens([1, 2], [1, 2, 4]) == 2
    assert equal_leading_tokens([5], [1]) == 0


class Scripted:
    """Notes its turns; answers with as many tokens as it was told to."""

    def __init__(self, name: str, turns: list[tuple[str, str]], tokens: int = 2) -> None:
        self.name, self.turns, self.tokens = name, turns, tokens

    def answer(self, prompt: BenchPrompt, max_tokens: int) -> Answer:
        self.turns.append((self.name, prompt.name))
        return Answer((1,) * self.tokens, 1.0, 2.0)


PROMPTS = [BenchPrompt("p", (1,)), BenchPrompt("q", (2,))]


def test_contenders_take_turns_and_the_warm_up_is_not_counted() -> None:
    turns: list[tuple[str, str]] = []
    samples = take_turns([Scripted("a", turns), Scripted("b", turns)], PROMPTS, 2, 2)
    once = [("a", "p"), ("b", "p"), ("a", "q"), ("b", "q")]
    assert turns == [("a", "p"), ("b", "p"), *once, *once]
    assert [(s.contender, s.prompt) for s in samples.all] == [*once, *once]
    assert [s.run for s in samples.all] == [0] * 4 + [1] * 4


def test_a_missing_token_fails() -> None:
    with pytest.raises(UserError, match="b gave 1 of 2 tokens for prompt p"):
        take_turns([Scripted("a", []), Scripted("b", [], tokens=1)], PROMPTS, 2, 1)


@pytest.mark.parametrize(("first", "total"), [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
def test_impossible_times_fail(first: float, total: float) -> None:
    with pytest.raises(UserError, match="prompt p"):
        check_answer(Answer((1, 2), first, total), "a", PROMPTS[0], 2)


def test_the_chart_draws_bars_to_scale() -> None:
    picture = ET.fromstring(
        bars("a < b", {"x & y": Spread(50, 40, 60, 3), "z": Spread(100, 90, 120, 3)}, frozenset({"z"}))
    )
    space = "{http://www.w3.org/2000/svg}"
    _, first, second = picture.findall(f"{space}rect")
    assert float(second.attrib["width"]) == pytest.approx(2 * float(first.attrib["width"]), rel=0.01)
    assert first.attrib["fill"] != second.attrib["fill"]
    assert [t.text for t in picture.findall(f"{space}text")] == ["a < b", "x & y", "50.0", "z", "100.0"]
