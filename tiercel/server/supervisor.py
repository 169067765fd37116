"""Keeps an engine running: starts its process, and again when it dies."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic

from tiercel.core.errors import TiercelError, UserError
from tiercel.server.engine_client import EngineClient, EngineDied
from tiercel.server.messages import EngineSettings, Ready, Stepped

logger = logging.getLogger(__name__)

MAX_DEATHS, DEATHS_WITHIN_S = 5, 300.0
"""An engine that dies so often within so long is not started again."""


class Supervisor:
    """The engine's process, and the one after it.

    Args:
        settings: what each is started with.
        restarts: start another when one dies.

    ``engine`` is the one in force, ``facts`` what it said when its model was loaded; ``num_deaths`` counts. ``on_step`` hears of
    every turn of the loop (see ``EngineClient``).
    """

    def __init__(self, settings: EngineSettings, *, restarts: bool) -> None:
        self._settings, self._restarts = settings, restarts
        self.on_step: Callable[[Stepped], None] = lambda _: None
        self._is_watched = False
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self.num_deaths = 0
        self.engine: EngineClient
        self.facts: Ready

    async def start(self) -> None:
        """Start the first process and wait until the model is loaded.

        Raises:
            UserError: the model, the draft or a setting cannot work.
            EngineDied: the process ended before.
        """
        self.engine = self._new_engine()
        try:
            self.facts = await self.engine.ready()
        except TiercelError:
            await self.engine.close()
            raise

    async def watch(self) -> None:
        """Have an engine run until one dies for good; cancelling this ends the watching, not the engine.

        Raises:
            EngineDied: it died, and is not started again.
        """
        while True:
            await self.engine.ended()
            self.num_deaths += 1
            code = await self.engine.close()
            logger.error("the engine's process has ended with exit code %s", code)
            self._deaths.append(monotonic())
            if not self._restarts:
                raise EngineDied(f"the engine's process has ended with exit code {code}")
            if len(self._deaths) == MAX_DEATHS and monotonic() - self._deaths[0] < DEATHS_WITHIN_S:
                raise EngineDied(f"the engine's process has died {MAX_DEATHS} times in {DEATHS_WITHIN_S:.0f} s")
            await self._restart()

    async def close(self) -> None:
        """End the engine in force."""
        await self.engine.close()

    def watch_steps(self, wanted: bool) -> None:
        """Have ``on_step`` get step records too, or no longer."""
        self._is_watched = wanted
        self.engine.watch(wanted)

    def _new_engine(self) -> EngineClient:
        return EngineClient(self._settings, lambda stepped: self.on_step(stepped))

    async def _restart(self) -> None:
        self.engine = self._new_engine()
        try:
            self.facts = await self.engine.ready()
            self.engine.watch(self._is_watched)
            logger.warning("the engine runs again")
        except EngineDied:
            pass  # counted by the caller's next turn
        except UserError as error:
            raise EngineDied(f"the engine cannot be started again: {error}") from error
        except asyncio.CancelledError:
            await self.engine.close()
            raise
