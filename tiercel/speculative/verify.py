"""Verification of a chain of drafts: which were right, and what the target says after them. Pure functions on the host."""

from tiercel.core.batch import VerifyOutput


def accept_chain(drafts: list[list[int]], target_tokens: list[list[int]]) -> VerifyOutput:
    """Accept each request's drafts up to the first that differs from the target's choice.

    Args:
        drafts: per request, the proposed tokens d[0..k-1].
        target_tokens: per request, k + 1 tokens; entry j is the target's choice after the last token and d[0..j-1].

    Returns:
        Counts of correct drafts, and the bonus token: the target's choice after the last correct draft.
    """
    counts = [_matching(d, t) for d, t in zip(drafts, target_tokens, strict=True)]
    return VerifyOutput(drafts, counts, [t[c] for t, c in zip(target_tokens, counts, strict=True)])


def _matching(drafts: list[int], target_tokens: list[int]) -> int:
    return next((j for j, draft in enumerate(drafts) if draft != target_tokens[j]), len(drafts))
