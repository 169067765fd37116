"""Server-sent events, and answers that end when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tiercel.server.admission import Ticket
from tiercel.server.errors import as_api_error, error_body

Result = TypeVar("Result")

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event; ASCII JSON, since an answer may hold what has no UTF-8."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class EventStream(StreamingResponse):
    """Sends events while the client listens; then, however it ends, closes their source and gives the ticket back.

    A source that fails ends the stream with an event that holds OpenAI's error body, and without ``[DONE]``.
    """

    def __init__(self, source: AsyncGenerator[bytes, None], ticket: Ticket | None = None) -> None:
        super().__init__(_with_errors(source), media_type="text/event-stream", headers=HEADERS)
        self._source, self._ticket = source, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()
            if self._ticket:
                self._ticket.release()


async def _with_errors(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for data in source:
            yield data
    except Exception as error:
        yield event(error_body(as_api_error(error)))


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def while_listening(request: Request, work: Awaitable[Result]) -> Result:
    """Do the work, unless the client leaves before: then it is cancelled.

    Raises:
        ClientLeft: it left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
