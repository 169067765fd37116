"""Texts of recorded tokens, from the tokenizer of the model that the records name."""

import unicodedata
from collections.abc import Sequence

from tiercel.core.errors import UserError
from tiercel.models.hub import resolve_model
from tiercel.models.opening import open_checkpoint
from tiercel.models.tokenizer import StreamDecoder, Tokenizer


class TokenTexts:
    """Opens each model's tokenizer once; a model that cannot be opened, or does not fit, has no texts and a note says why.

    Args:
        model: to be taken in place of every model that the records name, or None.
    """

    def __init__(self, model: str | None = None) -> None:
        self.model = model
        self.notes: list[str] = []
        self._tokenizers: dict[str, Tokenizer | None] = {}

    def of(self, model: str, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[str | None]:
        """What each token shows, newlines and control characters made visible; Nones without a tokenizer.

        Args:
            model: as recorded.
            token_ids: to be shown.
            before: tokens in front of them, on which the first one's text may depend.
        """
        tokenizer = self._tokenizer(model)
        if tokenizer is not None and max([*token_ids, *before], default=0) >= tokenizer.vocab_size:
            self._give_up(model, f"the records hold tokens beyond the vocabulary of {tokenizer.where}")
            tokenizer = None
        if tokenizer is None:
            return [None] * len(token_ids)
        decoder = StreamDecoder(tokenizer)
        for token_id in before:
            decoder.push(token_id)
        return [_shown(tokenizer, decoder, token_id) for token_id in token_ids]

    def _tokenizer(self, model: str) -> Tokenizer | None:
        if model not in self._tokenizers:
            try:
                self._tokenizers[model] = open_checkpoint(resolve_model(self.model or model)).tokenizer
            except UserError as error:
                if self.model:  # what the user names must work
                    raise
                self._give_up(model, str(error))
        return self._tokenizers[model]

    def _give_up(self, model: str, why: str) -> None:
        self._tokenizers[model] = None
        self.notes.append(f"tokens of {model} are shown as ids: {why} (--model names the model to take)")


def _shown(tokenizer: Tokenizer, decoder: StreamDecoder, token_id: int) -> str:
    if token_id in tokenizer.special_ids:
        return tokenizer.decode([token_id], skip_special=False)
    return "".join(map(_visible, decoder.push(token_id))) or "·"  # a part of a character shows with its last token


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎"
    return "␣" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
