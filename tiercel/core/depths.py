"""How much is drafted at which load: a step function from the number of requests to what drafts for each of them.

It is made from a rule (``max_verify_rows``) or measured by ``tiercel tune``. Greedy output is the same whatever it says.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from tiercel.core.errors import UserError

REASONS = ("fixed", "table", "start", "kept", "switched", "measure", "probe")
"""Why a step drafts with so many MTP layers: the method has no choice; the depth table says so; or, chosen while running: where
it began, still the best, better than the one before, being measured for the first time, or the first layer being asked again."""

FORMAT = "tiercel-depths-1"
"""What a file's ``format`` says; counts up when a field goes or changes its meaning."""


@dataclass(frozen=True, slots=True)
class Depth:
    """What drafts while ``requests`` requests run at most.

    Args:
        requests: requests in a batch, at least 1; None stands for any number.
        num_steps: MTP layers in use (K), one draft each per round; 0 leaves them out.
        lookup: whether prompt lookup drafts where it is on.

    Raises:
        UserError: a value is not of its type, or below its minimum.
    """

    requests: int | None
    num_steps: int
    lookup: bool = True

    def __post_init__(self) -> None:
        for name, value, minimum in (("requests", self.requests, 1), ("num_steps", self.num_steps, 0)):
            is_none = value is None and name == "requests"
            if not is_none and (type(value) is not int or value < minimum):
                raise UserError(f"{name}={value!r} is not allowed: give an integer of at least {minimum}")
        if type(self.lookup) is not bool:
            raise UserError(f"lookup={self.lookup!r} is not allowed: give true or false")

    @property
    def drafter(self) -> str:
        """``K=n``, ``lookup`` where only that drafts, or ``plain``."""
        if self.num_steps:
            return f"K={self.num_steps}"
        return "lookup" if self.lookup else "plain"


@dataclass(frozen=True, slots=True)
class DepthChoice:
    """MTP layers that a step's draft extend may use (K), and which of ``REASONS`` says so."""

    num_steps: int = 0
    reason: str = "fixed"


@dataclass(frozen=True, slots=True)
class DepthTable:
    """Depths by ascending number of requests.

    With more requests than the last entry names the MTP layers are left out, and prompt lookup is as there: nobody has said that
    drafting pays.

    Args:
        source: where it comes from: the rule, in words, or the file.
        depths: at least one.

    Raises:
        UserError: none, or not ascending.
    """

    source: str | Path
    depths: tuple[Depth, ...]

    def __post_init__(self) -> None:
        ends = [sys.maxsize if depth.requests is None else depth.requests for depth in self.depths]
        if not ends or any(a >= b for a, b in pairwise(ends)):
            raise UserError("depths must hold at least one entry, by ascending `requests` (null only in the last)")

    @classmethod
    def of_rows(cls, max_verify_rows: int, most: int) -> Self:
        """The rule of ``SpecConfig.max_verify_rows``: as many drafts, up to ``most``, as a verify of so many rows can hold.

        ``sys.maxsize`` rows set no limit.
        """
        if max_verify_rows == sys.maxsize:
            return cls("no limit", (Depth(None, most),))
        ends: dict[int, int] = {}
        for num_steps in range(most, 0, -1):
            ends.setdefault(max_verify_rows // (num_steps + 1), num_steps)
        limited = [Depth(requests, num_steps) for requests, num_steps in ends.items() if requests]
        return cls(f"max_verify_rows={max_verify_rows}", (*limited, Depth(None, 0)))

    @classmethod
    def fixed(cls, num_steps: int, *, lookup: bool = True) -> Self:
        """The same at every load."""
        return cls("fixed", (Depth(None, num_steps, lookup),))

    @classmethod
    def from_json(cls, data: object, source: str | Path) -> Self:
        """What ``to_json`` gave, read from ``source``; other fields beside it are passed over.

        Raises:
            UserError: not of this format, or a field of it is missing, unknown or wrong; the caller says where.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise UserError(f"it does not say format {FORMAT!r}")
        try:
            return cls(source, tuple(Depth(**entry) for entry in data["depths"]))
        except (KeyError, TypeError) as error:
            raise UserError(f"it lacks or misnames a field ({error})") from error

    def to_json(self) -> dict[str, Any]:
        """``{format, depths: [{requests, num_steps, lookup}, …]}``, as files hold it."""
        return {"format": FORMAT, "depths": [asdict(depth) for depth in self.depths]}

    def at(self, num_requests: int) -> Depth:
        """What drafts with so many requests in the batch."""
        for depth in self.depths:
            if depth.requests is None or num_requests <= depth.requests:
                return depth
        return replace(self.depths[-1], requests=None, num_steps=0)

    @property
    def most_steps(self) -> int:
        return max(depth.num_steps for depth in self.depths)

    def with_lookup(self) -> Self:
        """The same with prompt lookup at every load."""
        return replace(self, depths=tuple(replace(depth, lookup=True) for depth in self.depths))

    def __str__(self) -> str:
        """``up to 2: K=1, up to 4: lookup, more: plain``: loads at which the same drafts are named once."""
        ends: list[tuple[int | None, str]]
        ends = [(depth.requests, depth.drafter) for depth in self.depths if depth.requests is not None]
        ends.append((None, self.at(sys.maxsize).drafter))
        last_of_run = [entry for entry, following in pairwise(ends) if entry[1] != following[1]]
        if not last_of_run:
            return f"{ends[-1][1]} at any load"
        return ", ".join([*(f"up to {end}: {drafter}" for end, drafter in last_of_run), f"more: {ends[-1][1]}"])
