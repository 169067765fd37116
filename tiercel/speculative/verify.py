"""Verification of drafts: which were right, and what the target says after them. Pure functions on the host.

A row's choice is what plain decoding would choose after the tokens on the row's path (``speculative.logits``), so following
the draft that equals it, from row to row, gives plain decoding's tokens, whatever was drafted and however.
"""

from collections.abc import Sequence

from tiercel.core.batch import VerifyOutput
from tiercel.core.tree import parent_of


def accept(
    drafts: list[list[int]], target_tokens: list[list[int]], parents: Sequence[Sequence[int]] = ()
) -> VerifyOutput:
    """Accept each request's drafts along the path that the target chooses.

    Args:
        drafts: per request, the proposed tokens d[0..k-1]; those that follow one draft differ.
        target_tokens: per request, k + 1 tokens: the target's choice after the last token, and after each d[j] on its path.
        parents: per request, the tree that the drafts form (see ``core.tree``); chains where it is left out.

    Returns:
        The accepted drafts, and the bonus token: the target's choice after the last of them.
    """
    trees = parents or [()] * len(drafts)
    accepted = [_path(d, t, p) for d, t, p in zip(drafts, target_tokens, trees, strict=True)]
    bonus = [t[path[-1] + 1 if path else 0] for t, path in zip(target_tokens, accepted, strict=True)]
    return VerifyOutput(drafts, [len(path) for path in accepted], bonus, accepted)


def _path(drafts: list[int], target_tokens: list[int], parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    last = -1
    for draft, token in enumerate(drafts):  # parents come first, so one walk finds the whole path
        if parent_of(parents, draft) == last and token == target_tokens[last + 1]:
            path.append(draft)
            last = draft
    return path
