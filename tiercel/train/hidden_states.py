"""The target's hidden states, computed once and kept on disk: later passes cost only the draft layers."""

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.attention import DenseAttention
from tiercel.models.decoder import Decoder
from tiercel.train.data import Conversation, pad


class HiddenStateCache:
    """Hidden states before the final norm, bfloat16, of every conversation; filled where first asked for.

    Two files in ``folder``: ``hidden.bf16`` (``[total tokens, hidden_size]``) and ``done.u8`` (one flag a conversation).
    ``key.json`` ties them to target and data, so that a changed data set is refused rather than misread.
    """

    def __init__(self, folder: Path, target: Decoder, fingerprint: str, conversations: list[Conversation]) -> None:
        self.target, self.conversations = target, conversations
        lengths = np.array([len(c) for c in conversations])
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error
        digest = hashlib.sha256(repr([c.token_ids for c in conversations]).encode()).hexdigest()
        key = json.dumps({"target": fingerprint, "data": digest})
        fresh = not (folder / "key.json").exists()
        if not fresh and (folder / "key.json").read_text() != key:
            raise UserError(f"{folder} caches another target or other data: remove it or choose another --out")
        size = (int(self.offsets[-1]), target.description.hidden_size)
        mode: Literal["w+", "r+"] = "w+" if fresh else "r+"
        self.states = np.memmap(folder / "hidden.bf16", np.int16, mode, shape=size)
        self.done = np.memmap(folder / "done.u8", np.uint8, mode, shape=(len(conversations),))
        (folder / "key.json").write_text(key)

    def batch(self, indices: list[int]) -> Tensor:
        """Hidden states of some conversations, zero-padded on the right: bfloat16 ``[batch, longest, hidden_size]``."""
        missing = [i for i in indices if not self.done[i]]
        if missing:
            self._compute(missing)
        longest = max(len(self.conversations[i]) for i in indices)
        padded = torch.zeros(len(indices), longest, self.states.shape[1], dtype=torch.bfloat16)
        for row, index in enumerate(indices):
            piece = self.states[self.offsets[index] : self.offsets[index + 1]]
            padded[row, : len(piece)] = torch.from_numpy(np.array(piece)).view(torch.bfloat16)
        return padded

    @torch.inference_mode()
    def _compute(self, indices: list[int]) -> None:
        conversations = [self.conversations[i] for i in indices]
        token_ids = pad(conversations)
        batch, longest = token_ids.shape
        positions = torch.arange(longest).repeat(batch)
        hidden = self.target(token_ids.flatten(), positions, DenseAttention(batch)).to(torch.bfloat16)
        rows = hidden.view(batch, longest, -1).view(torch.int16).numpy()
        for row, index in enumerate(indices):
            length = len(self.conversations[index])
            self.states[self.offsets[index] : self.offsets[index + 1]] = rows[row, :length]
            self.done[index] = 1
