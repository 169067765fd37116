"""Log-probabilities as OpenAI writes them."""

from collections.abc import Sequence
from typing import Any

from tiercel.core.logprobs import TokenLogprobs
from tiercel.models.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text = _text(tokenizer, token_id)
        # A part of a character has no text of its own, and its bytes are not known here.
        return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}

    content = [
        shown(token.token_id, token.logprob) | {"top_logprobs": [shown(*one) for one in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion, whose first token begins ``offset`` characters into the answer.

    As with OpenAI, ``top_logprobs`` holds the chosen token beside the likeliest ones.
    """
    texts = [_text(tokenizer, token.token_id) for token in tokens]
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    top = [{_text(tokenizer, one): logprob for one, logprob in (*t.top, (t.token_id, t.logprob))} for t in tokens]
    logprobs = [token.logprob for token in tokens]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special=False)
