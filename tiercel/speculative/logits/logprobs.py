"""Log-probabilities of chosen tokens, where a request asked for them."""

from collections.abc import Sequence

from torch import Tensor

from tiercel.core.logprobs import TokenLogprobs
from tiercel.speculative.logits.rows import RowSampling


def row_logprobs(
    logits: Tensor | None, rows: list[RowSampling], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """What each row's token has for a log-probability, from the model's own logits.

    Args:
        logits: float32 ``[rows, vocab]``; there if a row has ``num_logprobs``.
        rows: how each row chose.
        token_ids: what it chose, -1 where it could not.

    Returns:
        Per row; None where nobody asked, or nothing was chosen.
    """
    found: list[TokenLogprobs | None] = [None] * len(rows)
    for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        if row.num_logprobs is not None and logits is not None and token_id >= 0:
            logs = logits[index].log_softmax(-1)
            best = logs.topk(min(row.num_logprobs, len(logs)))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            found[index] = TokenLogprobs(token_id, float(logs[token_id]), top)
    return found
