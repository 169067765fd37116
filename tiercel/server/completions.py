"""``POST /v1/completions``: texts or token ids, alone or in batches."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tiercel.core.logprobs import TokenLogprobs
from tiercel.models.tokenizer import Tokenizer
from tiercel.observability.records import RequestRecord
from tiercel.server.answers import respond
from tiercel.server.bodies import CompletionBody
from tiercel.server.generation import Answer, Piece, how_ended
from tiercel.server.logprobs import text_logprobs
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
    return await respond(service, request, body, jobs, _TextShape(service.tokenizer, echoed), name)


def _token_ids(tokenizer: Tokenizer, prompt: str | Sequence[Any]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return [tokenizer.encode(one) if isinstance(one, str) else one for one in prompt]


class _TextShape:
    """Args: tokenizer: names tokens. echoed: what comes before each answer."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoed: Sequence[str]) -> None:
        self._tokenizer, self._echoed = tokenizer, echoed
        self._pending = dict(enumerate(echoed))
        self._offsets = [0] * len(echoed)

    def choice(self, answer: Answer) -> dict[str, Any]:
        text = self._echoed[answer.job.index] + answer.text
        return _choice(answer.job.index, text, answer.record, self._shown(answer.job.index, answer.logprobs))

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        text = self._pending.pop(piece.index, "") + piece.text
        if not text and not piece.logprobs and piece.record is None:
            return []
        shown = self._shown(piece.index, piece.logprobs)
        return [_choice(piece.index, text, piece.record, shown)]

    def _shown(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        shown = text_logprobs(self._tokenizer, logprobs, self._offsets[index])
        self._offsets[index] += sum(map(len, shown["tokens"]))
        return shown


def _choice(index: int, text: str, record: RequestRecord | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, **how_ended(record)}
