"""Prompt lookup: where the end of a text occurred before, what followed then is a draft (Saxena, 2023)."""


def worth_verifying(found: list[int], most: int, rows: int) -> list[int]:
    """What of a lookup's drafts pays where ``rows`` drafts per request would fill a verify.

    A match as long as the longest draft is right nine times in ten: such a draft pays for its rows however many requests
    there are.
    """
    return found if len(found) == most else found[:rows]


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

    def continuation(self, token_ids: list[int], limit: int) -> list[int]:
        """What may follow ``token_ids``: as many tokens as agree at its end with an earlier occurrence, ``limit`` at most.

        Args:
            token_ids: the text of the call before, and what has come since.
            limit: tokens at most.

        Returns:
            The tokens that followed the occurrence, and beyond the text's end the same again; empty where fewer than ``match``
            tokens agree.
        """
        match, length = self.match, len(token_ids)
        for end in range(self.next_end, length):
            self.ends[tuple(token_ids[end - match : end])] = end
        self.next_end = max(self.next_end, length)
        found = self.ends.get(tuple(token_ids[-match:])) if length > match else None
        if found is None:
            return []
        agreed = match
        while agreed < min(limit, found) and token_ids[found - agreed - 1] == token_ids[length - agreed - 1]:
            agreed += 1
        period = length - found
        return [token_ids[found + i % period] for i in range(min(agreed, limit))]
