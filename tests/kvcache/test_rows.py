import math

import torch

from tiercel.kvcache.manager import KvCacheManager
from tiercel.kvcache.rows import PagedAttention, Rows, Segment
from tiercel.kvcache.storage import KvStorage

HEADS, KV_HEADS, DIM = 6, 2, 8
CPU = torch.device("cpu")


def reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row at a time, head by head."""
    out = torch.empty(HEADS, DIM)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        weights = (keys[:, group] @ q[head] / math.sqrt(DIM)).softmax(0)
        out[head] = weights @ values[:, group]
    return out.flatten()


def filled(
    kv: KvCacheManager, lengths: dict[str, int], generator: torch.Generator
) -> tuple[KvStorage, dict[str, list]]:
    storage = KvStorage(kv.num_slots_total, KV_HEADS, DIM, torch.float32, CPU)
    rows = {}
    for name, length in lengths.items():
        kv.reserve(name, length)
        keys, values = (torch.randn(length, KV_HEADS, DIM, generator=generator) for _ in range(2))
        storage.write(kv.slots(name)[:length], keys, values)
        rows[name] = [keys, values]
    return storage, rows


def test_ragged_rows_match_a_row_by_row_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    kv = KvCacheManager(128, 4)
    spans = {"a": (0, 5), "b": (9, 10), "c": (17, 21)}
    storage, known = filled(kv, {name: end for name, (_, end) in spans.items()}, generator)
    segments = [Segment(s, e, kv.slots(name)) for name, (s, e) in spans.items()]
    rows = Rows(segments, CPU)
    attention = PagedAttention(rows, [storage], HEADS // KV_HEADS)
    count = sum(e - s for s, e in spans.values())
    q, k, v = (torch.randn(count, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    out = attention(0, q, k, v)
    row = 0
    for name, (start, end) in spans.items():
        keys, values = (
            torch.cat((old[:start], new[row : row + end - start])) for old, new in zip(known[name], (k, v), strict=True)
        )
        for position in range(start, end):
            expected = reference(q[row], keys[: position + 1], values[: position + 1])
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)
            row += 1
    assert rows.positions.tolist() == [p for s, e in spans.values() for p in range(s, e)]


def test_a_neighbours_nan_stays_with_the_neighbour() -> None:
    generator = torch.Generator().manual_seed(0)
    kv = KvCacheManager(64, 4)
    storage, _ = filled(kv, {"sick": 12, "well": 3}, generator)
    storage.keys[:, kv.slots("sick")] = math.nan
    storage.values[:, kv.slots("sick")] = math.nan
    segments = [Segment(11, 12, kv.slots("sick")), Segment(1, 3, kv.slots("well"))]
    rows = Rows(segments, CPU)
    attention = PagedAttention(rows, [storage], HEADS // KV_HEADS)
    q, k, v = (torch.randn(3, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    out = attention(0, q, k, v)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
