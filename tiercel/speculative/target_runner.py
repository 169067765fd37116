"""Runs the target over rows of many requests at once, and lets it choose tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.core.request import Request
from tiercel.device.placement import Placement
from tiercel.kvcache.manager import KvCacheManager
from tiercel.kvcache.rows import PagedAttention, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.decoder import Decoder
from tiercel.speculative.sampling import GumbelNoise, RowSampling, choose


@dataclass(frozen=True, slots=True)
class LogitsOutput:
    """What a target forward gives: per request, hidden states before the final norm and the tokens chosen.

    ``hidden[i]`` is ``[rows of request i, hidden_size]`` on the device; ``token_ids[i]`` (host) holds the token chosen after
    each of the rows that were asked for, -1 where the target's logits were NaN.
    """

    hidden: list[Tensor]
    token_ids: list[list[int]]


class TargetRunner:
    """The target with its KV storage, one forward at a time."""

    can_run_graph = False
    """Whether the last forward was a graph replay; the eager path never is."""

    def __init__(self, decoder: Decoder, kv: KvCacheManager, placement: Placement) -> None:
        self.decoder, self.kv, self.placement = decoder, kv, placement
        shape = decoder.description
        self.storages = [
            KvStorage(kv.num_slots_total, shape.num_kv_heads, shape.head_dim, placement.dtype, placement.device)
            for _ in range(shape.num_layers)
        ]
        self.noise = GumbelNoise(shape.vocab_size)

    @torch.inference_mode()
    def forward(self, reqs: list[Request], token_ids: Tensor, ends: list[int], num_sampled: list[int]) -> LogitsOutput:
        """Read rows ``num_computed .. end - 1`` of each request and choose tokens after the last ones.

        Args:
            reqs: the requests; their slots up to ``ends`` are reserved.
            token_ids: int64 ``[rows]`` on the device, request after request.
            ends: end of each request's rows.
            num_sampled: how many of each request's last rows choose a token (0: none).
        """
        segments = [
            Segment(r.num_computed, end, self.kv.slots(r.request_id)) for r, end in zip(reqs, ends, strict=True)
        ]
        shape = self.decoder.description
        attention = PagedAttention(
            segments, self.storages, shape.num_heads // shape.num_kv_heads, self.placement.device
        )
        rows = self.decoder(token_ids, attention.positions, attention)
        hidden = list(rows.split([s.end - s.start for s in segments]))
        wanted = [h[len(h) - count :] for h, count in zip(hidden, num_sampled, strict=True)]
        return LogitsOutput(hidden, self._choose(reqs, wanted, ends, num_sampled))

    def _choose(self, reqs: list[Request], wanted: list[Tensor], ends: list[int], counts: list[int]) -> list[list[int]]:
        how = [
            RowSampling(req.sampling, req.seed, end - count + 1 + j)
            for req, end, count in zip(reqs, ends, counts, strict=True)
            for j in range(count)
        ]
        if not how:
            return [[] for _ in reqs]
        chosen: list[int] = choose(self.decoder.logits(torch.cat(wanted)), how, self.noise).tolist()
        tokens = iter(chosen)
        return [[next(tokens) for _ in range(count)] for count in counts]
