"""Gumbel noise that belongs to a position, not to a step."""

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor


class GumbelNoise:
    """Gumbel noise by (seed, position), float32 ``[vocab_size]``; the latest rows are kept, since drafts and verify share them.

    Philox (Salmon et al., 2011) is counter-based: its key is the pair itself, and no state is carried from call to call.
    """

    KEPT_ROWS = 256

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def row(self, seed: int, position: int) -> Tensor:
        """Noise of one position, on the host."""
        key = (seed, position)
        found = self._rows.get(key)
        if found is None:
            generator = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
            found = torch.from_numpy(generator.gumbel(size=self.vocab_size).astype(np.float32))
            self._rows[key] = found
            if len(self._rows) > self.KEPT_ROWS:
                self._rows.popitem(last=False)
        return found
