"""Hidden states of the target that a draft has still to read."""

import torch
from torch import Tensor


class KeptHidden:
    """The target's hidden states of a request's rows ``start ..``, as they came; each piece is ``[rows, hidden_size]``."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.pieces: list[Tensor] = []

    def append(self, hidden: Tensor) -> None:
        """Add the rows that follow."""
        self.pieces.append(hidden)
        self.end += len(hidden)

    def since(self, row: int) -> Tensor:
        """Rows ``row .. end - 1``."""
        found, first = [], self.end
        for piece in reversed(self.pieces):
            if first <= row:
                break
            first -= len(piece)
            found.append(piece)
        return torch.cat(found[::-1])[row - first :]

    def forget_before(self, row: int) -> None:
        """Let go of rows before ``row``; whole pieces stay until none of their rows is needed."""
        while self.pieces and self.start + len(self.pieces[0]) <= row:
            self.start += len(self.pieces.pop(0))
