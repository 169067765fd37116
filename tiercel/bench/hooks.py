"""The hook calls of the round and of the engine, found in their source: left out or timed to measure what they cost.

Tests leave out and move each of them to show that the contract of the trace breaks.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from time import perf_counter_ns
from types import FunctionType
from typing import Any
from unittest import mock

from tiercel.engine.engine import Engine
from tiercel.observability.req_time_stats import MILESTONE_METHODS, STAGE_METHODS
from tiercel.speculative.base_worker import SpecWorker

OWNERS: tuple[type, ...] = (SpecWorker, Engine)
BATCH, HAND_OVERS = "set_time_batch", ("on_step", "on_request")
Block = list[ast.stmt]


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook call: which method holds it, the how-manieth in there, and what it says (a setter, or a hand-over)."""

    owner: type
    function: str
    index: int
    name: str

    @property
    def is_milestone(self) -> bool:
        """Whether the response needs it too."""
        return self.name in MILESTONE_METHODS and self.name != "set_retract_time"

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.function}: {self.name}"


@dataclass(frozen=True, slots=True)
class Place:
    """A statement's block and index, and the same of the statement that holds the block, outwards."""

    block: Block
    index: int
    outer: "Place | None"


def find_hooks() -> list[Hook]:
    """Every hook call there is."""
    return [
        hook
        for owner in OWNERS
        for name in _own_functions(owner)
        for hook, _ in _hooks(owner, name, _tree(owner, name))
    ]


@contextmanager
def rewritten(change: Callable[[Hook, Place], None], hooks: Sequence[Hook], **names: object) -> Iterator[None]:
    """Inside, each of ``hooks`` is changed: ``change`` edits the block that holds it, and its code may use ``names``.

    Methods are replaced on their classes, for all engines of the process, and put back afterwards.
    """
    wanted = set(hooks)
    with ExitStack() as stack:
        for owner, (name, value) in product(OWNERS, names.items()):
            stack.enter_context(mock.patch.object(sys.modules[owner.__module__], name, value, create=True))
        for owner, name in {(hook.owner, hook.function): None for hook in wanted}:
            tree = _tree(owner, name)
            for hook, place in reversed(_hooks(owner, name, tree)):  # from the end on, so that indices stay right
                if hook in wanted:
                    change(hook, place)
            stack.enter_context(mock.patch.object(owner, name, _compiled(owner, name, tree)))
        yield


def left_out(_: Hook, place: Place) -> None:
    """The change that takes a hook call out."""
    place.block[place.index] = ast.Pass()


class HookTimer:
    """Times hook calls: ``with rewritten(timer.change, hooks, timer=timer)``.

    ``spent`` holds the nanoseconds of every call by name, some hundred of them the timer's own.
    """

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = {}
        self._begun = 0

    def change(self, hook: Hook, place: Place) -> None:
        """The change that times a hook call."""
        call = place.block[place.index]
        begin, end = ast.parse(f"timer.begin()\ntimer.end({hook.name!r})").body
        place.block[place.index] = ast.If(ast.Constant(True), [begin, call, end], [])

    def begin(self) -> None:
        """The call begins."""
        self._begun = perf_counter_ns()

    def end(self, name: str) -> None:
        """The call has come back."""
        self.spent.setdefault(name, []).append(perf_counter_ns() - self._begun)


def _own_functions(owner: type) -> list[str]:
    return [name for name, value in vars(owner).items() if isinstance(value, FunctionType)]


def _tree(owner: type, name: str) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(vars(owner)[name])))


def _hooks(owner: type, name: str, tree: ast.Module) -> list[tuple[Hook, Place]]:
    found = [(said, place) for place in _places(tree.body, None) if (said := _said(place.block[place.index]))]
    return [(Hook(owner, name, index, said), place) for index, (said, place) in enumerate(found)]


def _places(block: Block, outer: Place | None) -> Iterator[Place]:
    for index, statement in enumerate(block):
        place = Place(block, index, outer)
        yield place
        for inner in ("body", "orelse", "finalbody"):
            yield from _places(getattr(statement, inner, []), place)


def _said(statement: ast.stmt) -> str | None:
    """The setter or hand-over that a statement calls; None for every other statement."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == BATCH:
        setter = call.args[1]
        return setter.value if isinstance(setter, ast.Constant) and isinstance(setter.value, str) else None
    return name if name in STAGE_METHODS | MILESTONE_METHODS or name in HAND_OVERS else None


def _compiled(owner: type, name: str, tree: ast.Module) -> Any:
    module = sys.modules[owner.__module__]
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), f"<{owner.__name__}.{name}, rewritten>", "exec")
    exec(code, vars(module), made)
    return made[name]
