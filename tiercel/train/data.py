"""Conversations to learn from: prompt and the target's own answer, as token ids."""

import gzip
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiercel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of prompt and answer; ``answer_start`` is the index of the first answer token.

    ``greedy`` says that the answer is the target's argmax at every position, so that it can measure greedy acceptance.
    """

    token_ids: tuple[int, ...]
    answer_start: int
    greedy: bool

    def __len__(self) -> int:
        return len(self.token_ids)


def read_conversations(paths: list[Path], vocab_size: int, max_length: int) -> list[Conversation]:
    """Read JSON lines (``.jsonl`` or ``.jsonl.gz``), one conversation each; longer ones are cut to ``max_length`` tokens, and
    those without an answer token by then are left out.

    A row holds ``prompt_token_ids`` and ``response_token_ids`` (integers) and, optionally, ``temperature``: 0 marks a
    greedy answer.

    Raises:
        UserError: naming file, line and field.
    """
    found: list[Conversation] = []
    for path in paths:
        found += [c for c in _read_file(path, vocab_size, max_length) if len(c) > c.answer_start]
    if not found:
        raise UserError(f"no conversation in {', '.join(map(str, paths))}: give JSON lines with the two token lists")
    return found


def _read_file(path: Path, vocab_size: int, max_length: int) -> Iterator[Conversation]:
    if not path.is_file():
        raise UserError(f"training data {path} is not a file")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield _conversation(line, f"{path}:{number}", vocab_size, max_length)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"training data {path} cannot be read: {error}") from error


def _conversation(line: str, where: str, vocab_size: int, max_length: int) -> Conversation:
    try:
        row = json.loads(line)
        prompt, answer = row["prompt_token_ids"], row["response_token_ids"]
        token_ids = (*prompt, *answer)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{where}: need a JSON object with prompt_token_ids and response_token_ids ({error})"
        ) from error
    if not prompt or not all(isinstance(t, int) and 0 <= t < vocab_size for t in token_ids):
        raise UserError(f"{where}: token ids must be integers below the target's vocabulary of {vocab_size}")
    return Conversation(token_ids[:max_length], len(prompt), greedy=row.get("temperature") == 0)


MIN_HELD_OUT = 16
"""Answer tokens of a conversation that can measure acceptance: shorter ones hold only a few rounds."""


def split_held_out(conversations: list[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """Set ``count`` greedy conversations aside for measuring, spread evenly over the data: (training, held out).

    Conversations whose prompt equals a held-out prompt leave the training part too.

    Raises:
        UserError: too few greedy answers that are long enough to measure on, or nothing is left to train on.
    """
    greedy = [c for c in conversations if c.greedy and len(c) - c.answer_start >= MIN_HELD_OUT]
    if len(greedy) < 2 * count:
        raise UserError(
            f"{len(greedy)} greedy answers (temperature 0) of at least {MIN_HELD_OUT} tokens cannot give {count} to hold "
            "out: add data, or hold out fewer"
        )
    held_out = greedy[:: len(greedy) // count][:count]
    prompts = {c.token_ids[: c.answer_start] for c in held_out}
    training = [c for c in conversations if c.token_ids[: c.answer_start] not in prompts]
    if not training:
        raise UserError("every conversation has the prompt of a held-out one, so none is left to train on: add data")
    return training, held_out


def draft_vocabulary(conversations: list[Conversation], size: int, vocab_size: int) -> Tensor:
    """Offsets ``d2t`` (int64 ``[size]``) of the ``size`` most frequent answer tokens, in ascending order of target id."""
    counts = Counter(token for c in conversations for token in c.token_ids[c.answer_start :])
    frequent = [token for token, _ in counts.most_common(size)]
    unseen = (token for token in range(vocab_size) if token not in counts)
    ids = sorted(frequent + [next(unseen) for _ in range(size - len(frequent))])
    return torch.tensor(ids) - torch.arange(size)


def token_batches(conversations: list[Conversation], tokens: int, seed: int) -> list[list[int]]:
    """Cut one epoch into batches of about ``tokens`` padded tokens of similar length, in a random order.

    Returns:
        Indices into ``conversations``; the same ``seed`` gives the same batches.
    """
    rng = random.Random(seed)
    order = sorted(range(len(conversations)), key=lambda i: (len(conversations[i]), rng.random()))
    batches: list[list[int]] = [[]]
    for index in order:
        if batches[-1] and (len(batches[-1]) + 1) * len(conversations[index]) > tokens:
            batches.append([])
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


def pad(conversations: list[Conversation]) -> Tensor:
    """Token ids padded with 0 on the right: int64 ``[batch, longest]``."""
    longest = max(map(len, conversations))
    return torch.tensor([c.token_ids + (0,) * (longest - len(c)) for c in conversations])
