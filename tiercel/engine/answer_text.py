"""The text of an answer, token by token, up to where it stops."""

from collections.abc import Sequence

from tiercel.core.request import FinishReason
from tiercel.core.sampling_params import SamplingParams
from tiercel.models.tokenizer import StreamDecoder, Tokenizer
from tiercel.observability.records import RequestRecord


class AnswerText:
    """Turns tokens into text for whoever reads along: never half a character, and nothing of a stop text that may be coming.

    The engine watches an answer with one of these, and whoever shows it has another: same tokens, same text. Of several stop
    texts the one that is complete first counts, of those complete at once the longest, however the text is cut into tokens.

    Args:
        tokenizer: decodes.
        sampling: what stops the answer; a stop text counts if a token after the first ``min_tokens`` completes it.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops, self._keeps_stop = sampling.stop, sampling.include_stop_str_in_output
        self._num_deaf = sampling.min_tokens
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Text that can be shown now that ``token_id`` is there."""
        self._num_deaf -= 1
        return self._take(self._decoder.push(token_id))

    def finish(self) -> str:
        """Text that was held back, now that no token follows; an incomplete character shows as U+FFFD."""
        shown = self._take(self._decoder.finish())
        held, self._held = self._held, ""
        return shown + ("" if self._keeps_stop else held)

    def take(self, token_ids: Sequence[int], record: RequestRecord | None) -> list[str]:
        """Text for each of the tokens, and once the answer has ended, which ``record`` says, one more for what was held back.

        A token that ends the answer has no text, unless ``include_stop_str_in_output`` keeps it.
        """
        if record is None:
            return list(map(self.push, token_ids))
        ends_by_token = record.finish_reason == FinishReason.STOP and not isinstance(record.stop_reason, str)
        if ends_by_token and not self._keeps_stop:
            return [*map(self.push, token_ids[:-1]), "", self.finish()]
        return [*map(self.push, token_ids), self.finish()]

    def _take(self, fresh: str) -> str:
        if not self._stops or not fresh:
            return fresh
        if self.stopped is not None:
            return ""
        text = self._held + fresh
        if self._num_deaf < 0:
            found = [(at + len(stop), at) for stop in self._stops if (at := self._find(stop, text)) >= 0]
            if found:
                end, start = min(found)
                self.stopped, held, self._held = text[start:end], self._held, ""
                return text[len(held) : end] if self._keeps_stop else text[:start]
        self._held = _may_begin(self._stops, text)
        return fresh if self._keeps_stop else text[: len(text) - len(self._held)]

    def _find(self, stop: str, text: str) -> int:
        """Where ``stop`` begins, if it ends in what is new; older text has been looked through."""
        return text.find(stop, max(0, len(self._held) - len(stop) + 1))


def _may_begin(stops: Sequence[str], text: str) -> str:
    """The longest end of ``text`` that is the beginning of a stop text."""
    longest = max(_overlap(stop, text) for stop in stops)
    return text[len(text) - longest :]


def _overlap(stop: str, text: str) -> int:
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
