"""Which rows one forward pass holds, and which cached positions each of them may see. Built once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tiercel.device.placement import integers
from tiercel.kvcache.storage import KvStorage

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one request: places ``start .. end - 1``. ``slots[p]`` is the KV slot of place p.

    A place is a position, except for the last rows where they form a tree: ``paths`` are, for each of them, the places of the
    rows on its path (itself last), at positions ``base ..``; every row on a path sees all places below ``base``. The tree's first
    row lies at ``base``, which ``root`` names where earlier forwards have read a part of the tree.
    """

    start: int
    end: int
    slots: Tensor
    paths: Sequence[Sequence[int]] = ()
    root: int | None = None

    @property
    def base(self) -> int:
        """First place that is no position by itself."""
        return self.first_on_path if self.root is None else self.root

    @property
    def first_on_path(self) -> int:
        """Place of the first row that has a path."""
        return self.end - len(self.paths)

    @property
    def positions(self) -> list[int]:
        """Position of every row."""
        base = self.base
        return [*range(self.start, self.first_on_path), *(base + len(path) - 1 for path in self.paths)]


class Rows:
    """The rows of one forward, request after request; every row sees its own request's positions up to its own.

    Args:
        segments: the requests' rows, in the order in which the flat rows lie.
        device: where the forward runs.
    """

    def __init__(self, segments: list[Segment], device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.counts = [s.end - s.start for s in segments]
        self.num_rows = sum(self.counts)

    @cached_property
    def positions(self) -> Tensor:
        """Position of every row: int64 ``[rows]``."""
        return integers([p for s in self.segments for p in s.positions], self.device)

    @cached_property
    def firsts(self) -> Tensor:
        """First row of each segment, then the number of rows: int64 ``[segments + 1]``, on the host."""
        return integers([0, *accumulate(self.counts)], CPU)

    @cached_property
    def slot_addresses(self) -> Tensor:
        """Where each segment's slots lie in memory: int64 ``[segments]``, on the host."""
        return integers([s.slots.data_ptr() for s in self.segments], CPU)

    @cached_property
    def tree(self) -> "TreeTables | None":
        """For recorded steps: who sees what, where rows form trees; None where none do."""
        return TreeTables(self.segments) if any(s.paths for s in self.segments) else None

    @cached_property
    def rectangle(self) -> "Rectangle":
        """The rows as a padded rectangle, for batched attention."""
        return Rectangle(self)


class TreeTables:
    """Slots along the paths of trees, int64 on the host.

    ``bases[s]`` is the first position of segment s that depends on the row; ``tails`` (``[rows, width]``) holds the slots of a
    row's path from there on, its own last.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self.bases = integers([s.base for s in segments], CPU)
        self.width = max(len(path) for s in segments for path in s.paths)
        self.tails = torch.zeros(sum(s.end - s.start for s in segments), self.width, dtype=torch.int64)
        first = 0
        for s in segments:
            for row, path in enumerate(s.paths, first + s.first_on_path - s.start):
                self.tails[row, : len(path)] = s.slots[list(path)]
            first += s.end - s.start


class Rectangle:
    """Rows and contexts padded to rectangles; padding points at the request's own slots, so that nothing of another
    request can leak in, not even a NaN.

    ``mask`` is bool ``[requests, rows, context]``; ``gather`` and ``scatter`` lead from flat rows to the rectangle and back.
    """

    def __init__(self, rows: Rows) -> None:
        segments, counts = rows.segments, rows.counts
        width, longest = max(counts), max(s.end for s in segments)
        self.shape = (len(segments), width)
        self.write_slots = torch.cat([s.slots[s.start : s.end] for s in segments]).to(rows.device)
        self.context = torch.stack([_padded(s.slots[: s.end], longest) for s in segments]).to(rows.device)
        positions = torch.stack([_padded(torch.arange(s.start, s.end), width) for s in segments])
        mask = torch.arange(longest) <= positions[:, :, None]
        for s, seen in zip(segments, mask, strict=True):
            for row, path in enumerate(s.paths, s.first_on_path - s.start):
                seen[row, s.base :] = False
                seen[row, list(path)] = True
        self.mask = mask.to(rows.device)
        self.is_ragged = any(count != width for count in counts)
        if self.is_ragged:
            firsts = torch.tensor([0, *counts[:-1]]).cumsum(0)
            gather = [_padded(f + torch.arange(c), width) for f, c in zip(firsts, counts, strict=True)]
            self.gather = torch.stack(gather).to(rows.device)
            self.scatter = (torch.arange(width) < torch.tensor(counts)[:, None]).to(rows.device)


class PagedAttention:
    """Attention of flat rows over the paged KV cache: store the rows' keys and values, then look back.

    Args:
        rows: who is in this forward.
        storages: KV storage of each layer.
        group: query heads per KV head (GQA); they become further rows of their KV head.
    """

    def __init__(self, rows: Rows, storages: list[KvStorage], group: int) -> None:
        self.storages, self.group, self.lay = storages, group, rows.rectangle
        self.mask = self.lay.mask.repeat(1, group, 1).unsqueeze(1)  # [batch, 1, group * rows, context]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``tiercel.models.layers.Attention``."""
        storage, lay = self.storages[layer], self.lay
        storage.write(lay.write_slots, k, v)
        keys, values = (held.to(q.dtype) for held in storage.read(lay.context))  # [batch, kv_heads, context, head_dim]
        batch, width = lay.shape
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        queries = q[lay.gather] if lay.is_ragged else q.view(batch, width, heads, head_dim)
        folded = queries.view(batch, width, kv_heads, self.group, head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(batch, kv_heads, self.group * width, head_dim)
        out = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask)
        out = out.view(batch, kv_heads, self.group, width, head_dim).permute(0, 3, 1, 2, 4)
        flat = out.reshape(batch, width, heads * head_dim)
        return flat[lay.scatter] if lay.is_ragged else flat.view(batch * width, heads * head_dim)


def _padded(values: Tensor, length: int) -> Tensor:
    """Repeat the last value up to ``length``."""
    return values if len(values) == length else torch.cat((values, values[-1:].expand(length - len(values))))
