"""``POST /v1/completions``: texts or token ids, alone or in batches."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tiercel.models.tokenizer import Tokenizer
from tiercel.server.answers import respond
from tiercel.server.bodies import CompletionBody
from tiercel.server.generation import Answer, Piece
from tiercel.server.sampling import check_supported
from tiercel.server.service import Serving, request_id_of

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: Serving) -> Response:
    """Go on with a text."""
    service.check_model(body.model)
    check_supported(body)
    prompts = await asyncio.to_thread(_token_ids, service.tokenizer, body.prompt)
    name = f"cmpl-{request_id_of(request)}"
    jobs = service.jobs(body, prompts, name, request)
    echoed = [service.tokenizer.decode(job.prompt_token_ids) if body.echo else "" for job in jobs]
    return await respond(service, request, body, jobs, _TextShape(echoed), name)


def _token_ids(tokenizer: Tokenizer, prompt: str | Sequence[Any]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return [tokenizer.encode(one) if isinstance(one, str) else one for one in prompt]


class _TextShape:
    """Args: echoed: what comes before each answer."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, echoed: Sequence[str]) -> None:
        self._echoed = echoed
        self._pending = dict(enumerate(echoed))

    def choice(self, answer: Answer) -> dict[str, Any]:
        text = self._echoed[answer.job.index] + answer.text
        return _choice(answer.job.index, text, answer.finish_reason)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        text = self._pending.pop(piece.index, "") + piece.text
        if not text and piece.record is None:
            return []
        return [_choice(piece.index, text, piece.record.finish_reason if piece.record else None)]


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
