"""The line protocol between `tiercel bench peers` and a peer's driver, the driver's side.

A driver is a process in the peer's own environment. Each line is one JSON object. The first line it reads is `Settings`; it
answers with {"version": …} once the model is ready. Each further line is {"prompts": [[token ids], …], "max_tokens": n}, prompts
that are handed over together; it is answered by {"answers": [{"token_ids": […], "first_token_s": …, "total_s": …}, …]}: seconds
from the moment the peer was given the prompts. Anything that fails is answered by {"error": …} and ends the driver. The end of
input ends it too.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True)
class Settings:
    """How the peer is to run.

    Args:
        model: the .gguf file.
        variant: `plain` or `lookup` (the peer's own prompt lookup), one prompt at a time; or `batch`, many at once.
        threads: CPU threads, for prompt and decoding alike.
        max_context: one prompt and its answer have room in so many tokens.
        lookup_tokens: drafts per round of prompt lookup at most.
        max_prompts: prompts at once at most.
    """

    model: str
    variant: str
    threads: int
    max_context: int
    lookup_tokens: int
    max_prompts: int


class Reply(TypedDict):
    """An answer, timed by the driver."""

    token_ids: list[int]
    first_token_s: float
    total_s: float


Answer = Callable[[list[int], int], Reply]
"""Greedy: prompt token ids and the number of tokens wanted, to exactly so many tokens."""
AnswerMany = Callable[[list[list[int]], int], list[Reply]]
"""The same for prompts that are handed over together."""


def alone(answer: Answer) -> AnswerMany:
    """For peers, or ways of running them, that take one prompt at a time."""

    def answer_many(prompts: list[list[int]], max_tokens: int) -> list[Reply]:
        if len(prompts) != 1:
            raise ValueError(f"{len(prompts)} prompts at once, this way of running takes one")
        return [answer(prompts[0], max_tokens)]

    return answer_many


def serve(version: Callable[[], str], open_model: Callable[[Settings], AnswerMany]) -> None:
    """Run the driver: load, then answer until the input ends."""
    # Libraries write to standard output as they please: from here on that is the error stream, and the protocol has its own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        answer = open_model(Settings(**json.loads(sys.stdin.readline())))
        reply({"version": version()})
        for line in sys.stdin:
            request = json.loads(line)
            reply({"answers": answer(request["prompts"], request["max_tokens"])})
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        raise


def timed_stream(start: Callable[[], Iterable[int]], max_tokens: int) -> Reply:
    """Time a peer that hands out its tokens one by one: the first `max_tokens` of them."""
    begin = time.perf_counter()
    token_ids: list[int] = []
    first = 0.0
    for token in start():
        token_ids.append(token)
        if len(token_ids) == 1:
            first = time.perf_counter()
        if len(token_ids) == max_tokens:
            break
    return {"token_ids": token_ids, "first_token_s": first - begin, "total_s": time.perf_counter() - begin}


class FirstToken:
    """Times a peer that reports tokens to a listener: `seen` marks the first."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.first: float | None = None

    def seen(self) -> None:
        """A token has come."""
        if self.first is None:
            self.first = time.perf_counter()

    def reply(self, token_ids: list[int]) -> Reply:
        """All tokens are there."""
        end = time.perf_counter()
        if self.first is None:
            raise RuntimeError("no token was reported")
        return {"token_ids": token_ids, "first_token_s": self.first - self.begin, "total_s": end - self.begin}
