"""The choice of K, on a simulated machine: what a round costs and how often drafts are right are given."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tiercel.core.batch import ForwardMode, RequestRound, StepRecord
from tiercel.core.depths import Depth, DepthTable
from tiercel.core.request import SOURCE_NGRAM
from tiercel.speculative.adaptive import TRIAL, AdaptiveDepth, RoundCosts, RunningAcceptance

Cost = Callable[[int, int], tuple[float, float]]
"""(requests, layers) to milliseconds of verify and of draft extend."""


class Machine:
    """Plays rounds as an engine would, with costs that jitter and drafts that are right by chance."""

    def __init__(self, cost: Cost, acceptance: Sequence[float], start: int = 1, layers: int = 3, seed: int = 0) -> None:
        self.cost, self.acceptance = cost, acceptance
        self.random = random.Random(seed)
        self.depth = AdaptiveDepth(layers, DepthTable.fixed(start))
        self.made = 0
        self.clock = self.tokens = 0
        self.chosen: list[tuple[int, str]] = []
        self.skipped: dict[str, int] = {}

    def round(self, request_ids: Sequence[str], *, slow: float = 1.0, looked_up: bool = False) -> None:
        choice = self.depth.choose(len(request_ids))
        verify, extend = self.cost(len(request_ids), self.made)[0], self.cost(len(request_ids), choice.num_steps)[1]
        jitter = slow * self.random.uniform(0.9, 1.1) * (3.0 if self.random.random() < 0.02 else 1.0)
        rounds = []
        for request_id in request_ids:
            correct = 0
            while correct < self.made and self.random.random() < self.acceptance[correct]:
                correct += 1
            sources = (SOURCE_NGRAM,) if looked_up else tuple(range(self.made))
            correct = min(correct, len(sources))
            rounds.append(RequestRound(request_id, 0, 10, (1,) * len(sources), sources, 0, correct, 2, correct + 1))
            self.tokens += correct + 1
            if choice.reason == "probe":
                hits = [self.random.random() < self.acceptance[0] for _ in range(self.skipped.pop(request_id, 0))]
                self.depth.scored(request_id, hits)
            else:
                self.skipped[request_id] = 0 if choice.num_steps else self.skipped.get(request_id, 0) + 1
        self.made = 1 if choice.reason == "probe" else choice.num_steps
        start = self.clock
        middle = start + round(verify * jitter * 1e6)
        self.clock = middle + round((extend * jitter + (1.0 if choice.reason == "probe" else 0.0)) * 1e6)
        record = StepRecord(0, ForwardMode.DECODE, "multi-layer-eagle", rounds=rounds)
        record.start_ns, record.end_ns = start, self.clock
        record.draft_extend_start_ns, record.draft_extend_end_ns = middle, self.clock
        record.num_steps, record.depth_reason = choice.num_steps, choice.reason
        self.chosen.append((choice.num_steps, choice.reason))
        self.depth.observe(record)

    def play(self, rounds: int, request_ids: Sequence[str] = ("a",), **how: float) -> float:
        """Tokens per millisecond."""
        clock, tokens = self.clock, self.tokens
        for _ in range(rounds):
            self.round(request_ids, **how)
        return (self.tokens - tokens) / (self.clock - clock) * 1e6


def cpu(requests: int, layers: int) -> tuple[float, float]:
    """Rows are cheap for one request and cost their arithmetic for many; a layer reads its weights."""
    rows = requests * (1 + layers)
    return 2.5 + 0.15 * rows + max(0, rows - 8) * 0.4, layers * (0.7 + 0.05 * requests)


def fixed_rate(cost: Cost, acceptance: Sequence[float], layers: int, requests: int = 1) -> float:
    verify, extend = cost(requests, layers)
    expected, reach = 1.0, 1.0
    for share in acceptance[:layers]:
        reach *= share
        expected += reach
    return requests * expected / (verify + extend)


@pytest.mark.parametrize("acceptance", [(0.1, 0.1, 0.1), (0.45, 0.3, 0.2), (0.7, 0.5, 0.4), (0.95, 0.9, 0.9)])
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_it_comes_close_to_the_best_fixed_depth(acceptance: Sequence[float], start: int, requests: int) -> None:
    machine = Machine(cpu, acceptance, start)
    ids = [f"r{i}" for i in range(requests)]
    machine.play(300, ids)
    rate = machine.play(1500, ids)
    rates = [fixed_rate(cpu, acceptance, k, requests) for k in range(4)]
    # Jitter has a mean of 1.04 and hits every depth alike; probes and trials have their price.
    assert rate * 1.04 > 0.94 * max(rates), (rate, rates, Counter(machine.chosen))


def test_where_drafts_never_pay_one_trial_is_all_the_price() -> None:
    machine = Machine(lambda n, k: (3.0 + k * n, 1.0 * k), (0.3, 0.1, 0.1), start=0)
    for size in (1, 2, 8, 64):
        machine.play(500, [f"r{i}" for i in range(size)])
    drafted = Counter(machine.chosen)
    assert drafted.pop((1, "measure"), 0) < 2 * TRIAL
    assert set(drafted) <= {(0, "start"), (0, "kept")}, drafted


def test_a_request_whose_drafts_turn_right_is_drafted_for() -> None:
    machine = Machine(cpu, (0.05, 0.0, 0.0))
    machine.play(400)
    assert machine.chosen[-1][0] == 0
    assert (0, "probe") in machine.chosen
    machine.acceptance = (0.9, 0.3, 0.1)
    machine.play(400)
    assert machine.chosen[-1][0] >= 1
    assert (1, "switched") in machine.chosen


def test_a_request_is_judged_by_its_own_drafts() -> None:
    machine = Machine(cpu, (0.85, 0.2, 0.1))
    machine.play(400, ["good"])
    assert machine.chosen[-1][0] >= 1
    machine.acceptance = (0.05, 0.0, 0.0)
    machine.play(120, ["bad"])
    assert machine.chosen[-1][0] == 0
    machine.depth.forget("good")
    assert set(machine.depth.acceptance.own) == {"bad"}


def test_it_rarely_changes_its_mind() -> None:
    machine = Machine(cpu, (0.45, 0.3, 0.2))
    machine.play(2000)
    assert sum(reason == "switched" for _, reason in machine.chosen) <= 20


def test_a_slower_machine_changes_nothing() -> None:
    machine = Machine(cpu, (0.7, 0.3, 0.2))
    machine.play(400)
    before = machine.depth.loads[0].num_steps
    machine.play(100, slow=4.0)
    assert machine.depth.loads[0].num_steps == before


def test_loads_are_kept_apart() -> None:
    machine = Machine(cpu, (0.6, 0.3, 0.2))
    ids = [f"r{i}" for i in range(16)]
    for _ in range(10):
        machine.play(60, ["a"])
        machine.play(60, ids)
    assert machine.depth.loads[0].num_steps >= 1
    assert machine.depth.loads[4].num_steps == 0


def test_rounds_of_prompt_lookup_say_nothing_about_layers() -> None:
    machine = Machine(cpu, (0.6, 0.3, 0.2))
    for _ in range(100):
        machine.round(["a"], looked_up=True)
    assert machine.depth.acceptance.own == {}
    assert machine.depth.loads[0].costs.of(1) is None


def test_a_table_says_where_to_begin() -> None:
    depth = AdaptiveDepth(2, DepthTable("rule", (Depth(1, 3), Depth(4, 1), Depth(None, 0))))
    assert [depth.choose(n).num_steps for n in (1, 2, 4, 5, 64)] == [2, 1, 1, 0, 0]
    assert depth.choose(1).reason == "start"


def test_acceptance_begins_with_the_others_and_follows_its_own() -> None:
    acceptance = RunningAcceptance(2)
    for _ in range(500):
        acceptance.add("others", [True, False])
    fresh = acceptance.of("new")
    assert fresh[0] > 0.9
    assert fresh[1] < 0.1
    for _ in range(100):
        acceptance.add("new", [False, False])
    assert acceptance.of("new")[0] < 0.35
    assert acceptance.tokens(["others", "new"], 1) == pytest.approx(
        2 + acceptance.of("others")[0] + acceptance.of("new")[0]
    )


def test_costs_move_together_with_the_context() -> None:
    costs = RoundCosts()
    for _ in range(10):
        costs.add_verify(0, 100.0, in_force=False)
        costs.add_extend(0, 0.0)
        costs.add_verify(1, 110.0, in_force=True)
        costs.add_extend(1, 10.0)
    assert costs.relative(1) == pytest.approx(1.2, abs=0.01)
    for _ in range(20):
        costs.add_verify(1, 220.0, in_force=True)
    assert costs.of(0) == pytest.approx(200.0, rel=0.02)
