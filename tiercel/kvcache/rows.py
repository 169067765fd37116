"""Which rows one forward pass holds, and which cached positions each of them may see. Built once, used by every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.kvcache.storage import KvStorage


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one request: positions ``start .. end - 1``. ``slots[p]`` is the KV slot of position p."""

    start: int
    end: int
    slots: Tensor


class PagedAttention:
    """Attention of flat rows over the paged KV cache: store the rows' keys and values, then look back.

    Every row sees its own request's positions up to and including its own. Rows and contexts are padded to rectangles;
    padding points at the request's own slots, so that nothing of another request can leak in, not even a NaN.

    Args:
        segments: the requests' rows, in the order in which the flat rows lie.
        storages: KV storage of each layer.
        group: query heads per KV head (GQA); they become further rows of their KV head.
        device: where the forward runs.
    """

    def __init__(self, segments: list[Segment], storages: list[KvStorage], group: int, device: torch.device) -> None:
        self.storages, self.group = storages, group
        counts = [s.end - s.start for s in segments]
        width, longest = max(counts), max(s.end for s in segments)
        self.positions = torch.cat([torch.arange(s.start, s.end) for s in segments]).to(device)
        self.write_slots = torch.cat([s.slots[s.start : s.end] for s in segments]).to(device)
        context = torch.stack([_padded(s.slots[: s.end], longest) for s in segments])
        self.context = context.to(device)
        row_positions = torch.stack([_padded(torch.arange(s.start, s.end), width) for s in segments])
        visible = torch.arange(longest) <= row_positions[:, :, None]
        self.mask = visible.repeat(1, group, 1).unsqueeze(1).to(device)  # [batch, 1, group * rows, context]
        self.is_ragged = any(count != width for count in counts)
        if self.is_ragged:
            firsts = torch.tensor([0, *counts[:-1]]).cumsum(0)
            self.gather = torch.stack(
                [_padded(f + torch.arange(c), width) for f, c in zip(firsts, counts, strict=True)]
            ).to(device)
            self.scatter = (torch.arange(width) < torch.tensor(counts)[:, None]).to(device)
        self.shape = (len(segments), width)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``tiercel.models.layers.Attention``."""
        storage = self.storages[layer]
        storage.write(self.write_slots, k, v)
        keys, values = storage.read(self.context)  # each [batch, context, kv_heads, head_dim]
        batch, width = self.shape
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        queries = q[self.gather] if self.is_ragged else q.view(batch, width, heads, head_dim)
        folded = queries.view(batch, width, kv_heads, self.group, head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(batch, kv_heads, self.group * width, head_dim)
        out = torch.nn.functional.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self.mask
        )
        out = out.view(batch, kv_heads, self.group, width, head_dim).permute(0, 3, 1, 2, 4)
        flat = out.reshape(batch, width, heads * head_dim)
        return flat[self.scatter] if self.is_ragged else flat.view(batch * width, heads * head_dim)


def _padded(values: Tensor, length: int) -> Tensor:
    """Repeat the last value up to ``length``."""
    return values if len(values) == length else torch.cat((values, values[-1:].expand(length - len(values))))
