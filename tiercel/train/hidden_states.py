"""The target's hidden states, computed once and kept on disk: later passes, and later runs, cost only the draft layers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.attention import DenseAttention
from tiercel.models.decoder import Decoder
from tiercel.train.data import Conversation, pad

WIDTH = torch.bfloat16.itemsize


class HiddenStateCache:
    """Hidden states before the final norm, bfloat16, of every conversation; filled where first asked for.

    ``folder`` holds ``hidden.bf16`` (conversation after conversation, each ``[tokens, hidden_size]``), ``index.jsonl`` (one
    line each: the hash of its token ids, its first byte and its bytes) and ``key.json``, which ties both to the target. A
    conversation is found by its tokens, so runs with other data may share a folder. Both files only grow, each time by one
    write, so that two runs at once, or one that dies, can waste space but never mix states up.

    Raises:
        UserError: the folder cannot be written, belongs to another target, or is damaged.
    """

    def __init__(self, folder: Path, target: Decoder, fingerprint: str, conversations: list[Conversation]) -> None:
        self.target, self.conversations = target, conversations
        self.names = [_name(c) for c in conversations]
        self.states, self.index = folder / "hidden.bf16", folder / "index.jsonl"
        key, wanted = folder / "key.json", json.dumps({"target": fingerprint})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.states.touch()
            self.index.touch()
            if not key.exists():
                key.write_text(wanted, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error
        if key.read_text(encoding="utf-8") != wanted:
            raise UserError(f"{folder} caches another target: remove it or choose another folder")
        self.starts = self._read_index()

    def batch(self, indices: list[int]) -> Tensor:
        """Hidden states of some conversations, zero-padded on the right: bfloat16 ``[batch, longest, hidden_size]``."""
        missing = [i for i in indices if self.names[i] not in self.starts]
        if missing:
            self._compute(missing)
        longest, width = max(len(self.conversations[i]) for i in indices), self.target.description.hidden_size
        padded = torch.zeros(len(indices), longest, width, dtype=torch.bfloat16)
        for row, index in enumerate(indices):
            count = len(self.conversations[index])
            piece = np.fromfile(self.states, np.int16, count * width, offset=self.starts[self.names[index]])
            padded[row, :count] = torch.from_numpy(piece).view(torch.bfloat16).view(count, width)
        return padded

    def _read_index(self) -> dict[str, int]:
        kept, found = self.states.stat().st_size, {}
        for line in self.index.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that died while writing it: its states are computed anew
            if row["start"] + row["bytes"] > kept:
                raise UserError(f"{self.states} is shorter than its index says: remove {self.states.parent}")
            found[row["conversation"]] = row["start"]
        return found

    @torch.inference_mode()
    def _compute(self, indices: list[int]) -> None:
        lengths = [len(self.conversations[i]) for i in indices]
        token_ids = pad([self.conversations[i] for i in indices])
        batch, longest = token_ids.shape
        positions = torch.arange(longest).repeat(batch)
        hidden = self.target(token_ids.flatten(), positions, DenseAttention(batch)).to(torch.bfloat16)
        rows = hidden.view(batch, longest, -1)
        states = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        end = _append(self.states, states.view(torch.uint8).numpy().tobytes())
        start, lines = end - states.numel() * WIDTH, "\n"  # its own line even where a dead run left half of one
        for index, length in zip(indices, lengths, strict=True):
            size = length * rows.shape[-1] * WIDTH
            lines += json.dumps({"conversation": self.names[index], "start": start, "bytes": size}) + "\n"
            self.starts[self.names[index]] = start
            start += size
        _append(self.index, lines.encode())


def _append(path: Path, content: bytes) -> int:
    """Add ``content`` in one write; returns where it ends."""
    with path.open("ab", buffering=0) as file:
        if file.write(content) != len(content):
            raise OSError(f"{path}: the disk took only part of {len(content)} bytes")
        return file.tell()


def _name(conversation: Conversation) -> str:
    return hashlib.sha256(np.array(conversation.token_ids, np.int32).tobytes()).hexdigest()
