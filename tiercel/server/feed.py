"""The rounds as they happen, for whoever watches (``/events``). While nobody does, the engine sends none of this."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tiercel.core.batch import RequestExtend, RequestRound, StepRecord
from tiercel.models.tokenizer import Tokenizer
from tiercel.observability.metrics import Load
from tiercel.server.messages import Stepped, Tokens
from tiercel.server.streaming import event
from tiercel.server.supervisor import Supervisor

ROOM = 1024
"""Events that may wait for a slow watcher; more are dropped, and counted in its next ``engine`` event."""
PULSE_S = 0.5
"""An ``engine`` event comes so often."""


@dataclass(eq=False)
class Watcher:
    """One who watches: everything, or one request."""

    request_id: str | None
    waiting: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(ROOM))
    num_dropped: int = 0

    def offer(self, data: bytes) -> None:
        """Queue an event, unless there is no room."""
        try:
            self.waiting.put_nowait(data)
        except asyncio.QueueFull:
            self.num_dropped += 1


class Feed:
    """Hands the engine's steps to its watchers.

    Args:
        supervisor: of the engine; asked for step records while there are watchers.
        tokenizer: puts tokens into text, each by itself.
    """

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer) -> None:
        self._supervisor, self._tokenizer = supervisor, tokenizer
        self._watchers: set[Watcher] = set()
        self._num_tokens = 0
        supervisor.on_step = self._take

    async def watch(self, request_id: str | None) -> AsyncGenerator[bytes, None]:
        """Events until the watcher leaves."""
        watcher = Watcher(request_id)
        self._watchers.add(watcher)
        self._supervisor.watch_steps(True)
        pulse = asyncio.create_task(self._pulse(watcher))
        try:
            while (data := await watcher.waiting.get()) is not None:
                yield data
        finally:
            pulse.cancel()
            self._watchers.discard(watcher)
            self._supervisor.watch_steps(bool(self._watchers))

    def close(self) -> None:
        """End every watcher's stream."""
        for watcher in self._watchers:
            while watcher.waiting.full():
                watcher.waiting.get_nowait()
            watcher.waiting.put_nowait(None)

    async def _pulse(self, watcher: Watcher) -> None:
        tokens, at = self._num_tokens, monotonic()
        while True:
            speed = (self._num_tokens - tokens) / max(monotonic() - at, 1e-9)
            tokens, at = self._num_tokens, monotonic()
            watcher.offer(event(self._engine(speed, watcher.num_dropped), "engine"))
            await asyncio.sleep(PULSE_S)

    def _engine(self, tokens_per_second: float, num_dropped: int) -> dict[str, Any]:
        engine = self._supervisor.engine
        load = engine.load or Load()
        return {
            "is_alive": engine.is_alive,
            "step_age_s": round(engine.step_age_s, 3),
            "deaths": self._supervisor.num_deaths,
            **load._asdict(),
            "tokens_per_second": round(tokens_per_second, 1),
            "dropped": num_dropped,
        }

    def _take(self, stepped: Stepped) -> None:
        if not self._watchers:
            return
        self._num_tokens += sum(len(tokens.token_ids) for tokens in stepped.tokens)
        if stepped.step is not None:
            self._tell_step(stepped.step, {tokens.request_id: tokens for tokens in stepped.tokens})
        for tokens in stepped.tokens:
            if tokens.record is not None:
                data = event(_end(tokens), "end")
                for watcher in self._watchers:
                    if watcher.request_id in (None, tokens.request_id):
                        watcher.offer(data)

    def _tell_step(self, step: StepRecord, tokens: dict[str, Tokens]) -> None:
        parts = [self._extend(part, tokens) for part in step.extends] + [self._round(p, tokens) for p in step.rounds]
        head = {
            "step": step.step,
            "mode": step.mode.value,
            "start_ms": step.start_ns / 1e6,
            "end_ms": step.end_ns / 1e6,
            "stage_ms": {name: ns / 1e6 for name, ns in step.stage_ns.items()},
            "clock": step.clock,
        }
        whole = event(head | {"requests": parts}, "step")
        for watcher in self._watchers:
            if watcher.request_id is None:
                watcher.offer(whole)
            elif own := [part for part in parts if part["request_id"] == watcher.request_id]:
                watcher.offer(event(head | {"requests": own}, "step"))

    def _extend(self, part: RequestExtend, tokens: dict[str, Tokens]) -> dict[str, Any]:
        return {
            "request_id": part.request_id,
            "rows": [part.start, part.end],
            "tokens": self._delivered(tokens.get(part.request_id)),
        }

    def _round(self, part: RequestRound, tokens: dict[str, Tokens]) -> dict[str, Any]:
        drafts = [
            {**self._token(token, layer), "is_correct": place < part.num_correct_drafts}
            for place, (token, layer) in enumerate(zip(part.draft_token_ids, part.draft_layers, strict=True))
        ]
        return {
            "request_id": part.request_id,
            "round": part.round,
            "context_len": part.context_len,
            "drafts": drafts,
            "draft_parents": part.draft_parents,
            "num_correct_drafts": part.num_correct_drafts,
            "tokens": self._delivered(tokens.get(part.request_id)),
        }

    def _delivered(self, tokens: Tokens | None) -> list[dict[str, Any]]:
        return [] if tokens is None else list(map(self._token, tokens.token_ids, tokens.sources))

    def _token(self, token_id: int, source: int) -> dict[str, Any]:
        return {"id": token_id, "text": self._tokenizer.decode([token_id], skip_special=False), "source": source}


def _end(tokens: Tokens) -> dict[str, Any]:
    record = tokens.record
    assert record is not None
    return {
        "request_id": tokens.request_id,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "time_to_first_token_ms": record.time_to_first_token_ms,
        "e2e_ms": record.e2e_ms,
        "tokens_per_second": record.tokens_per_second,
        "speculative_decoding": record.spec,
    }
