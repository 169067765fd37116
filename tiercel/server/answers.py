"""An answer on its way to the client: whole, or as events; the same for chat and for text completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response
from starlette.responses import JSONResponse

from tiercel.core.errors import UserError
from tiercel.observability.records import RequestRecord
from tiercel.server.admission import Ticket
from tiercel.server.bodies import StreamOptions, Wishes
from tiercel.server.config import SpecMetrics
from tiercel.server.engine_client import EngineDied
from tiercel.server.errors import ApiError, invalid
from tiercel.server.generation import Answer, AnswerFailed, Job, Piece, pieces
from tiercel.server.service import REQUEST_ID, Service
from tiercel.server.streaming import DONE, ClientLeft, EventStream, event, while_listening

HOW_ENDED: dict[type[Exception], str] = {UserError: "refused", EngineDied: "engine_died", ApiError: "engine_died"}
"""What becomes of an exchange's answers when it fails."""


class Shape(Protocol):
    """How a kind of answer looks."""

    whole_object: str
    chunk_object: str

    def choice(self, answer: Answer) -> dict[str, Any]:
        """One of ``choices`` of a whole answer."""
        ...

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What ``choices`` of the next events hold, one each; none where the piece shows nothing yet."""
        ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request to the API: what came, and the answers that it wants."""

    service: Service
    request: Request
    body: Wishes
    jobs: Sequence[Job]
    shape: Shape
    answer_id: str
    created: int
    ticket: Ticket


async def respond(
    service: Service, request: Request, body: Wishes, jobs: list[Job], shape: Shape, name: str
) -> Response:
    """Run the jobs and answer.

    Raises:
        ApiError: there is no room, or no engine; or it failed.
        UserError: the engine refused a request.
        EngineDied: it died meanwhile.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only with stream: true")
    engine = service.engine
    for job in jobs:
        if engine.is_open(job.request_id):
            raise invalid(REQUEST_ID, f"{job.request_id!r} is being answered; choose another")
    ticket = service.gate.admit(len(jobs))
    exchange = Exchange(service, request, body, jobs, shape, name, int(time.time()), ticket)
    if body.stream:
        return EventStream(_events(exchange), ticket)
    with ticket:
        try:
            return JSONResponse(await while_listening(request, _whole(exchange)))
        except ClientLeft:
            return Response(status_code=499)  # nobody reads it
        except AnswerFailed as error:
            raise ApiError(500, str(error)) from error


async def _whole(exchange: Exchange) -> dict[str, Any]:
    answers = [Answer(job) for job in exchange.jobs]
    async with aclosing(_pieces(exchange)) as stream:
        async for piece in stream:
            answers[piece.index].take(piece)
    whole = _envelope(exchange, exchange.shape.whole_object)
    whole["choices"] = [exchange.shape.choice(answer) for answer in answers]
    return whole | {"usage": _usage(exchange, answers)} | _metrics(exchange, answers)


async def _events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    options = exchange.body.stream_options or StreamOptions()
    answers = [Answer(job) for job in exchange.jobs]
    envelope = _envelope(exchange, exchange.shape.chunk_object)
    async with aclosing(_pieces(exchange)) as stream:
        async for piece in stream:
            answers[piece.index].take(piece)
            for choice in exchange.shape.chunks(piece):
                chunk = envelope | {"choices": [choice]}
                if options.continuous_usage_stats:
                    chunk["usage"] = _usage(exchange, answers)
                elif options.include_usage:
                    chunk["usage"] = None
                yield event(chunk)
    if options.include_usage:
        usage = {"choices": [], "usage": _usage(exchange, answers)}
        yield event(envelope | usage | _metrics(exchange, answers))
    yield DONE


async def _pieces(exchange: Exchange) -> AsyncGenerator[Piece, None]:
    service, ticket = exchange.service, exchange.ticket
    try:
        async with aclosing(pieces(service.engine, service.tokenizer, exchange.jobs)) as stream:
            async for piece in stream:
                if record := piece.record:
                    ticket.end(record.finish_reason)
                    if record.queue_ms is not None:
                        service.gate.learn((record.e2e_ms - record.queue_ms) / 1e3)
                yield piece
    except Exception as error:
        ticket.release(HOW_ENDED.get(type(error), "error"))
        raise


def _envelope(exchange: Exchange, kind: str) -> dict[str, Any]:
    return {
        "id": exchange.answer_id,
        "object": kind,
        "created": exchange.created,
        "model": exchange.service.model_name,
    }


def _usage(exchange: Exchange, answers: Sequence[Answer]) -> dict[str, int]:
    prompts = sum(len(job.prompt_token_ids) for job in exchange.jobs[:: exchange.body.n or 1])
    completion = sum(answer.num_tokens for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": completion, "total_tokens": prompts + completion}


def _metrics(exchange: Exchange, answers: Sequence[Answer]) -> dict[str, Any]:
    wanted = exchange.body.spec_metrics or exchange.service.config.spec_metrics
    record = answers[0].record
    if len(answers) > 1 or record is None or wanted == "off":
        return {}
    return {"metrics": request_metrics(record, wanted)}


def request_metrics(record: RequestRecord, wanted: SpecMetrics) -> dict[str, Any]:
    """VLLM's per-request ``metrics``, and ours beside it (docs/server.md). Times in milliseconds."""
    generation_ms, tokens = record.generation_ms, record.completion_tokens
    spec = record.spec
    if wanted == "summary":
        spec = {name: value for name, value in spec.items() if not name.startswith("per_step_")}
    return {
        "time_to_first_token_ms": record.time_to_first_token_ms,
        "generation_time_ms": generation_ms,
        "queue_time_ms": record.queue_ms,
        "mean_itl_ms": generation_ms / (tokens - 1) if generation_ms is not None and tokens > 1 else None,
        "tokens_per_second": record.tokens_per_second,
        "e2e_ms": record.e2e_ms,
        "num_preemptions": record.num_preemptions,
        "speculative_decoding": None if record.method == "none" else spec,
    }
