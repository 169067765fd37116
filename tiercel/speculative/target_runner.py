"""Runs the target over rows of many requests at once, and lets it choose tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tiercel.core.logprobs import TokenLogprobs
from tiercel.core.request import Request
from tiercel.core.tree import paths
from tiercel.device.placement import Placement, integers
from tiercel.kvcache.manager import KvCacheManager
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import StepInput, Target
from tiercel.speculative.logits.choose import choose, needs_logits
from tiercel.speculative.logits.logprobs import row_logprobs
from tiercel.speculative.logits.noise import GumbelNoise
from tiercel.speculative.logits.rows import RowSampling, verify_row


@dataclass(frozen=True, slots=True)
class LogitsOutput:
    """What a target forward gives: per request, hidden states (before the final norm, or at the taps) and the tokens chosen.

    ``hidden[i]`` is ``[rows of request i, hidden_size]`` on the device; ``token_ids[i]`` (host) holds the token chosen after
    each of the rows that were asked for, -1 where the target's logits were NaN; ``logprobs[i]`` its log-probabilities, None
    where request i does not want them.
    """

    hidden: list[Tensor]
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]


class TargetRunner:
    """The target with its KV storage, one forward at a time.

    ``taps`` (see ``StepInput``) may be set by whoever drafts: hidden states are then those at the taps, side by side.
    """

    def __init__(self, model: Target, kv: KvCacheManager, placement: Placement, kv_dtype: torch.dtype) -> None:
        self.model, self.kv, self.placement, self.kv_dtype = model, kv, placement, kv_dtype
        shape = model.description
        self.storages = [
            KvStorage(kv.num_slots_total, shape.num_kv_heads, shape.head_dim, kv_dtype, placement.device)
            for _ in range(shape.num_layers)
        ]
        self.noise = GumbelNoise(shape.vocab_size)
        self.taps: tuple[int, ...] = ()

    @property
    def can_run_graph(self) -> bool:
        """Whether a forward replays a recorded program."""
        return self.model.is_graph

    def forward(
        self,
        reqs: list[Request],
        token_ids: Tensor,
        ends: list[int],
        num_sampled: list[int],
        parents: Sequence[Sequence[int]] = (),
    ) -> LogitsOutput:
        """Read rows ``num_computed .. end - 1`` of each request and choose tokens after the last ones.

        Args:
            reqs: the requests; their slots up to ``ends`` are reserved.
            token_ids: int64 ``[rows]`` on the device, request after request.
            ends: end of each request's rows.
            num_sampled: how many of each request's last rows choose a token (0: none).
            parents: the tree that each request's last rows form (see ``core.tree``), if one does; the row before is its root.
        """
        segments = [
            Segment(r.num_computed, end, self.kv.slots(r.request_id), _places(tree, end))
            for r, end, tree in zip(reqs, ends, parents or [()] * len(reqs), strict=True)
        ]
        rows = Rows(segments, self.placement.device)
        row_ends = list(accumulate(rows.counts))
        how: list[RowSampling] = []
        for req, segment, row_end, count, tree in zip(
            reqs, segments, row_ends, num_sampled, parents or [()] * len(reqs), strict=True
        ):
            if count:
                before = _drafts_before(token_ids[row_end - count + 1 : row_end], req, tree)
                places = segment.positions[-count:]
                how += [verify_row(req, place + 1, drafts) for place, drafts in zip(places, before, strict=True)]
        wanted = [i for end, count in zip(row_ends, num_sampled, strict=True) for i in range(end - count, end)]
        on_device = integers(wanted, self.placement.device)
        output = self.model.run(StepInput(rows, token_ids, on_device, needs_logits(how), taps=self.taps), self.storages)
        tokens: list[int] = choose(output.best, output.logits, how, self.noise).tolist()
        logprobs = row_logprobs(output.logits, how, tokens)
        given = output.hidden if output.tapped is None else output.tapped
        hidden = list(given.split_with_sizes(rows.counts))
        ends_of = list(accumulate(num_sampled))
        pieces = [slice(end - count, end) for end, count in zip(ends_of, num_sampled, strict=True)]
        return LogitsOutput(hidden, [tokens[piece] for piece in pieces], [logprobs[piece] for piece in pieces])

    def keep_paths(self, moves: list[tuple[Tensor, list[int], list[int]]]) -> None:
        """Move the KV of accepted paths to where a chain has it.

        Args:
            moves: a request's slots, and of each row to move the place where it lies and the place where it belongs.
        """
        if moves:
            source = torch.cat([slots[places] for slots, places, _ in moves]).to(self.placement.device)
            target = torch.cat([slots[places] for slots, _, places in moves]).to(self.placement.device)
            for storage in self.storages:
                storage.move(source, target)


def _drafts_before(drafts: Tensor, req: Request, parents: Sequence[int]) -> list[list[int]]:
    """The drafts on each row's path: none for the request's last token, then those up to each draft."""
    if not req.sampling.adjusts_logits:  # nobody looks at them: they can stay on the device
        return [[]] * (len(drafts) + 1)
    tokens = drafts.tolist()
    return [[], *([tokens[d] for d in path] for path in paths(parents or range(-1, len(tokens) - 1)))]


def _places(parents: Sequence[int], end: int) -> list[list[int]]:
    base = end - len(parents)
    return [[base + draft for draft in path] for path in paths(parents)]
