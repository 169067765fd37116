"""Trees of drafts, as parents: ``parents[j]`` is the draft that draft j follows, -1 the request's last token.

Parents come before their children. ``()`` stands for a chain, in which every draft follows the one before.
"""

from collections.abc import Sequence


def parent_of(parents: Sequence[int], draft: int) -> int:
    """The draft that ``draft`` follows, or -1."""
    return parents[draft] if parents else draft - 1


def paths(parents: Sequence[int]) -> list[list[int]]:
    """For every draft, the drafts from the first position to itself."""
    found: list[list[int]] = []
    for draft, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else ()), draft])
    return found


def depth_of(parents: Sequence[int], num_drafts: int) -> int:
    """Positions that ``num_drafts`` drafts reach."""
    return max(map(len, paths(parents)), default=0) if parents else num_drafts
