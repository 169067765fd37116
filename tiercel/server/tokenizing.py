"""``POST /tokenize`` and ``/detokenize``."""

import asyncio
from typing import Any

from fastapi import APIRouter

from tiercel.core.errors import UserError
from tiercel.server.bodies import DetokenizeBody, TokenizeBody
from tiercel.server.conversation import template_messages
from tiercel.server.errors import invalid
from tiercel.server.service import Serving

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: Serving) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    service.check_model(body.model)
    tokenizer = service.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    try:
        if body.prompt is not None:
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt)
        else:
            tokens = await asyncio.to_thread(tokenizer.encode_chat, template_messages(body.messages or []))
    except UserError as error:
        raise invalid("prompt" if body.messages is None else "messages", str(error)) from error
    strings = [tokenizer.decode([token], skip_special=False) for token in tokens] if body.return_token_strs else None
    max_model_len = service.supervisor.facts.max_model_len
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: Serving) -> dict[str, str]:
    """Text of token ids, special tokens left out."""
    service.check_model(body.model)
    vocab_size = service.supervisor.facts.vocab_size
    if not all(0 <= token < vocab_size for token in body.tokens):
        raise invalid("tokens", f"token ids go from 0 to {vocab_size - 1}")
    return {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens)}
