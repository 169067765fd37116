"""The engine's process: take commands, step, tell what came of it."""

import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import assert_never

from tiercel.core.errors import UserError
from tiercel.engine.engine import Engine
from tiercel.engine.outputs import StepOutput
from tiercel.server.messages import (
    Abort,
    Add,
    CannotStart,
    Close,
    Command,
    EngineSettings,
    Event,
    Ready,
    Refused,
    Stepped,
    Tokens,
)

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
        pipe.send(Ready(engine.model_name, engine.max_model_len))
        _turn(engine, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the server is gone: nobody is left to answer
    finally:
        engine.close()


def _turn(engine: Engine, pipe: "Connection[Event, Command]") -> None:
    while True:
        for command in _waiting(pipe, 0.0 if engine.has_work else IDLE_TURN_S):
            if isinstance(command, Close):
                return
            _obey(engine, command, pipe)
        outputs = engine.step() if engine.has_work else []
        pipe.send(Stepped([_tokens(output) for output in outputs], engine.load()))


def _waiting(pipe: "Connection[Event, Command]", patience_s: float) -> Iterator[Command]:
    while pipe.poll(patience_s):
        yield pipe.recv()
        patience_s = 0.0


def _obey(engine: Engine, command: Add | Abort, pipe: "Connection[Event, Command]") -> None:
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
    else:
        assert_never(command)


def _tokens(output: StepOutput) -> Tokens:
    return Tokens(output.request.request_id, output.token_ids, output.sources, output.record)
