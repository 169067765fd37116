"""From settings to a server that runs until it is told to end."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from tiercel.core.errors import UserError
from tiercel.models.hub import resolve_model
from tiercel.models.opening import open_checkpoint
from tiercel.server.admission import Gate
from tiercel.server.app import make_app
from tiercel.server.config import ServerConfig
from tiercel.server.feed import Feed
from tiercel.server.messages import EngineSettings
from tiercel.server.metrics import ServerMetrics
from tiercel.server.service import Service
from tiercel.server.supervisor import Supervisor

KEEP_ALIVE_S = 75
"""An idle connection is kept so long: longer than the pools of usual clients keep theirs."""


def serve(settings: EngineSettings, config: ServerConfig, on_ready: Callable[[str, Service], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end.

    Args:
        settings: what the engine's process is started with.
        config: the HTTP side.
        on_ready: told the server's address once it answers.

    Raises:
        UserError: the address is taken, or the model, the draft or a setting cannot work.
        EngineDied: the engine died, and is not started again.
    """
    with _listen(config.host, config.port) as listener:
        uvicorn_config = uvicorn.Config("", loop="auto", log_level="warning")
        with asyncio.Runner(loop_factory=uvicorn_config.get_loop_factory()) as runner:
            runner.run(_serve(settings, config, listener, on_ready))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
        raise UserError(message) from error
    return listener


async def _serve(
    settings: EngineSettings, config: ServerConfig, listener: socket.socket, on_ready: Callable[[str, Service], None]
) -> None:
    checkpoint = await asyncio.to_thread(lambda: open_checkpoint(resolve_model(settings.engine.model)))
    supervisor = Supervisor(settings, restarts=config.on_engine_death == "restart")
    await supervisor.start()
    try:
        gate = Gate(supervisor.facts.num_slots, config.max_queue)
        name = config.served_model_name or supervisor.facts.model_name
        feed = Feed(supervisor, checkpoint.tokenizer)
        metrics = ServerMetrics(name, supervisor, gate)
        service = Service(config, supervisor, checkpoint.tokenizer, gate, feed, metrics, int(time.time()))
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        await _Server(service, lambda: on_ready(address, service)).run(listener)
    finally:
        await supervisor.close()


class _Server(uvicorn.Server):
    """Ends on the first signal once running requests have, on the second at once; and when the engine is dead for good."""

    def __init__(self, service: Service, on_listening: Callable[[], None]) -> None:
        config = uvicorn.Config(
            make_app(service),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
            lifespan="off",
        )
        super().__init__(config)
        self._service, self._draining, self._on_listening = service, asyncio.Event(), on_listening
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and only then say so: whoever reads the address may connect at once."""
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.gate.is_draining:
            self.should_exit = self.force_exit = sig == signal.SIGINT or self.should_exit
        self._service.gate.is_draining = True
        self._loop.call_soon_threadsafe(self._draining.set)

    async def run(self, listener: socket.socket) -> None:  # type: ignore[override]
        watching = asyncio.create_task(self._service.supervisor.watch())
        draining = asyncio.create_task(self._drain())
        serving = asyncio.create_task(self.serve([listener]))
        try:
            await asyncio.wait((watching, serving), return_when=asyncio.FIRST_COMPLETED)
            self.should_exit = True
            await serving
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            draining.cancel()

    async def _drain(self) -> None:
        await self._draining.wait()
        if not await self._service.gate.wait_empty(self._service.config.drain_s):
            self._service.supervisor.engine.abort_all()
            await self._service.gate.wait_empty(1.0)
        self._service.feed.close()
        self.should_exit = True
