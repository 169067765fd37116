"""Each hook call of the round and the engine left out, and moved, in turn: the contract must break every time.

The contract is what ``histories.check`` demands of a run's numbers, and here the order of hooks and work, call by call.
"""

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conformance.histories import History, Run, Wish, check, play, scripted
from tiercel.bench.hooks import Hook, Place, find_hooks, left_out, rewritten
from tiercel.core.batch import StepRecord
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.observability import req_time_stats
from tiercel.observability.pipeline import TracePipeline
from tiercel.observability.req_time_stats import MILESTONE_METHODS, STAGE_METHODS, Mark, ReqTimeStats

HISTORY = History(
    [Wish([7] * 6, 12), Wish([8] * 12, 30, stop_at=20), Wish([9] * 9, 30), Wish([10] * 5, 30, abort_at=9)]
)
"""Preemption, a stop inside a round, an abort, prompts in chunks."""
BEFORE = "(forget (retract |completion on_request ))*"
EXTEND = "(forward_entry )+now now (now draft_extend now |now now )(prefill_finished )*update on_step "
DECODE = (
    "now spec_draft_start draft now spec_draft_end now spec_verify_start verify now (spec_verify_end )+_commit "
    "now (spec_draft_extend_start draft_extend now spec_draft_extend_end |now )update on_step "
)
STEPS = re.compile(f"(wait_queue_entry add )*({BEFORE}({EXTEND}|{DECODE}))*{BEFORE}")
"""What comes in which order: ends and preemptions between steps, and inside a step hooks and work."""
Move = Callable[[Hook, Place], None]


class Log:
    """Every hook and every piece of work, in the order in which they came; work inside of work is left out."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.marks: list[Mark] = []
        self.depth = 0
        self.spent_ns: dict[str, int] = {}

    def work(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def logged(*args: Any, **more: Any) -> Any:
            if self.depth == 0:
                self.events.append(name)
            self.depth += 1
            try:
                return call(*args, **more)
            finally:
                self.depth -= 1

        return logged

    def mark(self, method: str, ts_ns: int, requests: tuple[ReqTimeStats, ...], attrs: Any = None) -> Mark:
        self.events.append(short(method))
        self.marks.append(Mark(method, ts_ns, requests, attrs))
        return self.marks[-1]

    def on_step(self, engine: Engine, record: StepRecord) -> None:
        """The step is whole when it is handed over, its marks say what it says, and so do its requests."""
        self.events.append("on_step")
        moments = [record.start_ns, record.draft_start_ns, record.draft_end_ns, record.verify_start_ns]
        moments += [record.verify_end_ns, record.draft_extend_start_ns, record.draft_extend_end_ns, record.end_ns]
        assert all(0 < before <= after for before, after in pairwise(moments))
        decoding = [done.request_id for done in record.rounds]
        for mark in self.marks:
            if mark.method != "set_retract_time":
                assert mark.ts_ns == getattr(record, f"{short(mark.method).removeprefix('spec_')}_ns")
                assert {one.request_id for one in mark.requests} <= set(decoding)
            if short(mark.method) in ("spec_draft_start", "spec_draft_end", "spec_verify_start"):
                assert [one.request_id for one in mark.requests] == decoding
        said = {m.requests[0].request_id: m.attrs for m in self.marks if short(m.method) == "spec_verify_end"}
        assert said == {r.request_id: {"num_correct_drafts": r.num_correct_drafts} for r in record.rounds}
        self.marks.clear()
        for name in decoding:
            self.spent_ns[name] = self.spent_ns.get(name, 0) + sum(record.stage_ns.values())
            assert sum(engine.requests[name].spec.stage_ns.as_ms().values()) == pytest.approx(self.spent_ns[name] / 1e6)


def short(method: str) -> str:
    return method.removeprefix("set_").removesuffix("_time")


@contextmanager
def watching(log: Log) -> Iterator[Callable[[Engine], None]]:
    """Everything that passes is logged; gives what is to be shown the engine."""

    def watch(engine: Engine) -> None:
        log.events.clear()  # plain decoding went before
        for name in ("now", "draft", "verify", "_commit", "draft_extend", "forget"):
            setattr(engine.worker, name, log.work(name, getattr(engine.worker, name)))
        for name in ("add", "update"):
            setattr(engine.scheduler, name, log.work(name, getattr(engine.scheduler, name)))
        hand_over = engine.pipeline.on_step

        def on_step(record: StepRecord) -> None:
            log.on_step(engine, record)
            hand_over(record)

        engine.pipeline.on_step = on_step  # type: ignore[method-assign]

    with (
        mock.patch.object(req_time_stats, "Mark", log.mark),
        mock.patch.object(TracePipeline, "on_request", log.work("on_request", TracePipeline.on_request)),
    ):
        milestones = {
            name: log.work(short(name), getattr(ReqTimeStats, name))
            for name in MILESTONE_METHODS - {"set_retract_time"}
        }
        with mock.patch.multiple(ReqTimeStats, **milestones):
            yield watch


def contract(target: LoadedTarget, folder: Path) -> Run:
    """Play the history; raises whatever breaks."""
    log = Log()
    with watching(log) as watch:
        run = play(scripted(target, HISTORY), target, HISTORY, folder, watch)
    assert STEPS.fullmatch("".join(f"{event} " for event in log.events))
    check(run, HISTORY)
    return run


class NowhereError(Exception):
    """There is no work in that direction to be moved past."""


def moved_earlier(_: Hook, place: Place) -> None:
    """Before the nearest statement that works, or else out of the block."""
    found = [index for index in range(place.index) if does_work(place.block[index])]
    put(place, found[-1] if found else None, 0)


def moved_later(_: Hook, place: Place) -> None:
    """After the nearest statement that works, or else out of the block."""
    found = [index for index in range(place.index + 1, len(place.block)) if does_work(place.block[index])]
    put(place, found[0] if found else None, 1)


def put(place: Place, target: int | None, behind: int) -> None:
    hook = place.block[place.index]
    block, index = place.block, target
    if index is None:
        if place.outer is None or place.outer.outer is None:  # the function itself
            raise NowhereError
        block, index = place.outer.block, place.outer.index
    place.block[place.index] = ast.Pass()
    block.insert(index + behind, hook)


def does_work(statement: ast.stmt) -> bool:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func).startswith("self.") for call in calls)


def is_possible(hook: Hook, change: Move) -> bool:
    try:
        with rewritten(change, [hook]):
            return True
    except NowhereError:
        return False


CHANGES: list[tuple[Hook, Move]] = [
    (hook, change)
    for hook in find_hooks()
    for change in (left_out, moved_earlier, moved_later)
    if is_possible(hook, change)
]


def test_the_contract_holds(toy_native: LoadedTarget, tmp_path: Path) -> None:
    run = contract(toy_native, tmp_path)
    assert sum(record.num_preemptions for record in run.responses.values()) > 0
    assert {record.finish_reason for record in run.responses.values()} == {"stop", "length", "abort"}
    assert max(len(step.rounds) for step in run.steps) > 1


def test_every_setter_is_called_somewhere() -> None:
    assert {hook.name for hook in find_hooks()} == STAGE_METHODS | MILESTONE_METHODS | {"on_step", "on_request"}
    assert len([change for _, change in CHANGES if change is left_out]) == len(find_hooks())
    assert len([change for _, change in CHANGES if change is not left_out]) > len(find_hooks())


@pytest.mark.parametrize(("hook", "change"), CHANGES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_it_breaks_without_each_hook_in_its_place(
    hook: Hook, change: Move, toy_native: LoadedTarget, tmp_path: Path
) -> None:
    with rewritten(change, [hook]):
        try:
            contract(toy_native, tmp_path)
        except Exception:
            return
    pytest.fail(f"nothing notices that {hook} is {change.__name__.replace('_', ' ')}")
