"""``/metrics``: the engine's families, and the server's own, which go on counting when the engine is started again."""

import asyncio
from collections.abc import Iterator

from tiercel.core.errors import TiercelError
from tiercel.observability.metric_store import MetricStore, Reading
from tiercel.observability.metric_table import FINISH_REASONS, Family, Kind
from tiercel.server.admission import Gate
from tiercel.server.messages import ReadMetrics
from tiercel.server.supervisor import Supervisor

ENGINE_PATIENCE_S = 2.0
"""A scrape waits so long for the engine; then it shows the server's families alone."""

ENDS = (*FINISH_REASONS, "disconnected", "refused", "engine_died")
"""How an answer ends for the server: the engine's reasons, and those that the engine's own counts do not see."""

RESPONSES = Family(
    "tiercel:http_responses_total",
    Kind.COUNTER,
    "Responses begun, by route and status.",
    ("route", "status"),
)
RECEIVED = Family(
    "tiercel:answers_received_total",
    Kind.COUNTER,
    "Answers asked for and let in: n for each prompt of a request.",
)
ENDED = Family(
    "tiercel:answers_ended_total",
    Kind.COUNTER,
    "Answers that ended, by how; with the open ones they make up those received.",
    ("how",),
)
OPEN = Family("tiercel:answers_open", Kind.GAUGE, "Answers that run or wait.")
ENGINE_UP = Family(
    "tiercel:engine_up", Kind.GAUGE, "1 while the engine's process lives and its model is loaded, else 0."
)
ENGINE_DEATHS = Family("tiercel:engine_deaths_total", Kind.COUNTER, "Times that the engine's process has died.")
STEP_AGE = Family(
    "tiercel:engine_step_age_seconds",
    Kind.GAUGE,
    "Time since the engine's loop was last heard of; an idle one turns too.",
)
SERVER_FAMILIES = (RESPONSES, RECEIVED, ENDED, OPEN, ENGINE_UP, ENGINE_DEATHS, STEP_AGE)


class ServerMetrics:
    """Counts responses, and shows everything.

    Args:
        model: model name.
        supervisor: of the engine.
        gate: of the answers.
    """

    def __init__(self, model: str, supervisor: Supervisor, gate: Gate) -> None:
        self._supervisor, self._gate = supervisor, gate
        self._store = MetricStore(model, families=SERVER_FAMILIES)
        self._store.readers.append(self._read)

    def count_response(self, route: str, status: int) -> None:
        """A response has begun."""
        labels = (route, str(status))
        with self._store.lock:
            self._store.declare(RESPONSES, labels)
            self._store.add(RESPONSES, labels=labels)

    async def exposition(self) -> tuple[bytes, str]:
        """Body and content type of ``/metrics``."""
        own, content_type = self._store.exposition()
        try:
            async with asyncio.timeout(ENGINE_PATIENCE_S):
                engines = await self._supervisor.engine.ask(ReadMetrics())
        except (TimeoutError, TiercelError):
            engines = ""  # tiercel:engine_up and the step's age say why
        return engines.encode() + own, content_type

    def _read(self) -> Iterator[Reading]:
        supervisor, gate = self._supervisor, self._gate
        yield RECEIVED, (), gate.num_received
        for how in ENDS:
            yield ENDED, (how,), gate.ended[how]
        yield OPEN, (), gate.num_open
        yield ENGINE_UP, (), supervisor.engine.is_alive
        yield ENGINE_DEATHS, (), supervisor.num_deaths
        yield STEP_AGE, (), supervisor.engine.step_age_s
