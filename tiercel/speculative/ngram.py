"""Prompt lookup: where the end of a text occurred before, what followed then is a draft (Saxena, 2023)."""

from typing import NamedTuple

CERTAIN = 14
"""Tokens that agree where a draft is right 95 times in 100 in its first token, and four times in five in all of them."""


class Continuation(NamedTuple):
    """A draft, and whether so much of the text agrees that it pays for its rows however many requests there are."""

    token_ids: list[int]
    is_certain: bool

    def worth_verifying(self, rows: int) -> list[int]:
        """What pays where ``rows`` drafts per request would fill a verify."""
        return self.token_ids if self.is_certain else self.token_ids[:rows]


NOTHING = Continuation([], False)


class NgramIndex:
    """Where each run of ``match`` tokens of one growing text ended last.

    The latest occurrence is taken: on answers of a chat model its continuation is right as often as that of the longest
    match, which a suffix automaton finds, and it costs one dictionary entry per token.

    Args:
        match: tokens, at least 1.
    """

    def __init__(self, match: int) -> None:
        self.match = match
        self.ends: dict[tuple[int, ...], int] = {}
        self.next_end = match

    def continuation(self, token_ids: list[int], limit: int) -> Continuation:
        """What may follow ``token_ids``: as many tokens as agree at its end with an earlier occurrence, ``limit`` at most.

        Args:
            token_ids: the text of the call before, and what has come since.
            limit: tokens at most.

        Returns:
            The tokens that followed the occurrence, and beyond the text's end the same again; none where fewer than ``match``
            tokens agree.
        """
        match, length = self.match, len(token_ids)
        for end in range(self.next_end, length):
            self.ends[tuple(token_ids[end - match : end])] = end
        self.next_end = max(self.next_end, length)
        found = self.ends.get(tuple(token_ids[-match:])) if length > match else None
        if found is None:
            return NOTHING
        agreed, enough = match, min(max(limit, CERTAIN), found)
        while agreed < enough and token_ids[found - agreed - 1] == token_ids[length - agreed - 1]:
            agreed += 1
        period = length - found
        return Continuation([token_ids[found + i % period] for i in range(min(agreed, limit))], agreed >= CERTAIN)
