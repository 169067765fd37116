"""From requests to the engine to pieces of text, merged as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tiercel.core.logprobs import TokenLogprobs
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.answer_text import AnswerText
from tiercel.models.tokenizer import Tokenizer
from tiercel.observability.records import RequestRecord
from tiercel.server.engine_client import EngineClient


@dataclass(frozen=True, slots=True)
class Job:
    """One answer that is wanted: a request to the engine."""

    index: int
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    trace_headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step brought for one answer. The last of an answer carries its record."""

    index: int
    text: str
    token_ids: list[int]
    record: RequestRecord | None
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come."""

    job: Job
    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    record: RequestRecord | None = None

    def take(self, piece: Piece) -> None:
        """Add what came."""
        self.texts.append(piece.text)
        self.num_tokens += len(piece.token_ids)
        self.logprobs += piece.logprobs
        self.record = piece.record

    @property
    def text(self) -> str:
        return "".join(self.texts)


def how_ended(record: RequestRecord | None) -> dict[str, int | str | None]:
    """OpenAI's ``finish_reason`` and vLLM's ``stop_reason`` of a choice; null while it goes on."""
    if record is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": record.finish_reason, "stop_reason": record.stop_reason}


class AnswerFailed(Exception):
    """The engine ended a request with an error."""


async def pieces(engine: EngineClient, tokenizer: Tokenizer, jobs: Sequence[Job]) -> AsyncGenerator[Piece, None]:
    """Run all of them; leaving early aborts what still runs.

    Raises:
        UserError: a request cannot run.
        EngineDied: the engine's process has ended.
        AnswerFailed: the engine ended a request with an error.
    """
    if len(jobs) == 1:
        async with aclosing(_one(engine, tokenizer, jobs[0])) as stream:
            async for piece in stream:
                yield piece
        return
    arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def play(job: Job) -> None:
        try:
            async for piece in _one(engine, tokenizer, job):
                arrived.put_nowait(piece)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(play(job)) for job in jobs]
    running = len(jobs)
    try:
        while running:
            got = await arrived.get()
            if isinstance(got, Exception):
                raise got
            running -= got.record is not None
            yield got
    finally:
        for task in tasks:
            task.cancel()


async def _one(engine: EngineClient, tokenizer: Tokenizer, job: Job) -> AsyncGenerator[Piece, None]:
    answer = AnswerText(tokenizer, job.sampling)
    stream = engine.stream(job.request_id, job.prompt_token_ids, job.sampling, job.trace_headers, job.timeout_s)
    async with aclosing(stream) as steps:
        async for tokens in steps:
            record = tokens.record
            if record is not None and record.error:
                raise AnswerFailed(record.error)
            text = "".join(answer.take(tokens.token_ids, record))
            yield Piece(job.index, text, tokens.token_ids, record, tokens.logprobs)
