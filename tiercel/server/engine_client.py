"""The engine's process as an asyncio server sees it: streams of tokens, and whether it lives."""

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncGenerator, Callable
from itertools import count
from queue import SimpleQueue
from time import monotonic

from tiercel.core.errors import TiercelError, UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.observability.metrics import Load
from tiercel.server import engine_process
from tiercel.server.messages import (
    Abort,
    Add,
    Ask,
    CannotStart,
    Close,
    Command,
    EngineSettings,
    Event,
    Question,
    Ready,
    Refused,
    Reply,
    Stepped,
    Tokens,
    Watch,
)

Answer = Tokens | Exception


class EngineDied(TiercelError):
    """The engine's process has ended while somebody counted on it."""


class EngineClient:
    """Starts the engine in a process of its own and talks to it. Every method is for the event loop's thread.

    ``last_turn`` is the ``time.monotonic`` of the last turn of the engine's loop that was heard of; ``load`` is from then.

    Args:
        settings: what the process is started with.
        on_step: hears of every turn of the loop, on the event loop's thread; see ``watch``.
    """

    def __init__(self, settings: EngineSettings, on_step: Callable[[Stepped], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        self._answers: dict[str, asyncio.Queue[Answer]] = {}
        self._replies: dict[int, asyncio.Future[str]] = {}
        self._numbers = count()
        self._ended = asyncio.Event()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self.load: Load | None = None
        self.last_turn = monotonic()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engine_process.run, args=(theirs, settings), name="tiercel-engine")
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._reader = threading.Thread(target=self._read, name="tiercel-engine-events", daemon=True)
        self._reader.start()
        # A full pipe must not hold up the event loop: the engine reads only between steps.
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="tiercel-engine-commands", daemon=True)
        self._writer.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._answers)

    @property
    def is_alive(self) -> bool:
        """Whether the model is loaded and the process still there."""
        return self._ready.done() and self._reader.is_alive()

    @property
    def step_age_s(self) -> float:
        """Seconds since the loop's last turn that was heard of."""
        return monotonic() - self.last_turn

    async def ready(self) -> Ready:
        """Wait until the model is loaded.

        Raises:
            UserError: the model, the draft or a setting cannot work.
            EngineDied: the process ended before.
        """
        return await asyncio.shield(self._ready)

    def is_open(self, request_id: str) -> bool:
        """Whether somebody waits for this request."""
        return request_id in self._answers

    def abort_all(self) -> None:
        """Abort what runs; the streams end with their records."""
        for request_id in list(self._answers):
            self._send(Abort(request_id))

    async def ended(self) -> None:
        """Wait until the process has ended, for whatever reason."""
        await self._ended.wait()

    async def ask(self, question: Question) -> str:
        """Have a question answered between two steps.

        Raises:
            UserError: it asks for what cannot be.
            EngineDied: the process has ended.
        """
        number = next(self._numbers)
        reply: asyncio.Future[str] = self._loop.create_future()
        self._replies[number] = reply
        try:
            self._send(Ask(number, question))
            return await reply
        finally:
            del self._replies[number]

    def watch(self, wanted: bool) -> None:
        """Have ``on_step`` get step records too, or no longer."""
        if self.is_alive:
            self._send(Watch(wanted))

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        trace_headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Tokens, None]:
        """Run a request; the last item carries its record. Leaving early, or being cancelled, aborts it.

        Raises:
            UserError: the request cannot run, or its id is in use.
            EngineDied: the process has ended.
        """
        if request_id in self._answers:
            raise UserError(f"request id {request_id!r} is in use: choose another")
        answers = self._answers[request_id] = asyncio.Queue()
        is_running = True
        try:
            self._send(Add(request_id, prompt_token_ids, sampling, trace_headers, timeout_s))
            while is_running:
                answer = await answers.get()
                is_running = isinstance(answer, Tokens) and answer.record is None
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            del self._answers[request_id]
            if is_running and self.is_alive:
                self._send(Abort(request_id))

    async def close(self, timeout_s: float = 10.0) -> int | None:
        """End the engine; what runs is aborted, traces and records are flushed. A process that does not end is killed.

        Returns:
            The process's exit code.
        """
        if self._reader.is_alive():
            self._send(Close())
        await asyncio.to_thread(self._process.join, timeout_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        await asyncio.to_thread(self._reader.join)
        self._outbox.put(None)
        await asyncio.to_thread(self._writer.join)
        self._pipe.close()
        return self._process.exitcode

    def _send(self, command: Command) -> None:
        if not self._reader.is_alive():
            raise EngineDied("the engine's process has ended")
        self._outbox.put(command)

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self._pipe.send(command)
            except OSError:
                return  # the process has ended, as the reader will say

    def _read(self) -> None:
        try:
            while True:
                self._loop.call_soon_threadsafe(self._take, self._pipe.recv())
        except (EOFError, ConnectionResetError):
            self._loop.call_soon_threadsafe(self._end)

    def _take(self, event: Event) -> None:
        self.last_turn = monotonic()
        if isinstance(event, Ready):
            self._ready.set_result(event)
        elif isinstance(event, CannotStart):
            self._ready.set_exception(UserError(event.message))
        elif isinstance(event, Refused):
            self._tell(event.request_id, UserError(event.message))
        elif isinstance(event, Reply):
            self._settle(event)
        else:
            self.load = event.load
            for tokens in event.tokens:
                self._tell(tokens.request_id, tokens)
            if self._on_step:
                self._on_step(event)

    def _settle(self, event: Reply) -> None:
        reply = self._replies.get(event.number)
        if reply is None or reply.done():  # whoever asked has left
            return
        if event.mistake is None:
            reply.set_result(event.text)
        else:
            reply.set_exception(UserError(event.mistake))

    def _tell(self, request_id: str, answer: Answer) -> None:
        waiting = self._answers.get(request_id)
        if waiting is not None:  # whoever left is not told
            waiting.put_nowait(answer)

    def _end(self) -> None:
        died = EngineDied("the engine's process has ended")
        if not self._ready.done():
            self._ready.set_exception(died)
        for waiting in self._answers.values():
            waiting.put_nowait(died)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(died)
        self._ended.set()
