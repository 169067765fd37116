"""One request: what was asked, what was made so far, and how it ended."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tiercel.core.acceptance import SpecCounts
from tiercel.core.logprobs import TokenLogprobs
from tiercel.core.sampling_params import SamplingParams

SOURCE_PREFILL = -2
"""The token came from the prefill (extend) forward: the first token of an answer."""
SOURCE_BONUS = -1
"""The token is the target's own, added after the last correct draft of a round."""
SOURCE_NGRAM = -3
"""Prompt lookup proposed the token."""
# A source >= 0 is the MTP layer that proposed the token.


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class RequestStatus(StrEnum):
    """Where a request stands in the engine."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class TimeStats(Protocol):
    """The per-request trace hooks that the round calls (``observability.req_time_stats.ReqTimeStats``)."""

    def set_spec_draft_start_time(self, ts_ns: int | None = None) -> None: ...
    def set_spec_draft_end_time(self, ts_ns: int | None = None) -> None: ...
    def set_spec_verify_start_time(self, ts_ns: int | None = None) -> None: ...
    def set_spec_verify_end_time(self, ts_ns: int | None = None, *, num_correct_drafts: int) -> None: ...
    def set_spec_draft_extend_start_time(self, ts_ns: int | None = None) -> None: ...
    def set_spec_draft_extend_end_time(self, ts_ns: int | None = None) -> None: ...


class StopText(Protocol):
    """Watches an answer's text for stop texts; ``stopped`` is the one that it has found."""

    stopped: str | None

    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


@dataclass(slots=True, eq=False)
class Request:
    """State of one request.

    Args:
        request_id: unique while the request lives.
        prompt_token_ids: prompt, at least one token.
        sampling: how tokens are chosen.
        seed: the seed in force (``sampling.seed`` or one drawn at arrival).
        eos_token_ids: tokens that end the answer.
        time_stats: trace hooks of this request.
        bad_word_ids: token sequences of ``sampling.bad_words``.
        stop_text: watches for ``sampling.stop``; None where there is none.

    ``stop_reason`` is the stop text or the stop token that ended the answer; None for EOS and any other end.
    ``output_logprobs`` has an entry per output token where ``sampling.logprobs`` asks for them, else none.

    ``num_computed`` counts the leading tokens whose target KV is in the cache. While a request runs it is
    ``len(token_ids) - 1``: the last token has been chosen but not yet been read by the target.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    time_stats: TimeStats
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop_text: StopText | None = None
    output_token_ids: list[int] = field(default_factory=list)
    output_sources: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_computed: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    spec: SpecCounts = field(default_factory=SpecCounts)
    num_preemptions: int = 0
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def remaining_tokens(self) -> int:
        """Completion tokens that may still be delivered."""
        return self.sampling.max_tokens - len(self.output_token_ids)

    def draft_depth(self, num_steps: int) -> int:
        """Drafts that can be of use: at most ``num_steps``, what the request allows, and fewer than the tokens it may get."""
        most = self.sampling.speculative.most_drafts
        return max(0, min(num_steps if most is None else min(num_steps, most), self.remaining_tokens - 1))

    def append_until_stop(self, token_ids: list[int], sources: list[int]) -> int:
        """Deliver committed tokens one at a time, up to and including the one that ends the request.

        Args:
            token_ids: committed tokens in order.
            sources: where each came from (``SOURCE_PREFILL``, ``SOURCE_BONUS``, ``SOURCE_NGRAM`` or an MTP layer).

        Returns:
            How many were delivered (emitted).
        """
        for emitted, (token, source) in enumerate(zip(token_ids, sources, strict=True), start=1):
            self.token_ids.append(token)
            self.output_token_ids.append(token)
            self.output_sources.append(source)
            self._end_with(token)
            if self.is_finished:
                return emitted
        return len(token_ids)

    def _end_with(self, token: int) -> None:
        """Say how the answer ends, if it ends with ``token``, its last so far."""
        is_full = self.remaining_tokens == 0
        if token in self.eos_token_ids and not self.sampling.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif token in self.sampling.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token
        elif self.stop_text is not None and (stop := _stop_after(token, self.stop_text, is_last=is_full)) is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        elif is_full:
            self.finish_reason = FinishReason.LENGTH


def _stop_after(token: int, text: StopText, *, is_last: bool) -> str | None:
    text.push(token)
    if is_last:  # text that waits for the rest of a character may hold a stop as well
        text.finish()
    return text.stopped
