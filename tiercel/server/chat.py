"""``POST /v1/chat/completions``: conversations, put into words by the model's chat template."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tiercel.core.errors import UserError
from tiercel.core.logprobs import TokenLogprobs
from tiercel.models.tokenizer import Tokenizer
from tiercel.observability.records import RequestRecord
from tiercel.server.answers import respond
from tiercel.server.bodies import ChatBody
from tiercel.server.conversation import template_messages
from tiercel.server.errors import invalid
from tiercel.server.generation import Answer, Piece, how_ended
from tiercel.server.logprobs import chat_logprobs
from tiercel.server.sampling import check_supported
from tiercel.server.service import Service, Serving, request_id_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: Serving) -> Response:
    """Answer a conversation."""
    service.check_model(body.model)
    check_supported(body)
    if body.tools and body.tool_choice != "none":
        raise invalid("tools", "not supported by this model's chat template; leave them out")
    name = f"chatcmpl-{request_id_of(request)}"
    prompt = await asyncio.to_thread(_token_ids, service, body)
    jobs = service.jobs(body, [prompt], name, request)
    return await respond(service, request, body, jobs, _ChatShape(service.tokenizer), name)


def _token_ids(service: Service, body: ChatBody) -> list[int]:
    try:
        return service.tokenizer.encode_chat(template_messages(body.messages))
    except UserError as error:
        raise invalid("messages", str(error)) from error


class _ChatShape:
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def choice(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "index": answer.job.index,
            "message": message,
            "logprobs": self._shown(answer.logprobs),
            **how_ended(answer.record),
        }

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            chunks.append(_chunk(piece.index, {"role": "assistant", "content": ""}))
        if piece.text or piece.logprobs:
            chunks.append(_chunk(piece.index, {"content": piece.text}, logprobs=self._shown(piece.logprobs)))
        if piece.record is not None:
            chunks.append(_chunk(piece.index, {}, piece.record))
        return chunks

    def _shown(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, logprobs) if logprobs else None


def _chunk(
    index: int, delta: dict[str, Any], record: RequestRecord | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, **how_ended(record)}
