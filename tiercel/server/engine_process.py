"""The engine's process: take commands, step, tell what came of it."""

import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import assert_never

from tiercel.core.errors import UserError
from tiercel.engine.engine import Engine
from tiercel.engine.outputs import StepOutput
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
    ReadMetrics,
    Ready,
    Refused,
    Reply,
    SetTraceLevel,
    StartProfile,
    Stepped,
    StopProfile,
    Tokens,
    Watch,
)
from tiercel.server.profiler import Profiler

IDLE_TURN_S = 0.25
"""With nothing to do the loop turns so often, so that a listener can tell idle from stuck."""


def run(pipe: "Connection[Event, Command]", settings: EngineSettings) -> None:
    """The process's main function: it ends with ``Close``, or when the other end of the pipe is gone."""
    # Ctrl-C reaches the whole terminal group: the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = Engine(settings.engine, settings.spec, settings.trace)
    except UserError as error:
        pipe.send(CannotStart(str(error)))
        return
    try:
        pipe.send(_ready(engine, settings))
        _Loop(engine, pipe).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the server is gone: nobody is left to answer
    finally:
        engine.close()


def _ready(engine: Engine, settings: EngineSettings) -> Ready:
    worker = engine.worker
    depths = f", {worker.depths} ({worker.depths.source})" if worker.depths else ""
    return Ready(
        model_name=engine.model_name,
        max_model_len=engine.max_model_len,
        max_request_len=min(engine.max_model_len, engine.kv.num_slots_total),
        vocab_size=engine.checkpoint.description.vocab_size,
        num_slots=settings.engine.max_batch_size,
        drafting=f"{worker.method}, {worker.num_steps} drafts per round at most{depths}",
        method=worker.method,
        num_steps=worker.num_steps,
    )


class _Loop:
    """Takes commands and steps, turn by turn."""

    def __init__(self, engine: Engine, pipe: "Connection[Event, Command]") -> None:
        self._engine, self._pipe = engine, pipe
        self._is_watched = False
        self._profiler = Profiler()

    def run(self) -> None:
        engine = self._engine
        while True:
            for command in self._waiting(0.0 if engine.has_work else IDLE_TURN_S):
                if isinstance(command, Close):
                    return
                self._obey(command)
            before = engine.last_step
            outputs = engine.step() if engine.has_work else []
            is_new = self._is_watched and engine.last_step is not before
            step = engine.last_step if is_new else None
            self._pipe.send(Stepped([_tokens(output) for output in outputs], engine.load(), step))

    def _waiting(self, patience_s: float) -> Iterator[Command]:
        while self._pipe.poll(patience_s):
            yield self._pipe.recv()
            patience_s = 0.0

    def _obey(self, command: Add | Abort | Watch | Ask) -> None:
        engine, pipe = self._engine, self._pipe
        if isinstance(command, Add):
            try:
                engine.add_request(
                    command.request_id,
                    command.prompt_token_ids,
                    command.sampling,
                    command.trace_headers,
                    command.timeout_s,
                )
            except UserError as error:
                pipe.send(Refused(command.request_id, str(error)))
        elif isinstance(command, Abort):
            if record := engine.abort(command.request_id):
                pipe.send(Stepped([Tokens(command.request_id, [], [], record)], engine.load()))
        elif isinstance(command, Watch):
            self._is_watched = command.wanted
        elif isinstance(command, Ask):
            try:
                pipe.send(Reply(command.number, self._answer(command.question)))
            except UserError as error:
                pipe.send(Reply(command.number, mistake=str(error)))
        else:
            assert_never(command)

    def _answer(self, question: Question) -> str:
        if isinstance(question, ReadMetrics):
            metrics = self._engine.pipeline.metrics
            return metrics.store.exposition()[0].decode() if metrics else ""
        if isinstance(question, SetTraceLevel):
            self._engine.pipeline.set_trace_level(question.level)
            return ""
        if isinstance(question, StartProfile):
            self._profiler.start()
            return ""
        if isinstance(question, StopProfile):
            return self._profiler.stop(Path(question.folder))
        assert_never(question)


def _tokens(output: StepOutput) -> Tokens:
    return Tokens(output.request.request_id, output.token_ids, output.sources, output.record, output.logprobs)
