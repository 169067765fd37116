"""The library's front door: ``LLM(...).generate(...)``."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tiercel.core.config import DEFAULT_MODEL, EngineConfig, SpecConfig, TraceConfig
from tiercel.core.depths import DepthTable
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.answer_text import AnswerText
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.engine.outputs import RequestOutput, StepOutput, TokenEvent
from tiercel.models.tokenizer import Tokenizer

Prompt = str | list[int] | list[dict[str, Any]]
"""A user's text, token ids, or chat messages."""


class LLM:
    """An engine and its tokenizer.

    Args:
        model: shorthand for ``EngineConfig(model=…)``.
        spec: who drafts; the default is multi-layer EAGLE with every MTP layer of the draft.
        engine: what runs; excludes ``model``.
        trace: what is recorded.
        target: a target that is loaded already.

    Raises:
        UserError: the model, the draft or a setting cannot work.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
        trace: TraceConfig | None = None,
        target: LoadedTarget | None = None,
    ) -> None:
        if model is not None and engine is not None:
            raise UserError("both model and engine are given: name the model in EngineConfig(model=…)")
        config = engine or EngineConfig(model=model or DEFAULT_MODEL)
        self.engine = Engine(config, spec or SpecConfig(), trace or TraceConfig(), target)
        self._count = 0

    @property
    def depths(self) -> DepthTable | None:
        """How much is drafted at which load, and where that comes from; None where no MTP layers draft."""
        return self.engine.worker.depths

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.checkpoint.tokenizer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs; flush traces and records."""
        self.engine.close()

    def set_trace_level(self, level: int) -> None:
        """Switch tracing for requests that arrive from now on: 0 off, 1 important stages, 2 draft and verify, 3 everything.

        Raises:
            UserError: no such level, or tracing was not enabled at start.
        """
        self.engine.pipeline.set_trace_level(level)

    def metrics_text(self) -> str:
        """Everything counted so far in Prometheus' text format (docs/metrics.md).

        Raises:
            UserError: metrics are off.
        """
        metrics = self.engine.pipeline.metrics
        if metrics is None:
            raise UserError("metrics are off: give TraceConfig(metrics=True)")
        self.engine.pipeline.drain()
        return metrics.store.exposition()[0].decode()

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt; text goes through the chat template as one user message unless ``chat`` is False."""
        if isinstance(prompt, str):
            if not chat or self.tokenizer.chat_template is None:
                return self.tokenizer.encode(prompt)
            return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if prompt and isinstance(prompt[0], dict):
            return self.tokenizer.encode_chat(prompt)
        return list(prompt)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = True,
        request_ids: Sequence[str] | None = None,
        trace_headers: Sequence[Mapping[str, str] | None] | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts together, in continuous batches.

        Args:
            prompts: one text, or a list of texts, token id lists or chat message lists.
            sampling: one for all, or one per prompt.
            chat: put texts through the chat template (base models without one take them raw).
            request_ids: names for traces and records; counted up by default.
            trace_headers: W3C context (``traceparent``, ``tracestate``) of each prompt's caller.
            timeout_s: seconds after which a request ends with what it has, for reason ``timeout``.

        Returns:
            Results in the order of the prompts.

        Raises:
            UserError: a prompt cannot run; nothing was started then.
        """
        count = 1 if isinstance(prompts, str) else len(prompts)
        ids = self._request_ids(request_ids, count)
        events = self.stream(
            prompts, sampling, chat=chat, request_ids=ids, trace_headers=trace_headers, timeout_s=timeout_s
        )
        done = {event.request_id: event.output for event in events if event.output}
        return [done[request_id] for request_id in ids]

    def stream(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = True,
        request_ids: Sequence[str] | None = None,
        trace_headers: Sequence[Mapping[str, str] | None] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[TokenEvent]:
        """As ``generate``, but token by token as they come; the last event of each request carries its result.

        Leaving the iterator early aborts what still runs.
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        if _is_one_prompt(listed):
            raise UserError(
                "prompts must be a list of prompts: put a single token id list or chat into a list of its own"
            )
        wishes = _one_each(SamplingParams() if sampling is None else sampling, len(listed))
        ids = self._request_ids(request_ids, len(listed))
        headers = [None] * len(listed) if trace_headers is None else trace_headers
        if len(headers) != len(listed):
            raise UserError(f"{len(headers)} trace headers for {len(listed)} prompts: give one for each, or None")
        if self.engine.requests:
            raise UserError("another generate or stream call of this LLM is still running: finish or close it first")
        encoded = [self.encode(prompt, chat=chat) for prompt in listed]
        for asked in zip(ids, encoded, wishes, strict=True):  # all of them, before any leaves a record
            self.engine.check_request(*asked)
        added: list[str] = []
        try:
            for request_id, token_ids, wish, header in zip(ids, encoded, wishes, headers, strict=True):
                self.engine.add_request(request_id, token_ids, wish, header, timeout_s)
                added.append(request_id)
            answers = {one: AnswerText(self.tokenizer, wish) for one, wish in zip(ids, wishes, strict=True)}
            texts: dict[str, list[str]] = {request_id: [] for request_id in ids}
            while self.engine.has_work:
                for output in self.engine.step():
                    request_id = output.request.request_id
                    yield from self._events(output, answers[request_id], texts[request_id])
        finally:
            for request_id in added:
                self.engine.abort(request_id)

    def _events(self, output: StepOutput, answer: AnswerText, pieces: list[str]) -> Iterator[TokenEvent]:
        request_id = output.request.request_id
        shown = answer.take(output.token_ids, output.record)
        pieces += shown
        for token_id, source, text in zip(output.token_ids, output.sources, shown, strict=False):
            yield TokenEvent(request_id, token_id, source, text)
        if output.record is not None:
            yield TokenEvent(request_id, None, None, shown[-1], self._result(output, "".join(pieces)))

    def _result(self, output: StepOutput, text: str) -> RequestOutput:
        req, record = output.request, output.record
        assert record is not None
        return RequestOutput(
            request_id=req.request_id,
            text=text,
            token_ids=list(req.output_token_ids),
            sources=list(req.output_sources),
            finish_reason=record.finish_reason,
            stop_reason=record.stop_reason,
            record=record,
            depths=self.depths,
            trace_headers=self.engine.trace_headers(req),
            logprobs=None if req.sampling.logprobs is None else list(req.output_logprobs),
        )

    def _request_ids(self, wanted: Sequence[str] | None, count: int) -> list[str]:
        if wanted is None:
            self._count += count
            return [f"req-{n}" for n in range(self._count - count, self._count)]
        if len(wanted) != count or len(set(wanted)) != count:
            raise UserError(f"{len(wanted)} request ids for {count} prompts: give one for each, all different")
        return list(wanted)


def _is_one_prompt(prompts: Sequence[object]) -> bool:
    return bool(prompts) and isinstance(prompts[0], int | dict)


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise UserError(f"{len(sampling)} sampling parameters for {count} prompts: give one, or one for each")
    return sampling
