"""What callers get: tokens as they come, and a request's whole result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tiercel.core.depths import DepthTable
from tiercel.core.errors import UserError
from tiercel.core.logprobs import TokenLogprobs
from tiercel.core.request import Request
from tiercel.observability.records import RequestRecord


@dataclass(frozen=True, slots=True)
class StepOutput:
    """New tokens of one request in one engine step; ``sources`` as in ``tiercel.core.request``."""

    request: Request
    token_ids: list[int]
    sources: list[int]
    record: RequestRecord | None
    """Set once: when the request has finished."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One per new token, where the request asks for them."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a stream, and what can be shown with it: nothing while a character is incomplete or a stop text may be coming.

    The last event carries ``output``, and no token.
    """

    request_id: str
    token_id: int | None
    source: int | None
    text: str
    output: "RequestOutput | None" = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its text, its tokens and where they came from, its record, and the depths in force.

    ``text`` ends before what stopped it; ``token_ids`` hold the tokens up to the one that did, and ``stop_reason`` says what it
    was: a stop text, a stop token's id, or None for EOS and any other end.
    ``logprobs`` has an entry per token, and is None where ``SamplingParams.logprobs`` did not ask for them.
    ``trace_headers`` carry its trace on (``traceparent``): its root span's where spans are made, else what the caller sent.
    """

    request_id: str
    text: str
    token_ids: list[int]
    sources: list[int]
    finish_reason: str
    record: RequestRecord
    depths: DepthTable | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: int | str | None = None

    def checked(self) -> Self:
        """Itself, for callers that have no use for a broken answer.

        Raises:
            UserError: the request ended with an error; names both.
        """
        if self.record.error:
            raise UserError(f"request {self.request_id}: {self.record.error}")
        return self

    @property
    def usage(self) -> dict[str, int]:
        """Token counts under OpenAI's names."""
        prompt, completion = self.record.prompt_tokens, self.record.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def to_json(self) -> dict[str, Any]:
        """The object that ``tiercel generate --json`` prints."""
        metrics = {
            "time_to_first_token_ms": self.record.time_to_first_token_ms,
            "queue_time_ms": self.record.queue_ms,
            "generation_time_ms": self.record.generation_ms,
            "e2e_ms": self.record.e2e_ms,
            "tokens_per_second": self.record.tokens_per_second,
            "num_preemptions": self.record.num_preemptions,
            "error": self.record.error,
            "token_sources": self.sources,
            "speculative_decoding": self.record.spec,
            "trace_headers": dict(self.trace_headers) or None,
            "depths": self.depths and {"source": str(self.depths.source), **self.depths.to_json()},
        }
        return {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": self.token_ids,
            **({} if self.logprobs is None else {"logprobs": [token.to_json() for token in self.logprobs]}),
            "finish_reason": self.finish_reason,
            **({} if self.stop_reason is None else {"stop_reason": self.stop_reason}),
            "usage": self.usage,
            "metrics": metrics,
        }
